import pytest

from megatron_dmtd.inference.requests import Event, Request
from megatron_dmtd.inference.sampler import Choice
from megatron_dmtd.inference.sampling_params import SamplingParams
from megatron_dmtd.inference.scheduler import Sequence


def request(*, reuses_prefix: bool = True) -> Request:
    return Request(
        request_id=3,
        sample=0,
        prompt_length=4,
        max_new_tokens=5,
        params=SamplingParams(),
        sequence=Sequence(tokens=[1, 2, 3, 4, 50, 60], reuses_prefix=reuses_prefix),
        stop_ids=frozenset(),
        text=None,
    )


def test_the_output_is_what_follows_the_prompt():
    assert (request().output, request().num_output) == ([50, 60], 2)


def test_prompts_whose_beginning_may_be_reused_are_not_scored():
    assert request().num_scored == 0
    assert request(reuses_prefix=False).num_scored == 3, "the first token has no likelihood"


def test_an_event_without_a_token_says_so():
    assert Event(3, 0, Choice(7), None).token_id == 7
    with pytest.raises(AssertionError, match="no token was asked for"):
        _ = Event(3, 0, None, None).token_id
