"""The form of answers: JSON written in parts, and log probabilities that JSON can hold."""

import json
import math

import pytest

from megatron_dmtd.inference import Event
from megatron_dmtd.inference.sampler import Choice
from megatron_dmtd.serving.answers import Answer, Piece, Sample, Token, Usage, after, dumped, joined


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids, **_) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [], "b": {}, "c": None, 'é"\\': [1, 2.5, True, "é\n\U0001f642"]},
        [{"a": [{"b": [1] * 100}]}] * 3,
        [[index, {"a": index}] for index in range(1000)],
        "text",
    ],
)
def test_json_in_parts_is_json_at_once(value):
    assert dumped(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_what_json_cannot_hold_is_not_written():
    with pytest.raises(ValueError, match="JSON compliant"):
        dumped({"a": [math.nan]})


def test_tokens_whose_text_is_held_back_come_with_the_text_that_shows_them():
    sample = Sample()
    assert sample.add(Event(0, 0, Choice(1), None, "", 0)) is None
    piece = sample.add(Event(0, 0, Choice(2), None, "ab", 0))
    assert piece == Piece(text="ab", tokens=(Token(Choice(1), 0), Token(Choice(2), 0)), finish_reason=None)
    assert sample.num_tokens == 2


def test_an_impossible_token_has_a_number_that_json_has():
    likely = Choice(97, -0.5, ((97, -0.5), (98, -math.inf)))
    answer = Answer(tokenizer=Letters(), model="m", is_chat=True, with_logprobs=True)
    piece = Piece(text="a", tokens=(Token(likely, 0), Token(Choice(98, -math.inf, ()), 1)), finish_reason="stop")
    (choice,) = answer.whole([piece], Usage())["choices"]
    first, second = choice["logprobs"]["content"]
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -9999.0] and second["logprob"] == -9999.0
    assert json.loads(dumped(choice))["message"] == {"role": "assistant", "content": "a"}


def test_pieces_are_joined_in_order_and_offsets_follow_the_text_before():
    first = Piece(text="ab", tokens=(Token(Choice(1), 0),), finish_reason=None)
    second = Piece(text="c", tokens=(Token(Choice(2), 2),), finish_reason="stop")
    whole = joined([first, second])
    assert (whole.text, whole.finish_reason, [token.offset for token in whole.tokens]) == ("abc", "stop", [0, 2])
    assert [token.offset for token in after(first, second).tokens] == [0, 4]
