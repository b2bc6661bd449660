"""The step loop: all requests that are due go through the model together, and each gets its next token.

    scheduler -> planner -> runner -> sampler -> events

Shape legend: F rows whose logits are wanted, R rows of one prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megatron_dmtd.inference.completion import append, completed
from megatron_dmtd.inference.planner import StepPlan, plan_step
from megatron_dmtd.inference.requests import Completion, Event, FinishReason, Request
from megatron_dmtd.inference.runner import Runner
from megatron_dmtd.inference.sampler import Choice, choose, described
from megatron_dmtd.inference.scheduler import Scheduled, Scheduler
from megatron_dmtd.inference.stats import Stats


class StepLoop:
    """The unfinished requests of an engine, and the steps that decode them."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.stats = Stats()
        self.weights_version = 0
        """Version of the weights that the next step decodes with."""
        self._requests: dict[int, Request] = {}
        """Keyed by the identity of the scheduler's sequence."""

    def add(self, request: Request) -> None:
        """Queue one sample of a request that has passed the checks."""
        self._requests[id(request.sequence)] = request
        self.scheduler.add(request.sequence)

    def is_serving(self, request_ids: Collection[int]) -> bool:
        """Whether any of these requests is unfinished."""
        return any(request.request_id in request_ids for request in self._requests.values())

    def cancel(self, request_id: int) -> list[Completion]:
        """End every unfinished sample of a request, and free what it holds."""
        found = [request for request in self._requests.values() if request.request_id == request_id]
        return [self._finish(request, "cancelled") for request in found]

    def step(self) -> list[Event]:
        """One step. Returns the new tokens; none if nothing waits or runs."""
        step = self.scheduler.schedule()
        if not step:
            return []
        plan = plan_step(self.scheduler.method, [scheduled.chunk for scheduled in step])
        for scheduled in step:
            self.runner.set_pages(scheduled.sequence.slot, scheduled.sequence.tables)
        complete = [(row, self._request(part)) for row, part in zip(plan.last_rows, step) if part.is_complete]
        advancing = [request for _, request in complete if request.max_new_tokens]
        logits_FV = self._logits(plan, step, [row for row, request in complete if request.max_new_tokens])
        self.stats.count_step(step, ran_parallel=bool(len(plan.parallel)))
        self.scheduler.finish_step(step)
        events = [self._advance(request, choice) for request, choice in zip(advancing, _choices(logits_FV, advancing))]
        ended = [request for _, request in complete if not request.max_new_tokens]
        return events + [Event(one.request_id, one.sample, None, self._finish(one, "length")) for one in ended]

    def check_integrity(self) -> None:
        """Check every group of pages, and that nothing is held without a reason."""
        self.scheduler.store.check_integrity(self.scheduler.owned())
        assert len(self._requests) == len(self.scheduler.waiting) + len(self.scheduler.running)

    def _request(self, part: Scheduled) -> Request:
        return self._requests[id(part.sequence)]

    def _logits(self, plan: StepPlan, step: Sequence[Scheduled], last_rows: list[int]) -> torch.Tensor:
        """Logits `[F, V]` of `last_rows`. Prompts whose log probabilities are asked for are scored at the same time."""
        scored = self._scored_rows(plan, step)
        if not scored:
            return self.runner.run(plan, last_rows)
        rows = sorted({*last_rows, *(row for _, _, own in scored for row in own)})
        place, logits_FV = {row: index for index, row in enumerate(rows)}, self.runner.run(plan, rows)
        for request, start, own in scored:
            _score(request, start, logits_FV[place[own[0]] : place[own[0]] + len(own)])
        return logits_FV[[place[row] for row in last_rows]]

    def _scored_rows(self, plan: StepPlan, step: Sequence[Scheduled]) -> list[tuple[Request, int, range]]:
        """For prompts whose log probabilities are asked for: the first position that the step takes, and its rows from there."""
        found = []
        for last_row, part in zip(plan.last_rows, step):
            request, chunk = self._request(part), part.chunk
            first_row = last_row - (chunk.stop - chunk.start - 1)
            num_rows = min(chunk.stop, request.num_scored) - chunk.start
            if num_rows > 0:
                found.append((request, chunk.start, range(first_row, first_row + num_rows)))
        return found

    def _advance(self, request: Request, choice: Choice) -> Event:
        """Add a token to a request, and finish the request if it ends with it."""
        self.stats.num_new_tokens += 1
        text = request.text
        offset = 0 if text is None else text.num_characters
        request.weights_versions.append(self.weights_version)
        reason = append(request, choice)
        completion = self._finish(request, reason) if reason else None
        piece = "" if text is None else text.take()
        return Event(request.request_id, request.sample, choice, completion, piece, offset)

    def _finish(self, request: Request, reason: FinishReason) -> Completion:
        self.stats.num_preemptions += request.sequence.num_preemptions
        self.scheduler.remove(request.sequence)
        del self._requests[id(request.sequence)]
        return completed(request, reason)


def _choices(logits_FV: torch.Tensor, requests: Sequence[Request]) -> list[Choice]:
    if requests and all(request.params.is_plain_greedy for request in requests):
        return [Choice(token_id) for token_id in logits_FV.argmax(dim=-1).tolist()]
    return [
        choose(logits_V, request.params, request.sequence.tokens, request.prompt_length, sample=request.sample)
        for logits_V, request in zip(logits_FV, requests)
    ]


def _score(request: Request, start: int, logits_RV: torch.Tensor) -> None:
    """Note how likely the prompt's tokens after `start` are, given the logits of the rows from `start`."""
    targets = request.sequence.tokens[start + 1 : start + 1 + len(logits_RV)]
    assert request.params.prompt_logprobs is not None, "rows are scored where that is asked for"
    del request.prompt_logprobs[start:]  # of before a preemption
    request.prompt_logprobs += described(logits_RV, targets, num_top=request.params.prompt_logprobs)
