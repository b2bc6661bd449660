import dataclasses
import math

import pytest

from megatron_dmtd.config import Config, from_yaml, to_yaml, validate
from megatron_dmtd.config.metadata import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    Resume,
    fixed,
    may_change,
    nested,
    setting,
    settings,
)
from megatron_dmtd.errors import ConfigError
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        (POSITIVE, (1, 1e-30), (0, -1), "above 0"),
        (NOT_NEGATIVE, (0, 0.0, 1), (-1, -1e-30), "at least 0"),
        (FRACTION, (0, 0.999), (1, -0.1), "at least 0 and below 1"),
        (Range(low=2, includes_low=False, high=5), (3, 4), (2, 5), "above 2 and below 5"),
    ],
)
def test_a_range_holds_what_its_words_say(
    limits: Range, inside: tuple[float, ...], outside: tuple[float, ...], words: str
) -> None:
    assert all(map(limits.holds, inside))
    assert not any(map(limits.holds, (*outside, math.nan, math.inf, -math.inf)))
    assert str(limits) == words


@dataclasses.dataclass(frozen=True)
class _Inner:
    factor: float = 1.0
    """Nothing said of its own."""
    size: int = setting(3, POSITIVE, resume=may_change("it is small"))


@dataclasses.dataclass(frozen=True)
class _Outer:
    first: tuple[int, ...] = setting((1, 2), POSITIVE, resume=fixed("another"))
    inner: _Inner = nested(_Inner, resume=fixed("whole"))


def test_a_field_has_its_default_and_a_section_inside_a_section_its_rule() -> None:
    assert _Outer() == _Outer(first=(1, 2), inner=_Inner(factor=1.0, size=3))
    found = {one.key: one for one in settings(_Outer)}
    assert list(found) == ["first", "inner.factor", "inner.size"]
    assert found["inner.factor"].resume == Resume(may_change=False, why="whole") and found["inner.factor"].range is None
    assert found["inner.size"].resume == Resume(may_change=True, why="it is small")
    assert found["inner.size"].value_in(_Outer(inner=_Inner(size=7))) == 7


def test_a_setting_without_a_rule_is_a_fault_of_ours() -> None:
    @dataclasses.dataclass
    class Careless:
        size: int = 3

    with pytest.raises(AssertionError, match="size has no rule for resumed runs"):
        list(settings(Careless))


def test_every_setting_has_a_rule_with_a_reason_and_every_number_a_range_or_a_reason_for_none() -> None:
    found = list(settings(Config))
    assert len(found) > 80
    assert all(one.resume.why for one in found)
    assert all(bool(one.resume.only_with) == bool(one.resume.why_only_with) for one in found)
    assert {one.resume.only_with for one in found} <= {"", *(one.key for one in found)}
    numbers = {one.key for one in found if not one.key.startswith("model.rope_scaling.")}
    numbers = {one.key for one in found if one.key in numbers and type(one.value_in(Config())) in (int, float)}
    # What `vanilla` ignores; and rotary scaling, whose numbers mean something for some of its kinds only
    assert {one.key for one in found if one.key in numbers and one.range is None} == {
        "cycle.num_parallel_layers",
        "cycle.mask_token_id",
    }


@pytest.mark.parametrize("one", [one for one in settings(Config) if one.range], ids=lambda one: one.key)
def test_validation_refuses_what_lies_below_each_range(one) -> None:  # type: ignore[no-untyped-def]
    section, name = one.key.split(".")
    value = -1.0 if isinstance(one.value_in(Config()), float) else -1
    changed = dataclasses.replace(
        getattr(tiny_config(), section), **{name: (value,) if isinstance(one.value_in(Config()), tuple) else value}
    )
    with pytest.raises(ConfigError, match=rf"{section}\.{name} = \[?-1") as caught:
        validate(dataclasses.replace(tiny_config(), **{section: changed}))
    assert str(one.range) in caught.value.required


@pytest.mark.parametrize("one", [one for one in settings(Config) if one.choices], ids=lambda one: one.key)
def test_validation_refuses_what_is_no_choice(one) -> None:  # type: ignore[no-untyped-def]
    config = tiny_config()
    *path, name = one.key.split(".")
    sections = [config]
    for part in path:
        sections.append(getattr(sections[-1], part))
    changed = dataclasses.replace(sections.pop(), **{name: "sideways"})
    for part in reversed(path):
        changed = dataclasses.replace(sections.pop(), **{part: changed})
    with pytest.raises(ConfigError, match=rf"{one.key} = 'sideways'\nrequired: one of {one.choices[0]}, "):
        validate(changed)


def test_a_configuration_of_an_earlier_version_reads_with_the_defaults_of_what_it_lacks(tmp_path) -> None:  # type: ignore[no-untyped-def]
    old = "".join(line for line in to_yaml(tiny_config()).splitlines(True) if "objective" not in line)
    (tmp_path / "config.yaml").write_text(old)
    assert from_yaml(tmp_path / "config.yaml") == tiny_config()
