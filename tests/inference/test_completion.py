"""When an output ends, and with which reason."""

import pytest

from megatron_dmtd.errors import DataError
from megatron_dmtd.inference.completion import append, completed, refused
from megatron_dmtd.inference.detokenizer import Detokenizer, TokenDecoder
from megatron_dmtd.inference.requests import Request
from megatron_dmtd.inference.sampler import Choice
from megatron_dmtd.inference.sampling_params import SamplingParams
from megatron_dmtd.inference.scheduler import Sequence
from tests.inference.tokenizers_in_memory import byte_level


@pytest.fixture(scope="module")
def decoder() -> TokenDecoder:
    return TokenDecoder(byte_level())


def request(*, limit: int = 10, text: Detokenizer | None = None, stop_ids: tuple[int, ...] = (), **params) -> Request:
    return Request(
        request_id=3,
        sample=1,
        prompt_length=2,
        max_new_tokens=limit,
        params=SamplingParams(**params),
        sequence=Sequence(tokens=[11, 12]),
        stop_ids=frozenset(stop_ids),
        text=text,
    )


def appended(made: Request, *token_ids: int) -> list[str | None]:
    """What each token gives, up to the one that ends the output."""
    reasons: list[str | None] = []
    for token_id in token_ids:
        if any(reasons):
            break
        reasons.append(append(made, Choice(token_id, logprob=-float(token_id))))
    return reasons


def ids_of(decoder: TokenDecoder, text: str) -> list[int]:
    return decoder.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_output_continues_until_its_length_or_a_stop_token():
    assert appended(request(limit=3), 5, 6, 7) == [None, None, "length"]
    stopped = request(limit=3, stop_ids=(6,))
    assert appended(stopped, 5, 6) == [None, "stop"]
    assert completed(stopped, "stop").token_ids == (5, 6), "the stop token is the last one"
    assert appended(request(limit=2, stop_ids=(6,)), 5, 6)[-1] == "stop", "the reason is not the length"


def test_a_stop_string_ends_the_output_where_it_is_complete_and_is_not_part_of_its_text(decoder):
    ids = ids_of(decoder, "the quick fox")
    made = request(limit=len(ids) + 5, text=Detokenizer(decoder, (), ["ck f"]))
    reasons = appended(made, *ids)
    assert reasons[-1] == "stop" and len(reasons) < len(ids)
    result = completed(made, "stop")
    assert result.text == "the qui" and result.finish_reason == "stop"


def test_a_stop_string_that_only_the_end_completes_is_found(decoder):
    """Half a character is given as a replacement when the output ends, and a stop string may name that."""
    half = ids_of(decoder, "日")[:1]
    made = request(limit=1, text=Detokenizer(decoder, (), ["\ufffd"]))
    assert appended(made, *half) == ["stop"]
    assert completed(made, "stop").text == ""


def test_log_probabilities_are_kept_only_if_asked_for():
    with_them, without = request(logprobs=0), request()
    appended(with_them, 5, 6)
    appended(without, 5, 6)
    with_them.weights_versions = [1, 2]
    result = completed(with_them, "length")
    assert [choice.token_id for choice in result.logprobs] == [5, 6] and completed(without, "length").logprobs == ()
    assert (result.prompt_ids, result.token_ids, result.text, result.weights_versions) == ((11, 12), (5, 6), None, (1, 2))
    assert (result.request_id, result.sample, result.refusal) == (3, 1, None)


def test_a_refused_request_has_its_reason_and_no_output():
    refusal = DataError(found="an empty prompt", required="a token", remedy="give one")
    result = refused(7, (), refusal)
    assert (result.request_id, result.finish_reason, result.token_ids, result.refusal) == (7, "refused", (), refusal)
