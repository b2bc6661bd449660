"""What a field of a section states about itself besides type and meaning: its range, and whether a resumed run may change it.

Each field states this once, next to its default (`setting`). Validation, `--help` and the comparison with a checkpoint's
configuration are derived from it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_KEY = "setting"


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Finite numbers between two bounds; of a list, every item."""

    low: float
    includes_low: bool
    high: float = math.inf
    """Exclusive."""

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range. NaN and infinity never do."""
        return (self.low < value or (self.includes_low and value == self.low)) and value < self.high

    def __str__(self) -> str:
        lower = f"at least {self.low:g}" if self.includes_low else f"above {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and below {self.high:g}"


POSITIVE = Range(low=0, includes_low=False)
NOT_NEGATIVE = Range(low=0, includes_low=True)
FRACTION = Range(low=0, includes_low=True, high=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Whether a run that resumes from a checkpoint may set a field differently."""

    may_change: bool
    why: str
    """The reason, as the message that announces or refuses a difference gives it."""
    only_with: str = ""
    """A boolean setting that must be true for the field to change; empty: none."""
    why_only_with: str = ""
    not_with: str = ""
    """A boolean setting with which the field may not change; empty: none."""
    why_not_with: str = ""


def may_change(why: str, *, only_with: str = "", why_only_with: str = "", not_with: str = "", why_not_with: str = "") -> Resume:
    """A rule that allows a difference."""
    return Resume(
        may_change=True,
        why=why,
        only_with=only_with,
        why_only_with=why_only_with,
        not_with=not_with,
        why_not_with=why_not_with,
    )


def fixed(why: str) -> Resume:
    """A rule that refuses a difference."""
    return Resume(may_change=False, why=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of the configuration, or of a section nested in it."""

    key: str
    """Dotted path from the section that was asked: `model.rope_scaling.factor` in a configuration, `rope_scaling.factor` in its
    model section."""
    range: Range | None
    choices: tuple[str, ...]
    """The values of a `Literal`; empty for other types."""
    resume: Resume

    def value_in(self, section: Any) -> Any:
        """Its value."""
        value = section
        for name in self.key.split("."):
            value = getattr(value, name)
        return value


def setting(default: T, range: Range | None = None, *, resume: Resume) -> T:
    """A field of a section. `range` applies to numbers, and to each item of a list."""
    found: Any = dataclasses.field(default=default, metadata={_KEY: (range, resume)})
    return typing.cast(T, found)


def nested(section: type[T], *, resume: Resume) -> T:
    """A section inside a section. Its fields need no rules of their own: the rule of the whole applies to each."""
    found: Any = dataclasses.field(default_factory=section, metadata={_KEY: (None, resume)})
    return typing.cast(T, found)


def settings(section: Any, *, prefix: str = "", inherited: Resume | None = None) -> Iterator[Setting]:
    """Every setting of a section or of a whole configuration, nested ones included, in order."""
    types = typing.get_type_hints(section)
    for item in dataclasses.fields(section):
        key = f"{prefix}{item.name}"
        range, resume = item.metadata.get(_KEY, (None, inherited))
        if dataclasses.is_dataclass(types[item.name]):
            yield from settings(types[item.name], prefix=f"{key}.", inherited=resume)
            continue
        assert resume is not None, f"{key} has no rule for resumed runs"
        is_choice = typing.get_origin(types[item.name]) is typing.Literal
        choices = typing.get_args(types[item.name]) if is_choice else ()
        yield Setting(key=key, range=range, choices=choices, resume=resume)
