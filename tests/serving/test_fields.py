"""Types of fields: JSON's numbers, prompts in their forms, and what asks for nothing."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_dmtd.serving.faults import RequestError
from megatron_dmtd.serving.fields import MAX_BIASED_TOKENS, Fields, LogitBias, Prompt, refuse_unless_silent


class Small(Fields):
    number: int = 3


@pytest.mark.parametrize("prompt", ["a", "", ["a", "b"], [[1], [2, 3]]])
def test_a_prompt_is_one_or_more_texts_or_lists_of_ids(prompt):
    assert TypeAdapter(Prompt).validate_python(prompt) == prompt


def test_ids_alone_are_one_prompt_and_may_be_written_with_a_point():
    assert TypeAdapter(Prompt).validate_python([1, 2.0]) == [[1, 2]]


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [[1], []], [1.5], [True], None, {"a": 1}])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValidationError, match="no list empty"):
        TypeAdapter(Prompt).validate_python(prompt)


def test_biases_are_numbers_by_token_id():
    assert TypeAdapter(LogitBias).validate_python({"7": 1, "0": -2.5}) == {7: 1.0, 0: -2.5}
    for wrong in ({"07": 1}, {"a": 1}, {"1": True}, {"1": "2"}):
        with pytest.raises(ValidationError, match="a number for each token id"):
            TypeAdapter(LogitBias).validate_python(wrong)
    with pytest.raises(ValidationError, match="at most 1024"):
        TypeAdapter(LogitBias).validate_python({str(token): 0 for token in range(MAX_BIASED_TOKENS + 1)})


def test_null_is_a_field_that_is_left_out_and_an_unknown_one_is_named():
    assert Small.model_validate({"number": None, "other": None}).number == 3
    with pytest.raises(ValidationError, match="an unknown field other"):
        Small.model_validate({"other": 1})


def test_values_that_ask_for_nothing_are_told_by_type_too():
    refuse_unless_silent("n", 1, (1,), param="n")
    refuse_unless_silent("n", None, (), param="n")
    for value in (True, 1.0, 2):
        with pytest.raises(RequestError) as refused:
            refuse_unless_silent("n", value, (1,), param="n")
        assert refused.value.param == "n"
