"""What version 0.1 wrote still loads: a checkpoint resumes, exports and starts new runs, an export decodes.

`older/` was made before decoders were values: four steps of a tiny `bidirectional-refresh` run, its corpus, and its export. The
figures of the fifth step are those of that version. Level: fp32 tolerance, since processors differ.
"""

import shutil
from pathlib import Path

import pytest
import torch

import megatron_dmtd.hf
from megatron_dmtd.config import Config, from_yaml
from megatron_dmtd.conversion.compare import compare
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.sources import open_source
from megatron_dmtd.inference import Engine
from tests.support.jobs import lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import with_settings

OLDER = Path(__file__).with_name("older")
STEP = "step_00000004"
FIFTH_STEP = {
    "loss": 3.4534361169144914,
    "loss_phase_0": 3.1330616907639937,
    "loss_phase_1": 3.7652847501966686,
    "loss_phase_2": 3.5072739124298096,
    "loss_phase_3": 3.482553720474243,
    "lr": 0.0006954058453981609,
    "grad_norm": 1.1998994367900664,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run that may be written to."""
    folder = tmp_path / "run"
    shutil.copytree(OLDER / STEP, folder / STEP)
    (folder / "latest").write_text(f"{STEP}\n")
    for name in ("corpus.bin", "corpus.idx"):
        shutil.copyfile(OLDER / name, tmp_path / name)
    return folder


def settings(run: Path, **checkpoint: str) -> Config:
    config = from_yaml(run / STEP / "config.yaml")
    return with_settings(
        config,
        data={"train": (str(run.parent / "corpus"),)},
        training={"steps": 5},
        checkpoint={"dir": str(run), **checkpoint},
        logging={"dir": str(run.parent / "log")},
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}, {"tensor": 1, "pipeline": 1}], ids=["1", "pipeline-2", "data-2"])
def test_a_run_goes_on_with_the_figures_of_its_own_version(run, parallel):
    ranks = 1 if not parallel else 2
    config = with_settings(settings(run), parallel=parallel)
    assert [ended for ended, _, _ in run_ranks(ranks, run_job, config)] == ["done"] * ranks
    (line,) = [line for line in lines_of(config) if "grad_norm" in line]
    assert line["step"] == 5
    assert {name: line[name] for name in FIFTH_STEP} == pytest.approx(FIFTH_STEP, rel=1e-5)


@pytest.mark.multiprocess
def test_its_weights_start_a_new_run(run):
    config = with_settings(
        settings(run), checkpoint={"dir": "", "init_from": str(run)}, training={"steps": 1}, optimizer={"warmup_steps": 0}
    )
    assert [ended for ended, _, _ in run_ranks(1, run_job, config)] == ["done"]
    (line,) = [line for line in lines_of(config) if "grad_norm" in line]
    assert line["loss"] < 3.65, "random weights give 3.68"


def test_its_checkpoint_and_its_export_are_one_model(run, tmp_path):
    export_hf(run, tmp_path / "out")
    import_hf(OLDER / "export", tmp_path / "start")
    for path in (tmp_path / "out", tmp_path / "start"):
        comparison = compare(open_source(OLDER / "export"), open_source(path))
        assert comparison.is_equal and comparison.num_equal == 24


def test_its_export_decodes_as_it_did():
    engine = Engine(OLDER / "export", device="cpu")
    found = [completion.token_ids for completion in engine.generate([[1, 2, 3, 4, 5], [7, 8]], max_new_tokens=10)]
    assert found == [(5,) * 10, (8,) * 10]
    with torch.no_grad():
        model = megatron_dmtd.hf.DMTDQwen3ForCausalLM.from_pretrained(OLDER / "export")
        assert model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, -1].argmax() == 5
