import json
import os
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.platform import Platform
from megatron_dmtd.quickstart import jobs
from megatron_dmtd.quickstart.jobs import parts, run_quickstart, this_machine
from megatron_dmtd.quickstart.parts import PartError, alone_in
from megatron_dmtd.quickstart.plan import BASE, CONTROL, DMTD, Machine, Plan

ROOT = Path(__file__).parents[2]
CPU = Platform(device=torch.device("cpu"), backend="gloo")


def plan_in(folder: Path, **changes) -> Plan:
    return Plan(root=ROOT, directory=folder, machine=Machine(num_gpus=0, num_cores=2), **changes)


def test_parts_come_in_the_order_in_which_they_need_each_other(tmp_path):
    plan = plan_in(tmp_path)
    found = parts(plan, CPU)
    assert [part.name for part in found] == [
        "stories",
        "tokenizer",
        "token files",
        f"train {BASE}",
        f"train {DMTD}",
        f"train {CONTROL}",
        f"export {DMTD}",
        f"export {CONTROL}",
        "decoding",
        "large model",
    ]
    assert parts(plan_in(tmp_path, inputs=("stdlib",)), CPU)[0].name == "tokenizer"
    outputs = [path for part in found for path in part.outputs]
    assert len(set(outputs)) == len(outputs) and all(tmp_path in path.parents for path in outputs)
    by_name = {part.name: part for part in found}
    assert by_name["token files"].outputs[0] == Path(plan.train_prefix + ".bin")
    assert json.loads(json.dumps(by_name["decoding"].inputs)) == plan.decoding_inputs()


def test_settings_that_cannot_run_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError):
        run_quickstart(plan_in(tmp_path / "new", steps=0), CPU)
    assert not (tmp_path / "new").exists()


def test_two_quickstarts_do_not_write_to_one_folder(tmp_path):
    with alone_in(tmp_path), pytest.raises(PartError, match=f"in use by process {os.getpid()}"):
        run_quickstart(plan_in(tmp_path), CPU)
    assert not (tmp_path / "data").exists()


def test_a_bar_follows_the_last_logged_step(tmp_path):
    with tqdm(total=10, disable=False, file=(tmp_path / "bar").open("w")) as bar:
        watch = jobs._watcher(tmp_path / "metrics.jsonl", bar)
        watch()
        assert bar.n == 0
        (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n{"step": 4, "eval_loss": 1.0}\n{"step": 5, "lo')
        watch()
        assert bar.n == 4


def test_what_a_command_says_is_its_last_line_also_of_a_bar_that_is_redrawn(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"$ command\n 10%\r 20%\r 30% \xff done" + b"x" * 200 + b"\n\n")
    assert jobs._last_line(log).startswith("30%") and len(jobs._last_line(log)) == 100


def test_this_machine_is_what_the_platform_is(monkeypatch):
    machine, platform = this_machine()
    assert machine.num_cores >= 1 and (machine.num_gpus > 0) == platform.is_cuda
