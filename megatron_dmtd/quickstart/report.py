"""The report of the quickstart: `report.md` and `curves.png`, from the files that its parts wrote. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.config import Config
from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.files import replacing, write_atomically
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.quickstart.plan import BASE, CONTROL, DMTD, MODELS, Plan
from megatron_dmtd.training.log import METRICS_FILE, read_metrics

_NO_DECODING = Refusal(
    DataError, required="what the part `decoding` of the quickstart writes", remedy="delete the file and run the quickstart again"
)
_PAGE = """# Quickstart report

A Qwen3-shaped decoder of {parameters:,} parameters was pretrained in the ordinary way and then continued as `{dmtd}`,
with Megatron-Core on {machine}: {processes}.
Of its {layers} layers the first {parallel} run once per cycle of {cycle_length} tokens, the last {sequential} once per token.
The control, `vanilla`, starts from the same weights and is trained on the same tokens as an ordinary decoder.

Text: {source}. {train_documents:,} documents ({train_tokens:,} tokens) to train on,
{heldout_documents:,} others ({heldout_tokens:,} tokens) held out.
Pretraining saw {base_seen:,} tokens in {base_steps} steps (loss {base_start:.3f} to {base_end:.3f}),
each model another {seen:,} in {steps} steps.

![curves](curves.png)

## Loss

Nats per token of the continued training. The start is its first step, the end is the mean of the last {span} steps.

| | start | end | held out, end |
| --- | --- | --- | --- |
{loss_rows}

## Held-out loss by phase of the cycle

Phase 0 is the cycle's head, whose token the parallel layers know. At phases 1 to {last_phase} they look ahead from the head,
while every layer of `vanilla` knows every token: the difference is what look-ahead costs.

| | {phase_heads} |
| --- |{phase_rule}
{phase_rows}

## Decoding

{new_tokens} greedy tokens after {prompt_tokens}, one prompt at a time, by the decoding engine (`megatron_dmtd.inference`): the
weights of `{dmtd}` in cycles, and the same weights as an ordinary decoder. Both ran in one process on {device}, alternately.
The figures are medians of {runs} runs.

| | tokens/s | runs |
| --- | --- | --- |
{speed_rows}

Cycled against vanilla: **{speedup:.2f}x**. The number of layers run per token alone would give {bound:.2f}x.
A model this small spends most of its time outside the layers; `docs/log.md` has figures for large ones.

Decoding matches training: {agreeing} of {decoded} tokens decoded in cycles are also the top choice
of one teacher-forced forward pass of transformers over the whole text (the control: {agreeing_control} of {decoded}).

## Continuations of held-out text

These models are small and were trained on little text: expect output that looks like Python but makes no sense.

{samples}

## Time

{times}

## What next

```bash
{commands}
```

`examples/README.md` explains how to continue a published checkpoint, `docs/cycles.md` how the method works.
"""


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _metrics(plan: Plan, model: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training records and evaluations of a model, in order of steps."""
    records = read_metrics(plan.run_directory(model) / METRICS_FILE)
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def _mean_loss(records: Sequence[Mapping[str, Any]]) -> float:
    return sum(record["loss"] for record in records) / len(records)


def _fence(text: str) -> str:
    """`text` as a code block; if it contains a fence, the block gets a longer one."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def _samples(decoding: Mapping[str, Any]) -> str:
    blocks = []
    for index, prompt in enumerate(decoding["prompts"]):
        blocks.append(f"Prompt {index + 1}:\n\n{_fence(prompt)}")
        blocks += [f"`{name}`:\n\n{_fence(decoding['models'][name]['continuations'][index])}" for name in MODELS]
    return "\n\n".join(blocks)


def _commands(plan: Plan) -> str:
    export = plan.export_directory(DMTD)
    other = " ".join(
        ("python -m torch.distributed.run --standalone --nproc-per-node", str(plan.machine.num_processes), "tools/train.py")
    )
    options = {**plan.overrides(DMTD), "cycle.variant": "causal-norefresh"}
    options |= {"checkpoint.dir": "runs/causal-norefresh/checkpoints", "logging.dir": "runs/causal-norefresh"}
    lines = "\n".join(
        (
            f"python tools/convert.py inspect {export}",
            "python tools/inspect_mask.py --variant bidirectional-refresh --documents 12",
            "# another variant on the same text",
            f"{other} --config {plan.recipe(DMTD)} \\",
            "  " + " ".join(f"--{name} '{value}'" for name, value in options.items()),
        )
    )
    return lines.replace(f"{plan.root}/", "")


def _loss_rows(plan: Plan, span: int) -> str:
    rows = []
    for model in MODELS:
        training, evaluations = _metrics(plan, model)
        values = (training[0]["loss"], _mean_loss(training[-span:]), evaluations[-1]["eval_loss"])
        rows.append(_table_row(f"`{model}`", *(f"{value:.3f}" for value in values)))
    return "\n".join(rows)


def _phase_rows(plan: Plan, num_phases: int) -> str:
    values = {}
    for model in MODELS:
        last = _metrics(plan, model)[1][-1]
        values[model] = [last["eval_loss"], *(last[f"eval_loss_phase_{index}"] for index in range(num_phases))]
    values["difference"] = [mine - theirs for mine, theirs in zip(values[DMTD], values[CONTROL])]
    return "\n".join(_table_row(name, *(f"{value:.3f}" for value in row)) for name, row in values.items())


def _speed_rows(decoding: Mapping[str, Any]) -> str:
    rows = []
    for name in MODELS:
        found = decoding["models"][name]
        runs = ", ".join(f"{rate:.1f}" for rate in found["tokens_per_s_runs"])
        rows.append(_table_row(f"`{name}`", f"{found['tokens_per_s']:.1f}", runs))
    return "\n".join(rows)


def _text_facts(plan: Plan) -> dict[str, Any]:
    train, heldout = read_manifest(plan.train_prefix), read_manifest(plan.heldout_prefix)
    assert train is not None and heldout is not None, (plan.train_prefix, plan.heldout_prefix)
    return {
        "source": train.source,
        "train_documents": train.num_documents,
        "train_tokens": train.num_tokens,
        "heldout_documents": heldout.num_documents,
        "heldout_tokens": heldout.num_tokens,
    }


def _seen(config: Config) -> int:
    return config.training.steps * config.training.global_batch_size * config.data.seq_length


def _base_facts(plan: Plan, span: int) -> dict[str, Any]:
    config, training = plan.config(BASE), _metrics(plan, BASE)[0]
    return {
        "base_steps": config.training.steps,
        "base_seen": _seen(config),
        "base_start": training[0]["loss"],
        "base_end": _mean_loss(training[-span:]),
    }


def render(plan: Plan, decoding: Mapping[str, Any], seconds: Mapping[str, float]) -> str:
    """The report as Markdown."""
    config = plan.config(DMTD)
    layers, parallel, cycle_length = config.model.num_layers, config.cycle.num_parallel_layers, config.cycle.cycle_length
    sequential = layers - parallel
    span = max(1, min(10, config.training.steps // 2))
    models = decoding["models"]
    processes = (
        f"{plan.machine.num_processes} processes, with the pipeline boundary where the sequential layers begin"
        if plan.machine.num_processes > 1
        else "one process"
    )
    return _PAGE.format(
        **_text_facts(plan),
        parameters=models[DMTD]["parameters"],
        layers=layers,
        parallel=parallel,
        sequential=sequential,
        cycle_length=cycle_length,
        last_phase=cycle_length - 1,
        dmtd=DMTD,
        machine=plan.machine.describe(),
        processes=processes,
        **_base_facts(plan, span),
        seen=_seen(config),
        steps=config.training.steps,
        span=span,
        loss_rows=_loss_rows(plan, span),
        phase_heads=" | ".join(["all", *(f"phase {index}" for index in range(cycle_length))]),
        phase_rule=" --- |" * (cycle_length + 1),
        phase_rows=_phase_rows(plan, cycle_length),
        new_tokens=decoding["new_tokens"],
        prompt_tokens=decoding["prompt_tokens"],
        device=decoding["device"],
        runs=len(models[DMTD]["tokens_per_s_runs"]),
        speed_rows=_speed_rows(decoding),
        speedup=models[DMTD]["tokens_per_s"] / models[CONTROL]["tokens_per_s"],
        bound=cycle_length * layers / (parallel + cycle_length * sequential),
        agreeing=models[DMTD]["agreeing"],
        agreeing_control=models[CONTROL]["agreeing"],
        decoded=decoding["new_tokens"] * len(decoding["prompts"]),
        samples=_samples(decoding),
        times="\n".join(f"- {name}: {value:.0f} s" for name, value in seconds.items()),
        commands=_commands(plan),
    )


def draw_curves(plan: Plan, path: Path) -> None:
    """Draw the training loss of the base and both models, and the models' held-out loss by phase, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    before = plan.config(BASE).training.steps
    for model, colour in ((BASE, "tab:gray"), (DMTD, "tab:blue"), (CONTROL, "tab:orange")):
        training, evaluations = _metrics(plan, model)
        first = 0 if model == BASE else before
        left.plot([first + r["step"] for r in training], [r["loss"] for r in training], color=colour, alpha=0.6, label=model)
        steps = [first + r["step"] for r in evaluations]
        left.plot(steps, [r["eval_loss"] for r in evaluations], "o--", color=colour, label=f"{model}, held out")
        if model == BASE:
            continue
        style = "-" if model == DMTD else ":"
        for index in range(plan.config(model).cycle.cycle_length):
            values = [r[f"eval_loss_phase_{index}"] for r in evaluations]
            right.plot(steps, values, style, marker="o", markersize=3, color=f"C{index}", label=f"{model}, phase {index}")
    left.set(title="Loss", xlabel="step", ylabel="nats per token")
    right.set(title="Held-out loss by phase of the cycle", xlabel="step")
    for axis in (left, right):
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    pyplot.close(figure)


def write_report(plan: Plan, seconds: Mapping[str, float]) -> str:
    """Write `report.md` and `curves.png`, and return the report's text. `seconds` is the time of each part."""
    decoding = read_object(plan.directory / "decoding.json", _NO_DECODING)
    draw_curves(plan, plan.directory / "curves.png")
    text = render(plan, decoding, seconds)
    write_atomically(plan.directory / "report.md", text)
    return text
