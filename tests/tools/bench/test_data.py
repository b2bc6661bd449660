import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import write_corpus

ROOT = Path(__file__).parents[3]


def _bench(*arguments: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, str(ROOT / "tools/bench/data.py"), *arguments, "--seq-length", "64", "--batches", "5"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}
    )
    return dict(json.loads(done.stdout))


def test_loading_is_compared_with_what_one_rank_of_a_logged_run_consumes(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", num_documents=200)
    log = tmp_path / "metrics.jsonl"
    rates = [1.0, 4000.0, 3000.0, 5000.0]  # the first line holds a compilation
    log.write_text("".join(json.dumps({"step": n, "tokens_per_s": rate}) + '\n{"step": 9}\n' for n, rate in enumerate(rates)))
    report = _bench("--prefix", prefix, "--log", str(log), "--data-parallel", "2", "--repeats", "2")
    assert sorted(report) == ["best-fit", "concatenate"]
    for figures in report.values():
        assert figures["step_tokens_per_s"] == 2000.0
        assert figures["times_faster_than_the_step"] == pytest.approx(figures["tokens_per_s_prefetch_0"] / 2000)
        assert figures["tokens_per_s_prefetch_2"] > 0 and figures["build_index_s"] > 0
