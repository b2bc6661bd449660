"""Counts and times for Prometheus. What the engine already counts is read on request, not counted twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_dmtd.serving.worker import Worker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _EngineCounts(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        engine = self._worker.engine
        stats = engine.stats
        num_reused = engine.prefix_index.num_reused_tokens if engine.prefix_index else 0
        counts = (
            ("steps", stats.num_steps, "Steps of the engine"),
            ("parallel_passes", stats.num_parallel_passes, "Steps that read the parallel layers' weights"),
            ("generated_tokens", stats.num_new_tokens, "Tokens decoded"),
            ("preemptions", stats.num_preemptions, "Samples that had to give up their pages and began again, once finished"),
            ("reused_tokens", num_reused, "Prompt tokens found in a cache"),
        )
        for name, value, meaning in counts:
            yield CounterMetricFamily(f"dmtd_{name}", meaning, value=value)
        yield GaugeMetricFamily("dmtd_running", "Samples in the batch", value=self._worker.num_running)
        yield GaugeMetricFamily("dmtd_waiting", "Samples waiting for a place in the batch", value=self._worker.num_waiting)
        pages = GaugeMetricFamily("dmtd_free_pages", "Pages of a key-value group that nobody uses", labels=["group"])
        for name, group in engine.store.groups.items():
            pages.add_metric([name], group.pages.num_free)
        yield pages


class Metrics:
    """The counts of one server."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCounts(worker))
        self.answers = Counter("dmtd_answers", "Answered requests, by status code", ["path", "status"], registry=self.registry)
        self.prompt_tokens = Counter("dmtd_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.first_token_s = self._seconds("dmtd_time_to_first_token_seconds", "From a request's arrival to its first token")
        self.request_s = self._seconds("dmtd_request_seconds", "From a request's arrival to its end")

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=_SECONDS, registry=self.registry)
