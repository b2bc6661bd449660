import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.platform import Platform
from megatron_dmtd.quickstart.decode import agreement, decode_all, generate, heldout_prompts, load, load_engine
from megatron_dmtd.quickstart.plan import CONTROL, DMTD, MODELS, Machine, Plan
from tests.data.batches.test_token_file import own_file
from tests.tools.text_model import save_text_model

CPU = Platform(device=torch.device("cpu"), backend="gloo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The exported models of a plan, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("quickstart")
    for model in MODELS:
        save_text_model(folder / model / "export")
    return folder


def test_too_few_held_out_documents_are_refused(corpus):
    with pytest.raises(DMTDError, match="held-out documents of more than 5000 tokens"):
        heldout_prompts(corpus[1], count=3, num_tokens=5000)


def test_prompts_are_the_beginnings_of_the_first_documents_that_are_longer(tmp_path):
    documents = [[1, 2], list(range(10, 20)), [3, 4, 5], list(range(30, 60)), list(range(70, 90))]
    prefix = own_file(tmp_path, documents, np.uint16)
    assert heldout_prompts(prefix, count=2, num_tokens=5) == [[10, 11, 12, 13, 14], [30, 31, 32, 33, 34]]
    assert heldout_prompts(prefix, count=1, num_tokens=10) == [list(range(30, 40))], "longer than the prompt: text is left"


def test_exactly_as_many_tokens_are_decoded_as_asked_for_and_none_is_eos(folder):
    engine = load_engine(folder / DMTD / "export", CPU)
    free, seconds = generate(engine, [5, 6, 7], new_tokens=9, eos_token_id=256)
    assert len(free) == 9 and 256 not in free and seconds > 0
    forbidden, _ = generate(engine, [5, 6, 7], new_tokens=9, eos_token_id=free[0])
    assert len(forbidden) == 9 and free[0] not in forbidden


def test_agreement_counts_the_tokens_that_a_teacher_forced_pass_prefers(folder):
    decoder = load(folder / DMTD / "export", CPU)
    prompt = list(range(40, 49))
    decoded, _ = generate(decoder.engine, prompt, new_tokens=7, eos_token_id=decoder.tokenizer.eos_token_id)
    assert agreement(decoder, prompt, decoded) == 7
    assert agreement(decoder, prompt, [*decoded[:-1], (decoded[-1] + 1) % 250]) == 6


def test_both_models_continue_and_one_is_timed_in_both_ways(folder, tmp_path):
    plan = Plan(
        root=Path("/nowhere"),
        directory=folder,
        machine=Machine(num_gpus=0, num_cores=1),
        prompts=2,
        new_tokens=5,
        timed_runs=3,
    )
    (folder / "data").mkdir()
    own_file(folder / "data", [list(range(100)), list(range(50, 150)), [1]], np.uint16, name="text-heldout")
    decode_all(plan, CPU, output=tmp_path / "decoding.json")
    found = json.loads((tmp_path / "decoding.json").read_text())
    decode_all(plan, CPU, output=tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert [again["models"][name]["continuations"] for name in MODELS] == [
        found["models"][name]["continuations"] for name in MODELS
    ]
    assert (found["new_tokens"], found["prompt_tokens"], len(found["prompts"])) == (5, 22, 2)
    for name in (DMTD, CONTROL):
        model = found["models"][name]
        assert model["agreeing"] == 2 * 5 and len(model["continuations"]) == 2
        assert model["continuations"][0] != model["continuations"][1], "samples, with seeds of their own"
        assert len(model["tokens_per_s_runs"]) == 3 and min(model["tokens_per_s_runs"]) > 0
        assert model["tokens_per_s"] == sorted(model["tokens_per_s_runs"])[1]
