"""The command that prints the machine's limits and choices."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_dmtd.platform import choices, machine, products

PATH = Path(__file__).parents[3] / "tools" / "bench" / "machine.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_machine", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"READ_BYTES": 8 << 20, "LOOP_REPEATS": 100_000, "WIDTH": {"cpu": 64}, "ROUNDS": 2}.items():
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(choices, "WIDTH", 32)
    monkeypatch.setattr(products, "_choices", products._choices.__wrapped__)
    return module


def test_limits_and_choices_are_printed_recorded_and_measured_again_on_request(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "machine.json"
    assert bench.main(["--threads", str(torch.get_num_threads()), "--json", str(out)]) == 0
    figures, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert figures["bytes_per_s"] > 0 and set(figures["flops_per_s"]) == {"float32", "bfloat16"}
    (record,) = (tmp_path / "megatron_dmtd" / "products").glob("*.json")
    assert f"recorded in {record}" in printed and len(figures["choices"]) == 18
    fields = json.loads(record.read_text())
    for choice in fields["choices"]:
        choice["gflops"] = {"torch": 12345.0}
    record.write_text(json.dumps(fields))
    assert bench.main([]) == 0 and "torch 12345" in capsys.readouterr().out
    assert bench.main(["--measure-again"]) == 0 and "torch 12345" not in capsys.readouterr().out


def test_no_threads_are_refused(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--threads", "0"]) == 2
    assert "--threads 0" in capsys.readouterr().err
