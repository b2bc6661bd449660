"""The pages that a user reads: links lead somewhere, named files exist, cited sections can be followed, commands are possible."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
METHOD_MD = ROOT / "docs" / "method.md"
ARCHITECTURE_MD = ROOT / "docs" / "architecture.md"
#: a dated record: it names files as they were at the time of a measurement, and they may have moved since
LOG_MD = ROOT / "docs" / "log.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: files that may cite sections of docs/method.md
SOURCES = sorted(path for folder in ("megatron_dmtd", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))
FOLDERS = "tools|tests|docs|examples|megatron_dmtd"
FILE_TYPES = "py|c|md|yaml|toml|txt|sh|sbatch|env|png"
#: what commands write, not what the repository holds
WRITTEN_BY_COMMANDS = {"quickstart/report.md"}

NUMBERS = r"\d+(?:\.\d+)?(?:(?:, | and | to )\d+(?:\.\d+)?)*"
SECTIONS = re.compile(rf"\b[Ss]ections? ({NUMBERS})")
CITATION = re.compile(rf"method\.md\)?, sections? ({NUMBERS})")
OF_A_PAPER = re.compile(rf"arXiv:? ?\d{{4}}\.\d{{5}}, sections? ({NUMBERS})")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unwrapped(text: str) -> str:
    """The text with its line breaks, indentation and comment marks undone."""
    return re.sub(r"\s+(?:#:? )?", " ", text)


def numbered_headings(text: str) -> set[str]:
    return set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", text, re.MULTILINE))


def cited(numbers: str) -> set[str]:
    """`1.4 and 2 to 5` is 1.4, 2, 3, 4 and 5."""
    found = set(re.findall(r"\d+(?:\.\d+)?", numbers))
    for first, last in re.findall(r"(?<!\.)\b(\d+) to (\d+)", numbers):
        found |= {str(number) for number in range(int(first), int(last) + 1)}
    return found


def citations(text: str) -> set[str]:
    """Numbers of the sections of docs/method.md that a text cites."""
    return {number for numbers in CITATION.findall(unwrapped(text)) for number in cited(numbers)}


def sections_in_names(text: str) -> set[str]:
    """`test_lengths_are_those_of_section_7_3` names 7.3."""
    return {number.replace("_", ".") for number in re.findall(r"_section_(\d+(?:_\d+)?)", text)}


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    found: set[str] = set()
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = next(number for number in range(len(headings)) if (f"{slug}-{number}" if number else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def literal(name: str, path: Path) -> tuple[str, ...]:
    """The value that a module gives to a name, without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


def is_placeholder(name: str) -> bool:
    """Capitals stand for a name to be filled in."""
    return re.search(r"[A-Z]{4}", name.replace("README", "").replace("CHANGELOG", "")) is not None


def test_the_checks_see_what_they_look_for():
    assert numbered_headings("## 1. One\n### 1.2 Two\n## 30 days later\ntext 4. five") == {"1", "1.2", "30"}
    assert citations("(docs/method.md, sections 1.4 and 2 to 4)") == {"1.4", "2", "3", "4"}
    assert citations("# docs/method.md,\n# sections 6\n# to 8, then 99") == {"6", "7", "8"}
    assert citations("docs/method.md, section 1. Sections 6 to 7 are cited without their page") == {"1"}
    assert citations("([method.md](method.md), sections 7 and 9)") == {"7", "9"}
    assert sections_in_names("def test_of_section_7_3(): ...\ndef test_section_10_alone(): ...") == {"7.3", "10"}
    assert anchors("# A `b`, c\n## 7.3 Two-fold\n```\n# none\n```\n## 7.3 Two-fold") == {"a-b-c", "73-two-fold", "73-two-fold-1"}


def test_the_method_has_the_sections_of_the_specification():
    whole = {str(number) for number in range(1, 11)}
    parts = {1: 4, 3: 2, 6: 2, 7: 6, 8: 4}
    assert numbered_headings(METHOD_MD.read_text()) == whole | {
        f"{number}.{part}" for number, count in parts.items() for part in range(1, count + 1)
    }


def test_every_cited_section_of_the_method_exists():
    found = {path: citations(path.read_text()) | sections_in_names(path.read_text()) for path in [*SOURCES, *PAGES]}
    found[Path(__file__)] = set()
    sections = numbered_headings(METHOD_MD.read_text())
    assert {name_of(path): numbers - sections for path, numbers in found.items() if numbers - sections} == {}
    assert set().union(*found.values()) >= {"1.1", "1.4", "3.2", "6.1", "6.2", "7.2", "7.3", "7.4", "8.2", "10"}


@pytest.mark.parametrize("path", [path for path in SOURCES if path != Path(__file__)], ids=name_of)
def test_a_citation_names_its_page_or_paper(path):
    text = unwrapped(path.read_text())
    named = sorted([*CITATION.findall(text), *OF_A_PAPER.findall(text)])
    assert sorted(SECTIONS.findall(text)) == named


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    links = re.findall(r"\]\(([^):]+)\)", page.read_text())
    targets = [(link, (page.parent / link.split("#")[0]).resolve() if not link.startswith("#") else page) for link in links]
    assert not [link for link, target in targets if not target.exists()]
    with_anchor = [(link.split("#")[1], target) for link, target in targets if "#" in link]
    assert not [anchor for anchor, target in with_anchor if anchor not in anchors(target.read_text())]


@pytest.mark.parametrize("page", [page for page in PAGES if page != LOG_MD], ids=name_of)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*[\w/])", text))
    missing = {name for name in named if not (ROOT / name).exists()}
    # A room's file may be named without the package: `cycle/rule.py`.
    in_code = set(re.findall(rf"`((?:[\w.-]+/)+[\w.-]+\.(?:{FILE_TYPES}))`", text))
    missing |= {name for name in in_code if not any((folder / name).exists() for folder in (ROOT, ROOT / "megatron_dmtd"))}
    assert not {name for name in missing if not is_placeholder(name)} - WRITTEN_BY_COMMANDS
    assert named or in_code or "](" in text, "the page names nothing: the pattern is wrong"


def test_the_readme_names_every_room_and_every_command():
    text = (ROOT / "README.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "megatron_dmtd").glob("*/__init__.py")}
    assert not [room for room in rooms if f"megatron_dmtd/{room}/" not in text]
    assert not [path.name for path in (ROOT / "tools").glob("*.py") if path.name not in text]


def section_of(page: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_page_of_the_architecture_lists_the_rooms_in_their_order():
    order = literal("ORDER", ROOT / "tests" / "test_architecture.py")
    text = section_of(ARCHITECTURE_MD.read_text(), "Rooms")
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)}
    drawn = re.findall(r"\(?\w+\)?", re.sub(r"^\w+ ", "", text.split("```")[1].strip("\n"), flags=re.MULTILINE))
    assert tuple(rows) == order
    assert tuple(name.strip("()") for name in reversed(drawn)) == order
    exists = {room: bool(list((ROOT / "megatron_dmtd").glob(f"{room}/__init__.py"))) or room == "errors" for room in order}
    assert {name.strip("()"): not name.startswith("(") for name in drawn} == exists
    assert {room: not row.startswith("reserved: ") for room, row in rows.items()} == exists


LETTERS = dict(re.findall(r"^\| ([A-Z]) \| (.+) \|$", section_of(ARCHITECTURE_MD.read_text(), "Shape letters"), re.MULTILINE))


def words_in(text: str) -> set[str]:
    return set(re.findall(r"[a-z/-]{4,}", text))


def own_legend(source: str) -> list[tuple[str, str]]:
    """(letter, meaning) in the legend of a file's docstring: `B rows, M = H / G heads` is B, rows and M, heads."""
    found = re.search(r"Shape legend: (.+?)(?:\n\n|$)", ast.get_docstring(ast.parse(source)) or "", re.DOTALL)
    items = re.split(r"(?:[,;] |\. | and |^)(?=[A-Z] )", found[1].replace("\n", " ")) if found else []
    return [(match[1], match[2]) for item in items if (match := re.match(r"([A-Z])(?: = [A-Z] [/*]? ?\w)? ([a-z].*)", item))]


def shape_suffixes(source: str) -> set[str]:
    """`q_BHND` has the letters BHND; a digit stands for a size of its own."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {name for node in nodes for field in ("id", "arg", "attr") if isinstance(name := getattr(node, field, None), str)}
    parts = [name.rpartition("_") for name in names]
    return {last for first, _, last in parts if first and first.islower() and re.fullmatch(r"\d*[A-Z][A-Z\d]*", last)}


def test_the_legend_of_letters_is_read_as_files_write_it():
    assert len(LETTERS) > 15 and LETTERS["D"] == "head width"
    assert own_legend('"""Text.\n\nShape legend: B rows, M = H / G\nheads. Q queries and K keys (N or 2N), J blocks."""') == [
        ("B", "rows"),
        ("M", "heads"),
        ("Q", "queries"),
        ("K", "keys (N or 2N)"),
        ("J", "blocks."),
    ]
    assert shape_suffixes("q_BHND = self.cos_1D + MAX_T + hidden_sbh") == {"BHND", "1D"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_shape_letters_mean_what_the_one_legend_says(path):
    source = path.read_text()
    wrong = [(letter, said) for letter, said in own_legend(source) if not words_in(said) & words_in(LETTERS.get(letter, ""))]
    assert wrong == []
    assert {letter for suffix in shape_suffixes(source) for letter in re.sub(r"\d", "", suffix)} <= set(LETTERS)


def test_make_has_the_targets_that_pages_name():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for page in PAGES for target in re.findall(r"`?make ([a-z-]+)\b[`\s]", page.read_text())}
    assert {"quickstart", "test"} <= named & targets
    assert {name for name in named if name.startswith(("test", "quick", "check", "format"))} <= targets


COMMANDS = [
    path for folder in ("tools", "tools/bench") for path in (ROOT / folder).glob("*.py") if "__main__" in path.read_text()
]


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_a_command_runs_by_its_name(path):
    assert path.read_text().startswith("#!/usr/bin/env python3\n") and path.stat().st_mode & 0o111 == 0o111


def commands_printed(text: str) -> list[str]:
    """Lines of code that begin with a file of Python or bash."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text += "".join("\n" + re.sub(r"^", "    ", block, flags=re.MULTILINE) for block in fenced)
    return re.findall(r"^(?: {2,}|#? {3})(?:srun )?((?:[\w.]+/)*\w+\.(?:py|sh) +[^ ].*)$", text, re.MULTILINE)


def test_printed_commands_are_recognised():
    assert commands_printed("    tools/x.py merge A\n#   python tools/x.py a\n    srun x.py -a\n    x/y.py   what it holds") == [
        "tools/x.py merge A",
        "x.py -a",
        "x/y.py   what it holds",
    ]
    assert commands_printed("```bash\ntools/x.py -a\n```\n") == ["tools/x.py -a"]


@pytest.mark.parametrize("path", [*PAGES, *COMMANDS, *sorted((ROOT / "examples").rglob("*.s*"))], ids=name_of)
def test_printed_commands_run_as_printed(path):
    """They name their interpreter, so that the environment which is active counts."""
    printed = commands_printed(path.read_text())
    assert not [command for command in printed if re.match(r"\S+ +(-|[a-z]+ -|[A-Z])", command)], printed


PRINTING = [path for path in PAGES if path != LOG_MD] + COMMANDS
PRINTING += sorted((ROOT / "examples").rglob("*.s*")) + sorted((ROOT / "examples").rglob("*.yaml"))
SUBCOMMANDS = {
    "tools/replay.py": {"run", "example", "report", "pictures"},
    "tools/convert.py": {"import", "export", "inspect", "verify", "diff"},
    "tools/preprocess.py": {"verify", "inspect", "packing", "rows", "merge"},
    "tools/digests.py": {"record", "compare"},
}
_USE = re.compile(r"(?:^|[\s`(])(tools/(?:bench/)?\w+\.py)((?: [^`#\n|;]*)?)", re.MULTILINE)


def printed_uses(text: str) -> list[tuple[str, list[str]]]:
    """(tool, its words) of every printed command, joined over continued lines, without what follows a bare `--`."""
    joined = re.sub(r"\\\n\s*(?:#\s*)?", " ", text)
    return [(tool, re.split(r" -- |\s{4,}", words)[0].split()) for tool, words in _USE.findall(joined)]


@functools.cache
def help_of(*words: str) -> str:
    """What a tool, or its subcommand, says with --help."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, *words, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unknown_options(tool: str, words: list[str]) -> list[str]:
    """Options of a printed command that its tool does not have."""
    subcommand = [word for word in words[:1] if word in SUBCOMMANDS.get(tool, ())]
    known = set(re.findall(r"--[\w.-]+", help_of(tool, *subcommand))) | {"--help"}
    options = {match[0] for word in words if (match := re.match(r"--\w[\w.-]*", word.strip("'\"[]()")))}
    return sorted(option.rstrip(".") for option in options if option.rstrip(".") not in known)


def test_uses_of_tools_are_recognised():
    text = "    python tools/x.py export A --a 1 \\\n      --b   # why --c\n#   tools/bench/y.py --d=2 -- z.py --e\n"
    text += "see `tools/z.py --f`, --g"
    assert printed_uses(text) == [
        ("tools/x.py", ["export", "A", "--a", "1", "--b"]),
        ("tools/bench/y.py", ["--d=2"]),
        ("tools/z.py", ["--f"]),
    ]
    assert unknown_options("tools/convert.py", ["export", "a", "b", "--dtype", "x", "--variant", "y"]) == ["--variant"]
    assert unknown_options("tools/train.py", ["--config", "a", "--optimizer.lr", "--optimizer.rate"]) == ["--optimizer.rate"]


@pytest.mark.parametrize("path", PRINTING, ids=name_of)
def test_options_and_recipes_of_printed_commands_exist(path):
    for tool, words in printed_uses(path.read_text()):
        assert unknown_options(tool, words) == [], (tool, words)
        recipes = [word for word in words if re.fullmatch(r"examples/[\w/.-]+\.(?:yaml|sbatch|sh)", word)]
        assert [recipe for recipe in recipes if not Path(ROOT / recipe).is_file()] == []
