"""Tokens per second and MFU: what a log line says follows from its own figures, over a peak that the log names."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dmtd.architecture.flops import training_flops_per_token
from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import schedule_of
from megatron_dmtd.training.log import METRICS_FILE, read_metrics
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

pytestmark = pytest.mark.multiprocess


def _logged(config: Config) -> list[str]:
    """A run; what it printed."""
    import contextlib
    import io

    from tests.support.jobs import run_job

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_job(config)[0] == "done"
    return printed.getvalue().splitlines()


def _config(corpus: tuple[str, str], folder: Path, **logging: object) -> Config:
    config = tiny_config(training={"steps": 4}, data={"train": (corpus[0],)})
    return with_settings(config, logging={"dir": str(folder), "interval": 2} | logging)


def _lines(config: Config) -> list[dict[str, float]]:
    lines = read_metrics(Path(config.logging.dir) / METRICS_FILE)
    assert len(lines) == 2
    return lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_mfu_is_the_share_of_the_given_peak_of_all_ranks(ranks: int, corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, peak_tflops=0.25)
    printed = run_ranks(ranks, _logged, config)
    assert [line for line in printed[0] if "mfu is" in line] == [
        "mfu is the share of 0.25 TFLOP/s per process, as logging.peak_tflops says"
    ]
    per_token = training_flops_per_token(schedule_of(config.model, config.cycle), document_length=config.data.seq_length)
    for line in _lines(config):
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(4 * 32)
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * per_token / (ranks * 0.25e12))


def test_a_measured_peak_is_named_and_used(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, measure_peak=True)
    printed = run_ranks(2, _logged, config)
    (line,) = [line for line in printed[0] if "mfu is" in line]
    assert line.endswith(" TFLOP/s per process, measured now")
    peak = float(line.removeprefix("mfu is the share of ").split()[0])
    assert 1e-3 < peak < 1e3
    per_token = training_flops_per_token(schedule_of(config.model, config.cycle), document_length=config.data.seq_length)
    for one in _lines(config):
        assert one["mfu"] == pytest.approx(one["tokens_per_s"] * per_token / (2 * peak * 1e12), rel=1e-3)


def test_without_a_peak_there_is_no_mfu(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path)
    (printed,) = run_ranks(1, _logged, config)
    assert not any("mfu" in line for line in printed)
    assert all("mfu" not in line and line["tokens_per_s"] > 0 for line in _lines(config))
