"""The command that compares trees bit for bit: what it selects, compares and refuses, and that it sees a planted fault."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError
from tools import digests
from tools.digests_measured import cases, figures, training, tree
from tools.digests_measured.decoding import write_model

ROOT = Path(__file__).parents[2]
HERE = {"cpu": "A", "flags": "avx avx2", "torch": "2"}
ITEMS = {"plans/a/x": "1", "plans/a/y": "2", "train/b/step-01/loss": "0x1.8p+1 (3)", "train/b/step-02/loss": "0x1.0p+1 (2)"}


def record_of(items: dict[str, str], machine: dict[str, str] = HERE) -> digests.Record:
    return digests.Record(machine=machine, commit="abc", only=[], seconds={"plans": 1.0}, items=items)


@pytest.fixture
def written(tmp_path):
    def write(name: str, items: dict[str, str], machine: dict[str, str] = HERE) -> str:
        digests.write_record(tmp_path / name, record_of(items, machine))
        return str(tmp_path / name)

    return write


def test_selection_goes_by_whole_parts_of_names():
    assert digests.is_selected("train/causal-refresh/tp2", ["train/causal-refresh"])
    assert not digests.is_selected("train/causal-refresh/tp2", ["train/causal"])
    assert digests.is_selected("anything", [])
    assert digests.must_run("train/causal-refresh/tp2", ["train/causal-refresh/tp2/metrics/step-03"])
    assert not digests.must_run("train/causal-refresh/tp2", ["train/causal-refresh/tp2-pp2", "engine"])


def test_differences_come_in_the_order_of_the_record_and_then_what_is_new():
    found = {"new": "9", "c": "3", "b": "other"}
    expected = [("a", "1", None), ("b", "2", "other"), ("new", None, "9")]
    unequal = digests.differences({"a": "1", "b": "2", "c": "3"}, found)
    assert [(one.name, one.recorded, one.found) for one in unequal] == expected


def test_the_first_difference_of_a_section_is_shown_with_both_figures(written, capsys):
    changed = ITEMS | {"train/b/step-01/loss": "0x1.9p+1 (3.125)", "train/b/step-02/loss": "0x1.1p+1 (2.125)"}
    assert digests.main(["compare", written("old", ITEMS), "--with", written("new", changed)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "recorded: abc; now: abc",
        "plans    2 items, all equal",
        "train    2 items, 2 differ, the first: train/b/step-01/loss",
        "  train/b/step-01/loss",
        "    recorded  0x1.8p+1 (3)",
        "    now       0x1.9p+1 (3.125)",
    ]
    assert digests.main(["compare", written("old", ITEMS), "--with", written("new", changed), "--only", "plans"]) == 0


def test_an_item_that_is_gone_is_a_difference(written, capsys):
    fewer = {name: figure for name, figure in ITEMS.items() if name != "plans/a/y"}
    assert digests.main(["compare", written("old", ITEMS), "--with", written("new", fewer)]) == 1
    assert "plans/a/y\n    recorded  2\n    now       nothing" in capsys.readouterr().out
    assert digests.main(["compare", written("old", fewer), "--with", written("new", ITEMS)]) == 1
    assert "plans/a/y\n    recorded  nothing\n    now       2" in capsys.readouterr().out


def test_numbers_of_kernels_are_compared_on_one_machine_only(written, capsys):
    elsewhere = HERE | {"flags": "avx avx512f", "torch": "3"}
    paths = [written("old", ITEMS), "--with", written("new", ITEMS, elsewhere)]
    assert digests.main(["compare", *paths]) == 2
    message = capsys.readouterr().err
    assert "train recorded on another machine" in message and "torch 2 there, 3 here" in message
    assert "flags: without avx2, with avx512f in addition" in message and "--only plans masks" in message
    assert digests.main(["compare", *paths, "--only", "plans"]) == 0


def test_names_changed_on_purpose_are_those_of_the_later_tree():
    renames = ((r"^plans/(.*)/x$", r"plans/\1/width"), ("loss", "nats"))
    assert list(digests.renamed(ITEMS, renames)) == [
        "plans/a/width",
        "plans/a/y",
        "train/b/step-01/nats",
        "train/b/step-02/nats",
    ]
    assert digests.renamed(ITEMS, ()) == ITEMS
    with pytest.raises(ConfigError, match="plans/a/y"):
        digests.renamed(ITEMS, (("x$", "y"),))


def test_renamed_options_are_spelled_as_the_tree_spells_them():
    renames = {"model.heads": "model.num_heads", "data.pad": "data.pad_id"}
    assert tree.spelled(renames, "  --model.num_heads N\n  --data.pad_id N") == renames
    assert tree.spelled(renames, "  --model.heads N\n  --data.pad N") == {old: old for old in renames}
    with pytest.raises(figures.MeasureError, match=r"data\.pad"):
        tree.spelled(renames, "  --model.heads N")


def test_a_record_is_read_as_it_was_written_and_nothing_else_is(tmp_path):
    path = tmp_path / "record.json"
    digests.write_record(path, record_of(ITEMS))
    assert digests.read_record(path) == record_of(ITEMS)
    assert list(digests.read_record(path).items) == list(ITEMS)
    for text in ("no json", "[]", "{}", json.dumps({"format": 0}), json.dumps({"format": 1, "items": {}})):
        path.write_text(text)
        with pytest.raises(DataError, match=r"record\.json"):
            digests.read_record(path)


def test_what_cannot_be_measured_is_refused_by_name(tmp_path, capsys):
    assert digests.main(["record", "--output", str(tmp_path / "x"), "--tree", str(tmp_path)]) == 2
    assert "without megatron_dmtd/__init__.py, tools/train.py, examples" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="train/causal/tp2, which nothing is called"):
        digests.require_cases([name for name, _ in cases()], ["plans", "train/causal/tp2"])
    digests.write_record(tmp_path / "record", record_of(ITEMS))
    same = ["compare", str(tmp_path / "record"), "--with", str(tmp_path / "record")]
    assert digests.main([*same, "--only", "hf"]) == 2
    assert "nothing of that in" in capsys.readouterr().err


def test_the_tree_is_measured_in_an_environment_of_its_own(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.delenv("MKL_CBWR", raising=False)
    with pytest.raises(ConfigError, match=str(tmp_path)):  # the stand-in for execve returns, and the package is this tree's
        digests.enter(tmp_path, ["record", "--output", "x"])
    ((program, arguments, environment),) = started
    assert program == sys.executable and arguments[2:] == ["record", "--output", "x"]
    assert environment["PYTHONPATH"] == str(tmp_path) and environment["MKL_CBWR"] == "AVX2,STRICT"
    assert environment["OMP_NUM_THREADS"] == "1" and environment["PATH"] == os.environ["PATH"]


def test_figures_are_of_bits():
    assert figures.number(0.1) == "0x1.999999999999ap-4 (0.1)" != figures.number(0.1 + 2**-56)
    zero, wide = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    assert len({figures.tensor(one) for one in (zero, -zero, wide, zero[None], zero.bfloat16())}) == 5
    view = torch.arange(6.0).view(2, 3).t()
    assert figures.tensor(view) == figures.tensor(view.contiguous())
    assert figures.tensor(torch.tensor(-3.0)).startswith("float32 [] largest 3 sha256 ")


def test_every_leaf_of_a_plan_has_a_name():
    plan = {"b": [{"c": 1}, True], "a": 0.5, "empty": []}
    assert figures.leaves(plan) == {"a": "0x1.0000000000000p-1 (0.5)", "b/0/c": "1", "b/1": "true", "empty": "[]"}


def test_whether_a_checkpoint_stacks_its_layers_does_not_show():
    stacked = {"optimizer.x.decoder.layers.mlp.w": torch.arange(6.0).view(2, 3), "decoder.norm": torch.ones(2)}
    apart = training.by_layer(stacked)
    assert list(apart) == ["optimizer.x.decoder.layers.0.mlp.w", "optimizer.x.decoder.layers.1.mlp.w", "decoder.norm"]
    assert torch.equal(apart["optimizer.x.decoder.layers.1.mlp.w"], torch.tensor([3.0, 4.0, 5.0]))
    assert training.by_layer(apart).keys() == apart.keys()


def test_every_section_covers_every_variant_and_layout():
    names = [name for name, _ in cases()]
    assert len(set(names)) == len(names)
    assert digests.sections_of(dict.fromkeys(names, "")) == list(digests.SECTIONS)
    for layout in ("single", "tp2", "pp2", "pp2-virtual", "dp2", "tp2-sequence", "recompute"):
        assert {f"train/{kind}/{layout}" for kind in tree.KINDS} <= set(names)
    for kind in tree.KINDS:
        assert {f"exports/{kind}/single", f"engine/{kind}/native", f"engine/{kind}/torch"} <= set(names)
    recipes = {path.relative_to(ROOT / "examples").with_suffix("").as_posix() for path in ROOT.glob("examples/*/*.yaml")}
    assert recipes >= {name.removeprefix("plans/").rpartition("/")[0] for name in names if name.startswith("plans/")}


def test_tiny_models_of_all_kinds_have_the_same_weights(tmp_path):
    first, second = (write_model(tmp_path / kind, kind) for kind in ("vanilla", "bidirectional-refresh"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() != (second / "config.json").read_text()


def test_a_rank_that_fails_is_the_one_that_is_reported(tmp_path):
    def body() -> int:
        print(f"rank {os.environ['RANK']}", flush=True)
        return 3 * int(os.environ["RANK"])

    finished = tree.Tree(ROOT, tmp_path).forked(body, ranks=2)
    assert (finished.status, finished.output) == (3, "rank 1\n")


def _digests(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "digests.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.multiprocess
def test_a_fault_planted_in_a_copy_is_seen(tmp_path):
    recorded, copy, only = str(tmp_path / "recorded.json"), tmp_path / "copy", ("--only", "masks/causal-refresh/documents-12")
    done = _digests("record", "--output", recorded, *only)
    assert done.returncode == 0, done.stderr
    for folder in ("megatron_dmtd", "tools", "examples"):
        shutil.copytree(ROOT / folder, copy / folder)
    command = copy / "tools" / "inspect_mask.py"
    command.write_text(command.read_text().replace('"cycle_length": args.cycle_length', '"cycle_length": 2'))
    different = _digests("compare", recorded, "--tree", str(copy), *only)
    assert different.returncode == 1, different.stderr
    equal = _digests("compare", recorded, "--tree", str(ROOT))
    assert equal.returncode == 0 and "all equal" in equal.stdout, equal.stderr
    assert "masks/causal-refresh/documents-12/line-00\n    recorded  [1111] [1111] [1000]\n" in different.stdout


@pytest.mark.multiprocess
def test_nothing_is_recorded_if_a_command_fails(tmp_path):
    output, copy = tmp_path / "new.json", tmp_path / "copy"
    for folder in ("megatron_dmtd", "tools", "examples"):
        shutil.copytree(ROOT / folder, copy / folder)
    (copy / "tools" / "inspect_mask.py").write_text("raise SystemExit('a planted failure')")
    done = _digests("record", "--output", str(output), "--tree", str(copy), "--only", "masks/vanilla/documents-12")
    assert done.returncode == 2 and "a planted failure" in done.stderr and not output.exists()


def test_a_comparison_is_not_equal_where_a_command_failed(written, monkeypatch, capsys):
    monkeypatch.setattr(digests, "enter", lambda *_: None)
    monkeypatch.setattr(digests, "machine", lambda: HERE)
    monkeypatch.setattr(digests, "measure", lambda *_: (record_of(ITEMS), ["plans/a"]))
    assert digests.main(["compare", written("old", ITEMS)]) == 1
    assert "could not be measured: plans/a" in capsys.readouterr().out
    monkeypatch.setattr(digests, "measure", lambda *_: (record_of(ITEMS), []))
    assert digests.main(["compare", written("old", ITEMS)]) == 0


def test_an_existing_file_is_never_recorded_over(written, capsys):
    path = written("old", ITEMS)
    assert digests.main(["record", "--output", path]) == 2
    assert "exists" in capsys.readouterr().err and digests.read_record(Path(path)).items == ITEMS
