"""An export does all that a model of transformers does, in environments that do not know this project.

The quick test runs one variant under the installed transformers; the slow ones all four, and under the newest transformers 4.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.hf import DMTDQwen3ForCausalLM
from tests.support.environments import make_environment, run_alone
from tests.support.hf_models import random_hf_directory, save_tokenizer, small_model
from tests.support.tiny import VARIANTS

SCRIPT = Path(__file__).with_name("standalone_script.py")
TRANSFORMERS_4 = ("transformers<5", "huggingface-hub<1", "tokenizers<0.23", "datasets<5")


def make_export(folder: Path, variant: str) -> Path:
    cycle = CycleConfig(variant=variant, num_parallel_layers=2, mask_token_id=2)  # type: ignore[arg-type]
    tokenizer = save_tokenizer(folder / "tokenizer", vocab_size=300)
    tied = variant.startswith("causal")
    model = small_model(vocab_size=300, tie_word_embeddings=tied)
    random_hf_directory(folder / "hf", model, cycle=cycle, tokenizer_dir=tokenizer)
    import_hf(folder / "hf", folder / "start")
    export_hf(folder / "start", folder / "export")
    return folder / "export"


def check(python: Path, folder: Path, variant: str) -> str:
    """Run the script on an export of the variant, and compare what it computed with this project's own loading of it."""
    export = make_export(folder, variant)
    version = run_alone(python, SCRIPT, export, folder, cwd=folder).split()[-1]
    results = torch.load(folder / "results.pt")
    model = DMTDQwen3ForCausalLM.from_pretrained(export).eval()
    with torch.no_grad():
        logits = model(**results["batch"]).logits
    assert torch.equal(results["logits"], logits) and logits.std() > 0.2
    assert results["greedy"].shape == (3, 11)
    return version


def test_an_export_stands_alone(tmp_path):
    check(make_environment(tmp_path / "environment"), tmp_path, "bidirectional-refresh")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_stands_alone(tmp_path, variant):
    check(make_environment(tmp_path / "environment"), tmp_path, variant)


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "venv", TRANSFORMERS_4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_runs_under_transformers_4(transformers_4, tmp_path, variant):
    """The newest 4, which can be installed with the torch that the tests run with."""
    assert check(transformers_4, tmp_path, variant).startswith("4.")
