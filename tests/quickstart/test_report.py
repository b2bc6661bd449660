"""The report, from files that stand for what the parts leave."""

import json
from pathlib import Path

import pytest

from megatron_dmtd.data.batches.manifest import Manifest, dump_manifest, manifest_path
from megatron_dmtd.errors import DataError
from megatron_dmtd.infra.json_lines import to_line
from megatron_dmtd.quickstart.plan import BASE, CONTROL, DMTD, MODELS, TRAININGS, Machine, Plan
from megatron_dmtd.quickstart.report import write_report

ROOT = Path(__file__).parents[2]
SECONDS = {"tokenizer": 3.4, "decoding": 61.0}


def manifest(num_documents: int, num_tokens: int) -> Manifest:
    ids = {"eos_token_id": 0, "pad_token_id": 1, "mask_token_id": 2}
    return Manifest(
        num_documents=num_documents,
        num_tokens=num_tokens,
        dtype="uint16",
        max_token_id=9,
        vocab_size=10,
        **ids,
        tokenizer_sha256="",
        source="texts in words",
        split="train",
        heldout_fraction=0.1,
    )


def metrics(start: float, heldout: float) -> str:
    """A loss that falls by 0.01 a step for 40 steps, and two evaluations; phase p is p tenths above the mean."""
    lines = [{"step": step, "loss": start - 0.01 * (step - 1)} for step in range(1, 41)]
    evaluations = [
        {"step": step, "eval_loss": heldout} | {f"eval_loss_phase_{phase}": heldout + 0.1 * phase for phase in range(4)}
        for step in (20, 40)
    ]
    return "".join(map(to_line, sorted([*lines, *evaluations], key=lambda record: record["step"])))


def decoded(rates: list[float], agreeing: int) -> dict:
    return {
        "continuations": ["x = 1", "```\nfenced\n<b>"],
        "agreeing": agreeing,
        "parameters": 1_234_567,
        "tokens_per_s": sorted(rates)[1],
        "tokens_per_s_runs": rates,
    }


@pytest.fixture
def plan(tmp_path):
    plan = Plan(root=ROOT, directory=tmp_path, machine=Machine(num_gpus=0, num_cores=3), steps=40)
    (tmp_path / "data").mkdir()
    manifest_path(plan.train_prefix).write_text(dump_manifest(manifest(1000, 200_000)))
    manifest_path(plan.heldout_prefix).write_text(dump_manifest(manifest(20, 4000)))
    for model, start, heldout in ((BASE, 9.0, 8.5), (DMTD, 7.0, 6.75), (CONTROL, 6.5, 6.25)):
        (tmp_path / model).mkdir()
        (tmp_path / model / "metrics.jsonl").write_text(metrics(start, heldout))
    decoding = {
        "prompts": ["def f():", "class A:"],
        "prompt_tokens": 22,
        "new_tokens": 16,
        "temperature": 0.8,
        "top_p": 0.95,
        "device": "CPU with 1 thread",
        "models": {DMTD: decoded([30.0, 40.0, 20.0], 31), CONTROL: decoded([12.0, 11.0, 10.0], 32)},
    }
    (tmp_path / "decoding.json").write_text(json.dumps(decoding))
    large = {
        "parameters": 300_000_000,
        "threads": 2,
        "read_bytes_per_s": 30e9,
        "models": {
            DMTD: {"bytes_per_token": 600e6, "tokens_per_s": 40.0},
            CONTROL: {"bytes_per_token": 1200e6, "tokens_per_s": 20.0},
        },
    }
    (tmp_path / "large.json").write_text(json.dumps(large))
    return plan


FIGURES = (
    "1,234,567 parameters",
    "3 CPU core(s)",
    "1,000 documents (200,000 tokens)",
    "20 others (4,000 tokens)",
    "(loss 9.000 to 8.655)",
    # start, mean of the last ten steps, held out
    f"| `{DMTD}` | 7.000 | 6.655 | 6.750 |",
    f"| `{CONTROL}` | 6.500 | 6.155 | 6.250 |",
    # all, and by phase
    "| difference | 0.500 | 0.500 | 0.500 | 0.500 | 0.500 |",
    f"| {DMTD} | 6.750 | 6.750 | 6.850 | 6.950 | 7.050 |",
    f"| `{DMTD}` | 30.0 | 30.0, 40.0, 20.0 |",
    "**2.73x**",
    # bytes, speed, the limit of both, and what was read
    f"| `{DMTD}` | 600 MB | 40.0 | 50.0 | 24.0 GB/s |",
    f"| `{CONTROL}` | 1200 MB | 20.0 | 25.0 | 24.0 GB/s |",
    "| tokens/s, 300 million random weights | 20.0 | 40.0 | **2.00x**, at most 2.00x by bytes read |",
    "31 of 32 tokens",
    "temperature 0.8, top-p 0.95",
    "| decoding | 61 |",
)


def test_the_report_holds_the_figures_of_the_files(plan):
    said = write_report(plan, SECONDS)
    text = (plan.directory / "report.md").read_text()
    assert "{" not in text, "every place is filled in"
    assert [figure for figure in FIGURES if figure not in text] == []
    page = (plan.directory / "report.html").read_text()
    cells = [cell for figure in FIGURES if figure.startswith("|") for cell in figure.strip("| ").split(" | ")]
    assert [cell for cell in cells if cell.strip("`*").split("**")[0] not in page] == []
    assert 'src="data:image/png;base64,' in page and "<code>vanilla</code>" in page
    assert "**" not in page and "`" not in page.replace("```", ""), "but for what a model wrote"
    assert "held-out loss, nats per token  6.250  6.750" in said and "Prompt: def f():" in said and "vanilla: x = 1" in said


def test_samples_stand_side_by_side_and_may_hold_anything(plan):
    write_report(plan, SECONDS)
    for name in ("report.md", "report.html"):
        assert (
            "<td>class A:</td><td>```<br>fenced<br>&lt;b&gt;</td><td>```<br>fenced<br>&lt;b&gt;</td>"
            in (plan.directory / name).read_text()
        )


def test_curves_are_a_picture_and_nothing_half_made_stays(plan):
    write_report(plan, SECONDS)
    assert (plan.directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in plan.directory.iterdir()}
    assert names == {"data", "decoding.json", "large.json", "report.md", "report.html", "curves.png", *TRAININGS}


def test_decodings_that_cannot_be_read_are_refused_by_name(plan):
    (plan.directory / "decoding.json").write_text("{")
    with pytest.raises(DataError, match=r"decoding\.json cannot be read"):
        write_report(plan, SECONDS)
    assert not (plan.directory / "report.md").exists() and len(MODELS) == 2
