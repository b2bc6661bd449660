"""The text of the quickstart: short stories made by a grammar from about 200 words, the same ones on every machine.

    python -m megatron_dmtd.quickstart.stories quickstart/data/stories.jsonl --count 16000

Real text needs hours before a small model writes a sentence; here minutes show what a model has learned, and what it has not: a
story keeps its names, pronouns, colours and numbers from its first sentence to its last. The number of possible stories is
astronomical, so that held-out ones are new. It is not a benchmark: losses say how models of one quickstart compare, nothing else.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.infra.files import replacing
from megatron_dmtd.infra.json_lines import to_line

#: of a name: she or he
NAMES = {"she": ("Mia", "Lily", "Anna"), "he": ("Tom", "Ben", "Max")}
FORMS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
ANIMALS = ("fox", "bear", "rabbit", "duck", "cat", "dog", "owl", "hedgehog")
TRAITS = ("little", "brave", "clever", "kind", "hungry", "old")
HOMES = ("forest", "village", "garden", "cave")
PLACES = ("river", "hill", "market", "bridge", "beach")
COLOURS = ("red", "blue", "green", "golden")
TOYS = ("ball", "kite", "boat", "drum", "hat")
FOOD = ("apple", "cake", "nut", "cookie", "berry")
HOBBIES = ("sing", "dance", "swim", "climb trees", "tell jokes", "count the stars")
WEATHER = ("sunny", "rainy", "windy", "cold")
TIMES = ("morning", "afternoon", "evening")
NUMBERS = ("no", "one", "two", "three", "four", "five")
SPOTS = ("hole", "tree", "bush", "net")
TOOLS = ("rope", "stick", "ladder", "basket")
MORALS = ("it is good to share", "a friend is worth more than gold", "you should never give up", "kind words cost nothing")
TITLES = ("Once upon a time", "Long ago")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Somebody in a story."""

    name: str
    animal: str
    trait: str
    nominative: str
    accusative: str
    possessive: str

    @property
    def kind(self) -> str:
        """`a brave fox`."""
        return with_article(f"{self.trait} {self.animal}")


def with_article(words: str) -> str:
    """`words` with the indefinite article that they need."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(number: int, noun: str) -> str:
    """`three apples`; a berry is one of several berries."""
    if number == 1:
        return f"one {noun}"
    return f"{NUMBERS[number]} {noun[:-1]}ies" if noun.endswith("y") else f"{NUMBERS[number]} {noun}s"


def capitalised(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[0].upper() + sentence[1:]


def _figures(draw: random.Random) -> tuple[Figure, Figure]:
    """Two figures that differ in name, animal and trait."""
    names = draw.sample([(name, pronoun) for pronoun, names in NAMES.items() for name in names], 2)
    animals, traits = draw.sample(ANIMALS, 2), draw.sample(TRAITS, 2)
    first, second = (
        Figure(
            name=name,
            animal=animal,
            trait=trait,
            nominative=FORMS[pronoun][0],
            accusative=FORMS[pronoun][1],
            possessive=FORMS[pronoun][2],
        )
        for (name, pronoun), animal, trait in zip(names, animals, traits)
    )
    return first, second


def _opening(draw: random.Random, hero: Figure) -> list[str]:
    home, (one, other) = draw.choice(HOMES), draw.sample(HOBBIES, 2)
    title = draw.choice(TITLES)
    first = draw.choice(
        (
            f"{title} there was {hero.kind} named {hero.name}.",
            f"{title} {hero.kind} lived in a {home}. {capitalised(hero.possessive)} name was {hero.name}.",
            f"{title} there lived {hero.kind} in a {home}. Everybody called {hero.accusative} {hero.name}.",
        )
    )
    second = draw.choice(
        (
            f"{hero.name} loved to {one} and to {other}.",
            f"Every {draw.choice(TIMES)} {hero.nominative} liked to {one}.",
            f"{capitalised(hero.nominative)} could {one} better than anybody else.",
        )
    )
    return [first, second]


def _meeting(draw: random.Random, hero: Figure, friend: Figure, place: str) -> str:
    return draw.choice(
        (
            f"There {hero.nominative} met {hero.possessive} friend {friend.name}, {friend.kind}.",
            f"At the {place} sat {friend.kind}. It was {friend.name}.",
            f"On the way {hero.nominative} saw {friend.name}, {friend.kind}.",
        )
    )


def _giving(draw: random.Random, hero: Figure, friend: Figure) -> list[str]:
    food, number = draw.choice(FOOD), draw.randint(2, 5)
    given = draw.randint(1, number - 1)
    left = number - given
    return [
        f"{hero.name} had {plural(number, food)} in {hero.possessive} bag.",
        f'"I am so hungry," said {friend.name}.',
        f"So {hero.name} gave {friend.accusative} {plural(given, food)}.",
        f"Now {hero.name} had {plural(left, food)} and {friend.name} had {plural(given, food)}.",
        draw.choice((f'"Thank you, {hero.name}!" said {friend.name}.', "They ate together and laughed.")),
    ]


def _losing(draw: random.Random, hero: Figure, friend: Figure) -> list[str]:
    thing, spot = f"{draw.choice(COLOURS)} {draw.choice(TOYS)}", draw.choice(SPOTS)
    return [
        f"{friend.name} was very sad.",
        f'"I have lost my {thing}," said {friend.name}. "I cannot find it."',
        f'"Do not cry," said {hero.name}. "I will help you to look for the {thing}."',
        f"They looked for a long time. At last {hero.name} found the {thing} in a {spot}.",
        draw.choice(
            (
                f"{friend.name} took the {thing} and jumped for joy.",
                f"{friend.name} was so happy that {friend.nominative} gave {hero.name} a kiss.",
            )
        ),
    ]


def _rescue(draw: random.Random, hero: Figure, friend: Figure) -> list[str]:
    spot, tool = draw.choice(SPOTS), draw.choice(TOOLS)
    return [
        f"But {friend.name} was stuck in a {spot}.",
        f'"Help me, {hero.name}!" said {friend.name}. "I cannot get out of this {spot}."',
        f"{hero.name} ran home and came back with a {tool}.",
        f"With the {tool} {hero.nominative} pulled {friend.name} out of the {spot}.",
        draw.choice(
            (f'"You saved me," said {friend.name}.', f"{friend.name} was wet and tired, but {friend.nominative} was safe.")
        ),
    ]


def _contest(draw: random.Random, hero: Figure, friend: Figure) -> list[str]:
    place, prize = draw.choice(PLACES), f"{draw.choice(COLOURS)} {draw.choice(TOYS)}"
    winner, other = draw.sample((hero, friend), 2)
    return [
        f'"Let us run to the {place}," said {friend.name}. "The winner gets this {prize}."',
        f"They ran and ran. {other.name} was fast, but {winner.name} was faster.",
        f"{winner.name} came to the {place} first and won the {prize}.",
        draw.choice(
            (
                f"{other.name} was not angry. {capitalised(other.nominative)} laughed.",
                f'"You can play with the {prize} too," said {winner.name} to {other.name}.',
            )
        ),
    ]


def _making(draw: random.Random, hero: Figure, friend: Figure) -> list[str]:
    thing, colour = draw.choice(TOYS), draw.choice(COLOURS)
    return [
        f'"What are you doing?" asked {hero.name}.',
        f'"I am making a {thing}," said {friend.name}. "But I have no {colour} paint."',
        f'"I have {colour} paint at home," said {hero.name}. "You can have it."',
        f"So they painted the {thing} {colour}. It was the best {colour} {thing} of all.",
    ]


EVENTS: tuple[Callable[[random.Random, Figure, Figure], list[str]], ...] = (_giving, _losing, _rescue, _contest, _making)


def _ending(draw: random.Random, hero: Figure, friend: Figure) -> list[str]:
    return [
        draw.choice(
            (
                f"In the evening {hero.name} and {friend.name} went home.",
                f"From that day on {hero.name} and {friend.name} were best friends.",
                f"When the sun went down, {hero.name} the {hero.animal} and {friend.name} the {friend.animal} said goodbye.",
            )
        ),
        f"And {hero.name} knew that {draw.choice(MORALS)}.",
    ]


def story(draw: random.Random) -> str:
    """One story of two or three paragraphs."""
    hero, friend = _figures(draw)
    place = draw.choice(PLACES)
    walk = draw.choice(
        (
            f"One {draw.choice(WEATHER)} {draw.choice(TIMES)} {hero.name} went to the {place}.",
            f"One {draw.choice(TIMES)} {hero.nominative} walked to the {place} to {draw.choice(HOBBIES)}.",
        )
    )
    events = draw.sample(EVENTS, draw.choice((1, 2)))
    middle = [" ".join(event(draw, hero, friend)) for event in events]
    first = " ".join([*_opening(draw, hero), walk, _meeting(draw, hero, friend, place)])
    return "\n".join([first, *middle, " ".join(_ending(draw, hero, friend))]) + "\n"


def write_stories(path: Path, *, count: int, seed: int = 0) -> None:
    """Write `count` different stories to `path` as JSON lines with a field `text`."""
    draw, stories = random.Random(seed), dict[str, None]()
    while len(stories) < count:
        stories[story(draw)] = None
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "w") as file:
        file.writelines(to_line({"text": text}) for text in stories)


def main(argv: Sequence[str] | None = None) -> int:
    """The command in this module's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file to write (.jsonl)")
    parser.add_argument("--count", type=int, default=16_000, help="stories (default: %(default)s)")
    arguments = parser.parse_args(argv)
    write_stories(arguments.output, count=arguments.count)
    return 0


if __name__ == "__main__":
    main()
