"""The benchmark of the formats measures both arithmetics of every format, and refuses nonsense."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench/quantization.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_every_format_and_type_is_timed_in_c_and_in_torch(tmp_path):
    done = bench("--rows", "256", "--width", "512", "--rounds", "3", "--json", str(tmp_path / "times.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "times.json").read_text())
    assert [(row["format"], row["input"]) for row in rows] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("nvfp4", "4over6", "mxfp4", "mxfp8")
    ]
    for row in rows:
        assert 0 < row["native_quantize_ms"] < row["torch_quantize_ms"] and row["native_dequantize_ms"] > 0


def test_sizes_below_one_and_broken_rows_are_refused():
    assert bench("--rounds", "0").returncode == 2
    done = bench("--width", "40", "--rows", "2")
    assert done.returncode == 2 and "multiple of 16" in done.stderr
