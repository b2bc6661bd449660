"""The report of the quickstart: `report.md`, `report.html` and `curves.png`, from what its parts wrote. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.config import Config
from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.files import replacing, write_atomically
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.quickstart.page import Block, Code, Heading, Paragraph, Picture, SideBySide, Table, to_html, to_markdown
from megatron_dmtd.quickstart.plan import BASE, CONTROL, DMTD, MODELS, Plan
from megatron_dmtd.training.log import METRICS_FILE, read_metrics

_NOT_WRITTEN = Refusal(
    DataError, required="what a part of the quickstart writes", remedy="delete the file and run the quickstart again"
)
_TITLE = "Quickstart report"


def _metrics(plan: Plan, model: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training records and evaluations of a model, in order of steps."""
    records = read_metrics(plan.run_directory(model) / METRICS_FILE)
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def _mean_loss(records: Sequence[Mapping[str, Any]]) -> float:
    return sum(record["loss"] for record in records) / len(records)


def _seen(config: Config) -> int:
    return config.training.steps * config.training.global_batch_size * config.data.seq_length


def _speed_up(found: Mapping[str, Any]) -> float:
    return found["models"][DMTD]["tokens_per_s"] / found["models"][CONTROL]["tokens_per_s"]


def _large_limit(large: Mapping[str, Any]) -> float:
    """The speed-up that the bytes read per token allow."""
    return large["models"][CONTROL]["bytes_per_token"] / large["models"][DMTD]["bytes_per_token"]


def _layer_limit(config: Config) -> float:
    """The speed-up that the number of layers run per token allows."""
    layers, parallel, length = config.model.num_layers, config.cycle.num_parallel_layers, config.cycle.cycle_length
    return length * layers / (parallel + length * (layers - parallel))


def _what_was_done(plan: Plan, decoding: Mapping[str, Any]) -> list[Block]:
    config, base = plan.config(DMTD), plan.config(BASE)
    train, heldout = read_manifest(plan.train_prefix), read_manifest(plan.heldout_prefix)
    assert train is not None and heldout is not None, (plan.train_prefix, plan.heldout_prefix)
    parallel, length = config.cycle.num_parallel_layers, config.cycle.cycle_length
    start = _metrics(plan, BASE)[0]
    processes = f"{plan.machine.num_processes} processes" if plan.machine.num_processes > 1 else "one process"
    return [
        Paragraph(
            f"A Qwen3-shaped decoder of {decoding['models'][DMTD]['parameters']:,} parameters was pretrained in the ordinary way "
            f"and then continued twice, with Megatron-Core on {plan.machine.describe()}, in {processes}: as `{DMTD}`, whose "
            f"first {parallel} of {config.model.num_layers} layers run once per cycle of {length} tokens and the others once per "
            f"token; and as `{CONTROL}`, the control, an ordinary decoder trained on the same tokens from the same weights."
        ),
        Paragraph(
            f"Text: {train.source}. {train.num_documents:,} documents ({train.num_tokens:,} tokens) to train on, "
            f"{heldout.num_documents:,} others ({heldout.num_tokens:,} tokens) held out. Pretraining saw {_seen(base):,} tokens "
            f"in {base.training.steps} steps (loss {start[0]['loss']:.3f} to {_mean_loss(start[-_span(base) :]):.3f}), "
            f"each model another {_seen(config):,} in {config.training.steps} steps."
        ),
    ]


def _span(config: Config) -> int:
    """Steps whose mean is the loss at the end."""
    return max(1, min(10, config.training.steps // 2))


def _overview(plan: Plan, decoding: Mapping[str, Any], large: Mapping[str, Any]) -> Table:
    losses = {model: _metrics(plan, model)[1][-1]["eval_loss"] for model in MODELS}
    tiny, big = ({name: found["models"][name]["tokens_per_s"] for name in MODELS} for found in (decoding, large))
    size = large["parameters"] / 1e6
    return Table(
        ("", f"`{CONTROL}`", f"`{DMTD}`", ""),
        (
            ("held-out loss, nats per token", *(f"{losses[name]:.3f}" for name in (CONTROL, DMTD)), "less is better"),
            (
                "tokens/s, this model",
                *(f"{tiny[name]:.0f}" for name in (CONTROL, DMTD)),
                f"**{_speed_up(decoding):.2f}x**, at most {_layer_limit(plan.config(DMTD)):.2f}x by layers run",
            ),
            (
                f"tokens/s, {size:.0f} million random weights",
                *(f"{big[name]:.1f}" for name in (CONTROL, DMTD)),
                f"**{_speed_up(large):.2f}x**, at most {_large_limit(large):.2f}x by bytes read",
            ),
        ),
    )


def _samples(plan: Plan, decoding: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [
        Heading("Continuations of held-out text"),
        Paragraph(
            f"The first {decoding['prompt_tokens']} tokens of documents that no model has seen, continued by both: at most "
            f"{decoding['new_tokens']} tokens, temperature {decoding['temperature']:g}, top-p {decoding['top_p']:g}."
        ),
    ]
    for index, prompt in enumerate(decoding["prompts"]):
        texts = [decoding["models"][name]["continuations"][index] for name in (CONTROL, DMTD)]
        blocks.append(SideBySide(("prompt", f"`{CONTROL}`", f"`{DMTD}`"), (prompt, *texts)))
    return blocks


def _losses(plan: Plan) -> list[Block]:
    config = plan.config(DMTD)
    rows, values = [], {}
    for model in MODELS:
        training, evaluations = _metrics(plan, model)
        last = evaluations[-1]
        figures = (training[0]["loss"], _mean_loss(training[-_span(config) :]), last["eval_loss"])
        rows.append((f"`{model}`", *(f"{value:.3f}" for value in figures)))
        values[model] = [last["eval_loss"], *(last[f"eval_loss_phase_{phase}"] for phase in range(config.cycle.cycle_length))]
    values["difference"] = [mine - theirs for mine, theirs in zip(values[DMTD], values[CONTROL])]
    phases = [f"phase {phase}" for phase in range(config.cycle.cycle_length)]
    return [
        Heading("Loss"),
        Paragraph(
            "Nats per token of the continued training. The start is its first step, the end is the mean of the last "
            f"{_span(config)} steps."
        ),
        Table(("", "start", "end", "held out, end"), rows),
        Heading("Held-out loss by phase of the cycle"),
        Paragraph(
            f"Phase 0 is the cycle's head, whose token the parallel layers know. At phases 1 to {config.cycle.cycle_length - 1} "
            f"they look ahead from the head, while every layer of `{CONTROL}` knows every token: the difference is what "
            "look-ahead costs. It shrinks with training."
        ),
        Table(("", "all", *phases), [(name, *(f"{value:.3f}" for value in row)) for name, row in values.items()]),
    ]


def _speed(plan: Plan, decoding: Mapping[str, Any], large: Mapping[str, Any]) -> list[Block]:
    rows = [
        (f"`{name}`", f"{found['tokens_per_s']:.1f}", ", ".join(f"{rate:.1f}" for rate in found["tokens_per_s_runs"]))
        for name, found in ((name, decoding["models"][name]) for name in MODELS)
    ]
    bandwidth = large["read_bytes_per_s"]
    large_rows = []
    for name in MODELS:
        found = large["models"][name]
        read = found["bytes_per_token"]
        large_rows.append(
            (
                f"`{name}`",
                f"{read / 1e6:.0f} MB",
                f"{found['tokens_per_s']:.1f}",
                f"{bandwidth / read:.1f}",
                f"{found['tokens_per_s'] * read / 1e9:.1f} GB/s",
            )
        )
    decoded = decoding["new_tokens"] * len(decoding["prompts"])
    mine, control = (decoding["models"][name]["agreeing"] for name in MODELS)
    return [
        Heading("Decoding speed"),
        Paragraph(
            "The same weights decoded in cycles and as an ordinary decoder, one prompt at a time, in one process, alternately, "
            "by "
            f"the decoding engine (`megatron_dmtd.inference`) on {decoding['device']}. Medians of "
            f"{len(decoding['models'][DMTD]['tokens_per_s_runs'])} runs."
        ),
        Paragraph(
            f"**The model above**, one thread: **{_speed_up(decoding):.2f}x**. The number of layers run per token allows "
            f"{_layer_limit(plan.config(DMTD)):.2f}x. Its weights fit into the processor's caches, where "
            "work outside the layers counts."
        ),
        Table(("", "tokens/s", "runs"), rows),
        Paragraph(
            f"**A model of {large['parameters']:,} random weights** ({4 * large['parameters'] / 1e9:.1f} GB in fp32), which no "
            f"cache holds, {large['threads']} threads: **{_speed_up(large):.2f}x**. The bytes read per token allow "
            f"{_large_limit(large):.2f}x. This machine reads {bandwidth / 1e9:.1f} GB/s from memory, in a "
            "loop that does nothing else; that gives the limit in tokens/s."
        ),
        Table(("", "read per token", "tokens/s", "limit", "read"), large_rows),
        Paragraph(
            f"Decoding matches training: {mine} of {decoded} tokens that were decoded greedily in cycles are also the top choice "
            f"of one teacher-forced forward pass of transformers over the whole text (the control: {control} of {decoded})."
        ),
    ]


def _commands(plan: Plan) -> str:
    export = plan.export_directory(DMTD)
    launcher = f"python -m torch.distributed.run --standalone --nproc-per-node {plan.machine.num_processes} tools/train.py"
    options = {**plan.overrides(DMTD), "cycle.variant": "causal-norefresh"}
    options |= {"checkpoint.dir": "runs/causal-norefresh/checkpoints", "logging.dir": "runs/causal-norefresh"}
    lines = (
        f"python tools/generate.py {export} 'Once upon a time there was a' --temperature 0.8",
        f"python tools/convert.py inspect {export}",
        "python tools/inspect_mask.py --variant bidirectional-refresh --documents 12",
        "# another variant on the same text",
        f"{launcher} --config {plan.recipe(DMTD)} \\",
        "  " + " ".join(f"--{name} '{value}'" for name, value in options.items()),
    )
    return "\n".join(lines).replace(f"{plan.root}/", "")


def render(plan: Plan, decoding: Mapping[str, Any], large: Mapping[str, Any], seconds: Mapping[str, float]) -> list[Block]:
    """The report."""
    return [
        Heading(_TITLE, level=1),
        *_what_was_done(plan, decoding),
        _overview(plan, decoding, large),
        Picture(plan.directory / "curves.png", "loss, held-out loss by phase, and speed"),
        *_samples(plan, decoding),
        *_losses(plan),
        *_speed(plan, decoding, large),
        Heading("Time"),
        Table(("part", "seconds"), [(name, f"{value:.0f}") for name, value in seconds.items()]),
        Heading("What next"),
        Code(_commands(plan)),
        Paragraph(
            "`docs/choices.md` says how to choose a variant and its settings, `examples/README.md` how to continue a published "
            "checkpoint, `docs/cycles.md` how the method works."
        ),
    ]


def draw_curves(plan: Plan, decoding: Mapping[str, Any], large: Mapping[str, Any], path: Path) -> None:
    """Draw as a PNG: the training loss of the base and both models, the models' held-out loss by phase, and the speed-ups."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5), width_ratios=(2, 2, 1), constrained_layout=True)
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
            middle.plot(steps, values, style, marker="o", markersize=3, color=f"C{index}", label=f"{model}, phase {index}")
    left.set(title="Loss", xlabel="step", ylabel="nats per token", yscale="log")
    middle.set(title="Held-out loss by phase of the cycle", xlabel="step", yscale="log")
    for axis in (left, middle):
        for set_format in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            set_format("{x:g}")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3, which="both")
    _draw_speed(right, plan, decoding, large)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    pyplot.close(figure)


def _draw_speed(axis: Any, plan: Plan, decoding: Mapping[str, Any], large: Mapping[str, Any]) -> None:
    names = ("this model", f"{large['parameters'] / 1e6:.0f} M random\nweights")
    limits = (_layer_limit(plan.config(DMTD)), _large_limit(large))
    bars = axis.bar(names, [_speed_up(decoding), _speed_up(large)], color="tab:blue", width=0.5)
    axis.bar_label(bars, fmt="%.2fx")
    for place, limit in enumerate(limits):
        axis.hlines(limit, place - 0.35, place + 0.35, color="black", linestyle="--", label="limit" if place == 0 else None)
    axis.axhline(1, color="tab:orange", label=CONTROL)
    axis.set(title="Decoding speed, times vanilla", ylim=(0, 1.15 * max(limits)))
    axis.legend(fontsize="small", loc="lower right")


def summary(plan: Plan, decoding: Mapping[str, Any], large: Mapping[str, Any]) -> str:
    """What a person should know without opening the report: figures and one pair of samples."""
    rows = _overview(plan, decoding, large)
    lines = ["  ".join(cell.replace("`", "").replace("*", "") for cell in row if cell) for row in rows.rows]
    head = f"(figures: {CONTROL}, {DMTD})"
    blocks = [head, *lines, "", f"Prompt: {decoding['prompts'][0]}"]
    blocks += [f"{name}: {decoding['models'][name]['continuations'][0].strip()}" for name in (CONTROL, DMTD)]
    return "\n".join(blocks)


def write_report(plan: Plan, seconds: Mapping[str, float]) -> str:
    """Write `report.md`, `report.html` and `curves.png`; a summary in plain text. `seconds` is the time of each part."""
    decoding, large = (read_object(path, _NOT_WRITTEN) for path in (plan.decoding_file, plan.large_file))
    draw_curves(plan, decoding, large, plan.directory / "curves.png")
    blocks = render(plan, decoding, large, seconds)
    write_atomically(plan.directory / "report.md", to_markdown(blocks))
    write_atomically(plan.directory / "report.html", to_html(blocks, title=_TITLE))
    return summary(plan, decoding, large)
