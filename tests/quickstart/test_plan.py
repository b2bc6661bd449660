import dataclasses
from pathlib import Path

import pytest

from megatron_dmtd.config import load_config
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.quickstart.plan import BASE, CONTROL, DMTD, TRAININGS, Machine, Plan

ROOT = Path(__file__).parents[2]
PLAN = Plan(root=ROOT, directory=Path("/nowhere"), machine=Machine(num_gpus=0, num_cores=2))


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "processes", "threads"), [(0, 2, 2, 1), (0, 9, 2, 4), (0, 1, 2, 1), (1, 16, 1, 16), (8, 64, 2, 32)]
)
def test_processes_follow_the_machine(num_gpus, num_cores, processes, threads):
    machine = Machine(num_gpus=num_gpus, num_cores=num_cores)
    assert (machine.num_processes, machine.threads_per_process) == (processes, threads)
    plan = Plan(root=ROOT, directory=Path("/nowhere"), machine=machine)
    config = plan.config("vanilla")  # validated for this number of processes
    assert config.training.global_batch_size % (config.training.micro_batch_size * processes) == 0
    assert f"--nproc-per-node {processes} " in " ".join(plan.train_command("vanilla"))


def test_a_machine_is_named_by_its_gpus_if_it_has_any():
    assert Machine(num_gpus=2, num_cores=64).describe() == "2 GPU(s)"
    assert Machine(num_gpus=0, num_cores=4).describe() == "4 CPU core(s)"


@pytest.mark.parametrize("steps", [None, 10])
@pytest.mark.parametrize("model", TRAININGS)
def test_the_command_trains_what_the_plan_announces(model, steps, monkeypatch):
    plan = dataclasses.replace(PLAN, steps=steps)
    monkeypatch.chdir(ROOT)
    command = plan.train_command(model)
    given, announced = load_config(command[command.index("tools/train.py") + 1 :]), plan.config(model)
    for section in ("model", "cycle", "training", "optimizer", "parallel"):
        assert getattr(given, section) == getattr(announced, section)
    assert given.checkpoint.dir == f"/nowhere/{model}/checkpoints"
    assert given.checkpoint.init_from == ("" if model == BASE else f"/nowhere/{BASE}/checkpoints")


def test_steps_shorten_evaluation_and_warm_up_with_the_training():
    config = dataclasses.replace(PLAN, steps=40).config(DMTD)
    assert (config.training.steps, config.training.eval_interval, config.optimizer.warmup_steps) == (40, 20, 4)
    with pytest.raises(ConfigError, match="steps"):
        dataclasses.replace(PLAN, steps=0).config(DMTD)


def test_what_decides_a_training_is_its_settings_and_those_before_it():
    inputs = {model: PLAN.train_inputs(model) for model in TRAININGS}
    assert len({str(one) for one in inputs.values()}) == 3
    assert inputs[DMTD] == dataclasses.replace(PLAN, directory=Path("/elsewhere"), prompts=9).train_inputs(DMTD)
    longer = dataclasses.replace(PLAN, steps=7)
    assert all(longer.train_inputs(model) != inputs[model] for model in TRAININGS)
    assert dataclasses.replace(PLAN, heldout_fraction=0.5).train_inputs(CONTROL) != inputs[CONTROL]


def test_what_decides_the_corpus_is_its_documents_and_of_the_standard_library_its_python():
    assert PLAN.data_inputs()["python"] == "" and PLAN.data_inputs()["stories"] == 16_000
    assert dataclasses.replace(PLAN, stories=5).data_inputs() != PLAN.data_inputs()
    library, texts = (dataclasses.replace(PLAN, inputs=(name,)) for name in ("stdlib", "texts"))
    assert library.data_inputs()["python"].startswith("3.") and "stories" not in library.data_inputs()
    assert texts.data_inputs()["python"] == "" and texts.sources == ("texts",)
    assert PLAN.sources == ("/nowhere/data/stories.jsonl",)


def test_decodings_depend_on_both_models_and_on_what_is_decoded():
    first = PLAN.decoding_inputs()
    assert set(first["models"]) == {DMTD, CONTROL}
    assert dataclasses.replace(PLAN, new_tokens=7).decoding_inputs() != first
    assert dataclasses.replace(PLAN, steps=7).decoding_inputs() != first
    assert dataclasses.replace(PLAN, temperature=0.5).decoding_inputs() != first
    assert dataclasses.replace(PLAN, large_layers=(1, 1)).large_inputs() != PLAN.large_inputs()
