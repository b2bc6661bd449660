"""A rank that stalls is named and the job ends. Pure rules first, then real processes."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.training import exit_codes
from megatron_dmtd.training.health.watchdog import Sign, Watchdog, describe, suspects, watched
from tests.support.checkpoints import Job
from tests.support.tiny import tiny_config, with_settings


def _sign(rank: int, **values: Any) -> Sign:
    sign = Sign(
        rank=rank,
        host="h",
        pid=1,
        phase="step",
        step=3,
        beats=10,
        moved_at=1e9,
        told_at=1e9 + 8,
        line="x.py:1",
        waits=True,
        serial=5,
    )
    return replace(sign, **values)


def _later(signs: list[Sign | None]) -> list[Sign | None]:
    return [sign and replace(sign, serial=sign.serial + 1) for sign in signs]


def test_a_rank_that_has_fallen_silent_is_the_suspect() -> None:
    before: list[Sign | None] = [_sign(0), _sign(1, waits=False), _sign(2)]
    after = [*_later(before[:2]), before[2]]
    assert suspects(before, after) == ([2], "no sign of life: frozen, or gone")
    assert suspects(before, [*_later(before[:2]), None]) == ([2], "no sign of life: frozen, or gone")


def test_else_the_ranks_that_do_not_wait_for_others() -> None:
    before: list[Sign | None] = [_sign(0), _sign(1, waits=False), _sign(2)]
    assert suspects(before, _later(before)) == ([1], "not waiting for others")


def test_else_those_with_the_fewest_beats() -> None:
    before: list[Sign | None] = [_sign(0), _sign(1, beats=9), _sign(2)]
    assert suspects(before, _later(before)) == ([1], "the furthest behind")
    alike: list[Sign | None] = [_sign(0), _sign(1)]
    assert suspects(alike, _later(alike)) == ([0, 1], "all at the same place")


def test_a_report_says_since_when_a_rank_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process told its last sign when it had just moved: what it said then is not what is true now."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    alive = describe(0, _sign(0, told_at=1e9 + 300), is_named=False, now=1e9 + 305)
    assert alive == (
        "        rank 0 on h (process 1): no progress since 2001-09-09 01:46:40 (305 s) in phase 'step' after step 3, "
        "waits for others, at x.py:1"
    )
    frozen = describe(1, _sign(1, waits=False), is_named=True, now=1e9 + 305)
    assert frozen == (
        "STALLED rank 1 on h (process 1): no progress since 2001-09-09 01:46:40 (305 s) in phase 'step' after step 3, "
        "no sign of life since 2001-09-09 01:46:48 (297 s), at x.py:1"
    )
    monkeypatch.undo()
    time.tzset()


def test_reading_data_is_a_phase_of_its_own() -> None:
    watchdog = Watchdog(limit_s=0, rank=0, world_size=1)
    watchdog.start()
    watchdog.connect()
    iterator = watched(iter([1]), watchdog, phase="step", step=lambda: 4)
    assert next(iterator) == 1
    assert (watchdog._sign.phase, watchdog._sign.step, watchdog._sign.beats) == ("step", 4, 2)
    assert list(iterator) == []
    assert watchdog._sign.phase == "step: reading data"


def test_a_beat_may_ask_for_more_time_and_a_stopped_watchdog_ends_nothing() -> None:
    watchdog = Watchdog(limit_s=0.2, rank=0, world_size=1)
    watchdog.start()
    watchdog.beat("load", step=0, allowed_s=30.0)
    time.sleep(1.5)  # this process is still here
    watchdog.stop()
    watchdog.beat("step", step=0)
    time.sleep(1.5)
    assert watchdog._sign.told_at - watchdog._sign.moved_at > 1


_FAILS_AFTER_THE_REPORT = """
import time
from megatron_dmtd.training.health.watchdog import Watchdog

watchdog = Watchdog(limit_s=4.0, rank=0, world_size=1)
watchdog.start()
try:
    time.sleep({seconds})
    raise RuntimeError("connection closed by peer")
finally:
    watchdog.stop()
"""


@pytest.mark.parametrize("seconds", [4.8, 6.5])  # before the report, and between it and the end of the process
def test_a_main_thread_that_fails_while_the_watchdog_ends_the_job_does_not_get_ahead_of_it(seconds: float) -> None:
    program = _FAILS_AFTER_THE_REPORT.format(seconds=seconds)
    result = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode == exit_codes.STALLED, result.stderr
    assert "WATCHDOG rank 0" in result.stderr and "connection closed by peer" not in result.stderr


def _config(corpus: tuple[str, str], folder: Path, limit_s: float) -> Config:
    config = tiny_config(training={"watchdog_s": limit_s, "steps": 1000}, optimizer={"decay_steps": 10})
    return with_settings(config, data={"train": (corpus[0],)}, checkpoint={"dir": str(folder / "checkpoints")})


@pytest.mark.multiprocess
def test_a_frozen_rank_is_named_with_its_stack_and_the_job_ends(
    corpus: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", "freeze 1 3")
    with Job(_config(corpus, tmp_path, 8.0), tmp_path, ranks=2, program=("tests/support/troubled_train.py",)) as job:
        statuses = job.wait()
    assert statuses[1] == exit_codes.STALLED, job.output(1)
    assert statuses[0] == exit_codes.STALLED, job.output(0)
    report = job.output(1)
    assert "WATCHDOG rank 1 on " in report
    assert "in phase 'step' after step 2" in report
    assert "stalled: rank 1 (not waiting for others)" in report
    assert "_freeze_for_ever" in report
    assert "thread MainThread:" in report and "thread signals:" in report, "the stack of each thread"
    other = job.output(0)
    assert "WATCHDOG rank 0 on " in other and "STALLED rank 1 on " in other
    assert "waits for others" in other
    for output in (report, other):
        (still_s,) = re.findall(r"STALLED rank 1 on .*: no progress since [-\d]+ [:\d]+ \((\d+) s\) in phase 'step'", output)
        assert 8 <= int(still_s) <= 8 + 8 + 4


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_rank_that_the_system_has_stopped_is_named_by_the_others(corpus: tuple[str, str], tmp_path: Path) -> None:
    with Job(_config(corpus, tmp_path, 8.0), tmp_path, ranks=2) as job:
        job.wait_for(lambda: "step 2/" in job.output())
        job.send(signal.SIGSTOP, 1)
        assert job.processes[0].wait(timeout=120) == exit_codes.STALLED, job.output(0)
        assert "stalled: rank 1 (no sign of life: frozen, or gone)" in job.output(0)
        told = re.findall(r"STALLED rank 1 on .*: no progress since \S+ \S+ \((\d+) s\) .*, at ", job.output(0))
        assert len(told) == 1 and int(told[0]) >= 8, job.output(0)
