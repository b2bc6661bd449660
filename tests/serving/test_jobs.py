"""Requests in progress: closed once, whenever their clients disconnect. Answers are tested in test_app.py."""

import asyncio

import pytest

from megatron_dmtd.inference import SamplingParams
from megatron_dmtd.serving.answers import Answer
from megatron_dmtd.serving.faults import OverloadError
from megatron_dmtd.serving.jobs import Events, Job
from megatron_dmtd.serving.metrics import Metrics
from megatron_dmtd.serving.preparation import Prepared, Prompt
from megatron_dmtd.serving.requests import CompletionRequest


def job_of(served, num_prompts: int, **params) -> tuple[Job, Metrics]:
    prepared = Prepared(
        body=CompletionRequest.taken_from({"prompt": "ab"}),
        prompts=[Prompt([97, 98], "ab")] * num_prompts,
        params=SamplingParams(ignore_eos=True, detokenize=True, **params),
        max_new_tokens=400,
    )
    form = Answer(tokenizer=served.worker.engine.tokenizer, model="tiny", is_chat=False, with_logprobs=False)
    metrics = Metrics(served.worker)
    return Job(served.worker, metrics, prepared, form), metrics


def count_of(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name)


def test_a_client_that_goes_before_the_first_chunk_ends_its_request(served):
    before = served.worker.engine.stats.num_new_tokens

    async def use() -> Metrics:
        job, metrics = job_of(served, 2, n=2)
        await job.submit()

        async def receive() -> dict:
            return {"type": "http.disconnect"}

        async def send(_) -> None:
            await asyncio.sleep(60)  # to a client that reads nothing

        await Events(job, with_usage=False)({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        job.close()
        return metrics

    metrics = asyncio.run(use())
    served.until_idle()
    assert served.worker.engine.stats.num_new_tokens - before < 4 * 400
    assert count_of(metrics, "dmtd_request_seconds_count") == 1 and count_of(metrics, "dmtd_prompt_tokens_total") == 4


def test_of_several_prompts_all_are_queued_or_none(served):
    async def use() -> Metrics:
        job, metrics = job_of(served, 40, n=3)  # 120 outputs, where 64 may wait and 4 run
        with pytest.raises(OverloadError):
            await job.submit()
        return metrics

    metrics = asyncio.run(use())
    served.until_idle()
    assert count_of(metrics, "dmtd_prompt_tokens_total") == 0
