import pytest

from megatron_dmtd.errors import ModelError
from megatron_dmtd.families.fields import Fields


def faults_of(reader: Fields) -> list[str]:
    with pytest.raises(ModelError) as caught:
        reader.finish(required="something else")
    return caught.value.found.split("; ")


def test_every_field_that_says_something_must_be_taken():
    reader = Fields({"hidden_size": 8, "soft_cap": 30.0, "scales": [1], "off": False, "none": None, "_private": 3, "empty": {}})
    assert reader.integer("hidden_size") == 8
    assert faults_of(reader) == ["soft_cap 30.0", "scales [1]"]


def test_fields_without_effect_and_taken_ones_are_no_fault():
    reader = Fields({"use_cache": True, "eos_token_id": 2, "a": 1, "b": True})
    assert reader.integer("a") == 1 and reader.flag("b", False)
    reader.finish(required="nothing")


def test_null_is_a_value_of_its_own():
    reader = Fields({"window": None, "flag": None})
    assert reader.optional_integer("window", 4096) is None and reader.optional_integer("absent", 4096) == 4096
    assert reader.flag("flag", True)
    assert reader.number("absent", 0.5) == 0.5


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda reader: reader.integer("text"), "text '8', which is not an integer"),
        (lambda reader: reader.integer("yes"), "yes True, which is not an integer"),
        (lambda reader: reader.integer("absent"), "no absent"),
        (lambda reader: reader.number("text"), "text '8', which is not a number"),
        (lambda reader: reader.flag("one", False), "one 1, which is not true or false"),
        (lambda reader: reader.table("one"), "one 1, which is not an object"),
        (lambda reader: reader.strings("numbers"), "numbers [1], which is not a list of names"),
        (lambda reader: reader.require("one", accepted=(0, None)), "one 1"),
        (lambda reader: reader.require("yes", accepted=(False,)), "yes true"),
    ],
)
def test_what_is_not_of_its_type_is_a_fault(read, found):
    reader = Fields({"text": "8", "yes": True, "one": 1, "numbers": [1]})
    read(reader)
    assert reader.faults == [found]


def test_fields_of_an_inner_object_are_named_with_it():
    reader = Fields({"factor": "much"}, name="rope_parameters")
    reader.number("factor")
    assert reader.faults == ["rope_parameters.factor 'much', which is not a number"]
    assert reader.missing("theta") == ["no rope_parameters.theta"]
