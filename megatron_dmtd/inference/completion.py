"""How a request continues and ends: a new token, the reason to stop, and the result."""

from __future__ import annotations

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.inference.requests import Completion, FinishReason, Request
from megatron_dmtd.inference.sampler import Choice


def append(request: Request, choice: Choice) -> FinishReason | None:
    """Add a token to the output. Returns why the request ends with it; None if it continues."""
    request.sequence.tokens.append(choice.token_id)
    if request.params.logprobs is not None:
        request.logprobs.append(choice)
    text = request.text
    if text is not None:
        text.add(choice.token_id)
    is_full = request.num_output == request.max_new_tokens
    is_stopped = choice.token_id in request.stop_ids or (text is not None and text.found_stop)
    if text is not None and (is_full or is_stopped):
        text.finish()  # may complete a stop string
        is_stopped = is_stopped or text.found_stop
    return "stop" if is_stopped else "length" if is_full else None


def completed(request: Request, reason: FinishReason) -> Completion:
    """The result of a request that has ended."""
    output = tuple(request.output)
    return Completion(
        request_id=request.request_id,
        sample=request.sample,
        prompt_ids=tuple(request.sequence.tokens[: request.prompt_length]),
        token_ids=output,
        finish_reason=reason,
        text=None if request.text is None else request.text.finish(),
        logprobs=tuple(request.logprobs),
        prompt_logprobs=tuple(request.prompt_logprobs),
        weights_versions=tuple(request.weights_versions),
        usage=request.usage,
    )


def refused(request_id: int, prompt_ids: tuple[int, ...], refusal: DMTDError) -> Completion:
    """The result of a request that was refused."""
    return Completion(
        request_id=request_id, sample=0, prompt_ids=prompt_ids, token_ids=(), finish_reason="refused", refusal=refusal
    )
