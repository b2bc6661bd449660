"""The branches for GPUs give what the CPU gives, and mix no devices: on a GPU that `support/pretend_gpu.py` pretends.

Level: fp32 rounding for losses (the order of sums differs), exact tokens in float64.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.tiny import tiny_model
from tests.inference.models import KINDS, NAMES, Pair
from tests.support import pretend_gpu
from tests.support.tiny import VARIANTS, write_corpus

ROOT = Path(__file__).parents[2]
STEPS = {"steps": 4, "eval_interval": 2}
RECOMPUTED = {"parallel": {"recompute": "full"}, "training": {"precision": "bf16", **STEPS}}
SPLIT = {"parallel": {"tensor": 2, "sequence_parallel": True, "recompute": "selective"}, "training": STEPS}
STAGES = {"parallel": {"pipeline": 2, "virtual_stages": 2}, "training": STEPS}
SHARDED = {
    "parallel": {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "training": {"precision": "bf16", **STEPS},
}


def _quick_first(*quick: str, of: Iterable[str]) -> list[Any]:
    """All of them, those that are not `quick` among the slow tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in of]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.version.cuda is not None:
        pytest.skip("torch's builds for CUDA bring the names that are pretended")
    return pretend_gpu.build(tmp_path_factory.mktemp("pretended"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        Pair(folder, kind)
    return folder


def _result(
    work: str, folder: Path, settings: dict[str, Any], library: Path | None, *, processes: int = 1, hidden: bool = True
) -> dict[str, Any]:
    """`hidden`: from a real GPU, if there is one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if hidden else {}
    environment |= {pretend_gpu.LIBRARY: str(library)} if library is not None else {}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [
        sys.executable,
        "-W",
        "ignore",
        *launcher,
        "-m",
        "tests.support.on_pretend_gpu",
        work,
        str(folder),
        json.dumps(settings),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((folder / "result.json").read_text())


def _curve(metrics: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    names = ("loss", "grad_norm", "eval_loss", "eval_loss_phase_3")
    return [(record["step"], name, record[name]) for record in metrics for name in names if name in record]


def _train(
    folder: Path,
    library: Path | None,
    variant: str,
    sections: dict[str, Any],
    processes: int = 1,
    *,
    hidden: bool = True,
) -> list[Any]:
    folder.mkdir(exist_ok=True)
    if not (folder / "train.bin").exists():
        write_corpus(folder / "train", num_documents=60)
        write_corpus(folder / "valid", num_documents=9, seed=1)
    settings = {"variant": variant, "sections": sections}
    result = _result("train", folder, settings, library, processes=processes, hidden=hidden)
    assert result["device"] == ("cpu" if library is None and hidden else "cuda:0")
    return _curve(result["metrics"])


def _assert_close(curve: list[Any], expected: list[Any], *, tolerance: float) -> None:
    assert [point[:2] for point in curve] == [point[:2] for point in expected]
    assert [point[2] for point in curve] == pytest.approx([point[2] for point in expected], abs=tolerance)


@pytest.mark.parametrize("variant", _quick_first("bidirectional-refresh", of=VARIANTS))
def test_training_saves_and_resumes_on_a_gpu_and_gives_the_curve_of_a_cpu(library: Path, tmp_path: Path, variant: str) -> None:
    curves = []
    for name, used in (("cpu", None), ("gpu", library)):
        for steps in (3, 5):  # the second goes on from the checkpoint of the first
            curve = _train(tmp_path / name, used, variant, {"training": {"steps": steps, "eval_interval": 2}})
        curves.append(curve)
    assert len(curves[0]) == 18
    _assert_close(curves[1], curves[0], tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_on_a_real_gpu_gives_the_curve_of_a_cpu(tmp_path: Path, variant: str, precision: str) -> None:
    sections = {"training": {"precision": precision, **STEPS}, "parallel": {"recompute": "full"}}
    curves = [_train(tmp_path / name, None, variant, sections, hidden=name == "cpu") for name in ("cpu", "gpu")]
    _assert_close(curves[1], curves[0], tolerance=0.02 if precision == "fp32" else 0.1)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variant", "sections", "processes"),
    [
        ("bidirectional-refresh", RECOMPUTED, 1),
        ("causal-refresh", SPLIT, 2),
        ("bidirectional-norefresh", STAGES, 2),
        ("bidirectional-refresh", SHARDED, 2),
    ],
    ids=["recompute-bf16", "tensor-sequence", "virtual-stages", "sharded-bf16"],
)
def test_layouts_on_gpus_give_the_curve_of_cpus(
    library: Path, tmp_path: Path, variant: str, sections: dict[str, Any], processes: int
) -> None:
    curves = [_train(tmp_path / name, used, variant, sections, processes) for name, used in (("cpu", None), ("gpu", library))]
    assert len(curves[0]) == 12
    is_bf16 = sections["training"].get("precision") == "bf16"
    _assert_close(curves[1], curves[0], tolerance=0.05 if is_bf16 else 1e-4)


def test_a_model_is_the_same_after_an_import_and_an_export_next_to_a_gpu(library: Path, tmp_path: Path) -> None:
    tiny_model("bidirectional-refresh", dtype=torch.float32).save_pretrained(tmp_path / "model")
    assert _result("convert", tmp_path, {}, library)["device"] == "cuda:0"
    source, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported"))
    assert source.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize("kind", _quick_first("bidirectional-refresh", "causal-norefresh", of=KINDS))
def test_decoding_on_a_gpu_gives_the_tokens_of_a_cpu_in_steps_that_graphs_can_record(
    library: Path, models: Path, tmp_path: Path, kind: str
) -> None:
    results = []
    for name, used in (("cpu", None), ("gpu", library)):
        shutil.copytree(models / kind, tmp_path / name / kind)
        results.append(_result("decode", tmp_path / name, {"kind": kind}, used))
    assert [result["device"] for result in results] == ["cpu", "cuda:0"]
    assert results[1]["tokens"] == results[0]["tokens"]
    assert results[1]["recorded"] > 500


@pytest.mark.parametrize("layers_on_first", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", _quick_first("causal-refresh", "bidirectional-norefresh", of=NAMES))
def test_a_model_spread_over_two_gpus_gives_what_it_gives_on_one_device(
    library: Path, models: Path, tmp_path: Path, kind: str, layers_on_first: int
) -> None:
    results = []
    for name, used in (("cpu", None), ("gpu", library)):
        shutil.copytree(models / kind, tmp_path / name / kind)
        results.append(_result("generate", tmp_path / name, {"kind": kind, "layers_on_first": layers_on_first}, used))
    assert [result["device"] for result in results] == ["cpu", "cuda:0"]
    assert results[1]["tokens"] == results[0]["tokens"]
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-10)
    for ours, expected in zip(results[1]["gradient"], results[0]["gradient"], strict=True):
        assert ours == pytest.approx(expected, abs=1e-10)
