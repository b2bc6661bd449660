"""The form of cache operations in a request."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_dmtd.serving.cache_fields import MAX_NUMBERS, Drops, MessageNumbers, Programs


def test_message_numbers_are_those_of_json():
    assert TypeAdapter(Drops).validate_python({"7": [3, 4.0], "0": []}) == {7: [3, 4], 0: []}
    assert TypeAdapter(MessageNumbers).validate_python([0, 2.0]) == [0, 2]
    assert TypeAdapter(Programs).validate_python([{"after": 1}]) == [{"after": 1}]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Drops, [[3, 4]], "an object of at most"),
        (Drops, {"07": [3]}, "not '07'"),
        (Drops, {"-1": [3]}, "not '-1'"),
        (Drops, {"٣": [3]}, "as names"),
        (Drops, {"7": 3}, "message numbers in 7, not 3"),
        (Drops, {"7": [3, "4"]}, "not '4' at index 1 in 7"),
        (Drops, {str(number): [] for number in range(MAX_NUMBERS + 1)}, "at most 4096"),
        (MessageNumbers, [True], "not True at index 0"),
        (MessageNumbers, [1.5], "not 1.5"),
        (MessageNumbers, [float("nan")], "not nan"),
        (MessageNumbers, [-1], "not -1"),
        (MessageNumbers, [0] * (MAX_NUMBERS + 1), "at most 4096"),
        (Programs, {"after": 1}, "a list of operations"),
    ],
)
def test_anything_else_is_refused_with_its_place(kind, value, said):
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(kind).validate_python(value)
