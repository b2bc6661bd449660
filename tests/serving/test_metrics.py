"""The page that Prometheus reads, from counts that are set here; `test_app.py` reads it from a server."""

from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatron_dmtd.inference.stats import Stats
from megatron_dmtd.serving.metrics import Metrics


def worker(*, prefix_index=None):
    groups = {name: SimpleNamespace(pages=SimpleNamespace(num_free=free)) for name, free in (("real", 7), ("shadow", 3))}
    stats = Stats(num_steps=10, num_parallel_passes=4, num_new_tokens=30, num_preemptions=1)
    engine = SimpleNamespace(stats=stats, prefix_index=prefix_index, store=SimpleNamespace(groups=groups))
    return SimpleNamespace(engine=engine, num_running=2, num_waiting=5)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_counts_of_the_engine_are_those_of_the_moment():
    served = worker(prefix_index=SimpleNamespace(num_reused_tokens=99))
    metrics = Metrics(served)
    found = samples(metrics)
    assert [found[f"dmtd_{name}_total",] for name in ("steps", "parallel_passes", "generated_tokens", "preemptions")] == [
        10,
        4,
        30,
        1,
    ]
    assert (found["dmtd_reused_tokens_total",], found["dmtd_running",], found["dmtd_waiting",]) == (99, 2, 5)
    assert (found["dmtd_free_pages", "real"], found["dmtd_free_pages", "shadow"]) == (7, 3)
    served.engine.stats.num_steps, served.num_running = 11, 0
    assert (samples(metrics)["dmtd_steps_total",], samples(metrics)["dmtd_running",]) == (11, 0)


def test_without_a_prefix_cache_nothing_is_reused():
    assert samples(Metrics(worker()))["dmtd_reused_tokens_total",] == 0


def test_answers_are_counted_by_path_and_status_and_times_in_buckets():
    metrics = Metrics(worker())
    for status in (200, 200, 422):
        metrics.answers.labels("/v1/completions", status).inc()
    metrics.first_token_s.observe(0.03)
    metrics.first_token_s.observe(400.0)
    found = samples(metrics)
    assert found["dmtd_answers_total", "/v1/completions", "200"] == 2
    assert found["dmtd_answers_total", "/v1/completions", "422"] == 1
    name = "dmtd_time_to_first_token_seconds"
    assert (found[f"{name}_bucket", "0.025"], found[f"{name}_bucket", "0.05"], found[f"{name}_bucket", "+Inf"]) == (0, 1, 2)
    assert (found[f"{name}_count",], found[f"{name}_sum",]) == (2, 400.03)


def test_two_servers_in_one_process_do_not_share_counts():
    first, second = Metrics(worker()), Metrics(worker())
    first.prompt_tokens.inc(5)
    assert samples(first)["dmtd_prompt_tokens_total",] == 5 and samples(second)["dmtd_prompt_tokens_total",] == 0
