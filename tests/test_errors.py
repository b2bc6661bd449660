import dataclasses
import pickle

import pytest

from megatron_dmtd import errors
from megatron_dmtd.errors import DataError, DMTDError, Refusal

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DMTDError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_was_found_what_is_required_and_what_to_do(kind):
    error = kind(found="3 heads", required="an even number", remedy="change num_heads")
    assert str(error) == "found: 3 heads\nrequired: an even number\nremedy: change num_heads"
    assert (error.found, error.required, error.remedy) == ("3 heads", "an even number", "change num_heads")
    assert isinstance(error, DMTDError) and len(KINDS) > 5


def test_no_part_of_a_message_can_be_left_out():
    with pytest.raises(TypeError, match="remedy"):
        DataError(found="x", required="y")  # type: ignore[call-arg]


def test_a_refusal_is_an_error_but_for_what_was_found_and_can_be_used_again():
    refusal = Refusal(DataError, required="a JSON object", remedy="write one")
    first, second = refusal("a list"), refusal("nothing")
    assert type(first) is DataError and first is not second
    assert str(second) == "found: nothing\nrequired: a JSON object\nremedy: write one"
    assert pickle.loads(pickle.dumps(refusal)) == refusal
    with pytest.raises(dataclasses.FrozenInstanceError):
        refusal.remedy = "x"  # type: ignore[misc]
