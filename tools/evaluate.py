#!/usr/bin/env python3
"""Evaluate a model: held-out loss by phase of the cycle, agreement with an ordinary decoder, and speed; with plots.

    python tools/evaluate.py exported --data data/valid --output report
    python tools/evaluate.py exported --text held_out.txt --reference Qwen3-0.6B --output report

A token file of another tokenizer than the model's is refused, as far as its manifest and the model's folder can tell, and so is a
reference with another tokenizer.

The loss of phase k is that of the tokens predicted at phase k of their cycles, by the training rules. Agreement compares greedy
outputs with those of `--reference`, or of the same weights as an ordinary decoder: the share of equal tokens at each distance
from the prompt, and the length of the common prefix. The report folder gets `results.json`, `loss.png`, `agreement.png` and
`speed.png`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.bos import check_bos
from megatron_dmtd.data.corpora.verify import check_tokenizer
from megatron_dmtd.errors import ConfigError, DataError, DMTDError, Refusal
from megatron_dmtd.inference.config import require_directory
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.infra.directories import new_directory
from megatron_dmtd.infra.disk import disk_errors
from megatron_dmtd.infra.json_files import read_object

TOKENIZER = "tokenizer.json"
_DAMAGED = Refusal(ConfigError, required="a JSON object", remedy="copy the folder again")

# torch and transformers take seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    from megatron_dmtd.inference import Engine


def positive(text: str) -> int:
    """A positive integer given on the command line."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="export, or Qwen3 or Llama directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="prefix of a token file (tools/preprocess.py)")
    source.add_argument("--text", type=Path, help="text file; one document")
    parser.add_argument("--reference", help="model directory to compare outputs with (default: the same weights as vanilla)")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--documents", type=positive, default=32, help="maximum number of documents (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=positive, default=1024, help="maximum tokens to use of a document (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-length", type=positive, default=32, help="tokens of a document used as a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, help="tokens to generate per prompt (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=4, help="prompts to decode at once (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="type of weights and activations (default: %(default)s)",
    )
    parser.add_argument("--device", help="for example cpu or cuda:1 (default: a GPU if there is one)")
    return parser.parse_args(argv)


def check_tokenizers(options: argparse.Namespace) -> None:
    """Refuse ids of another tokenizer than the model's; say so on standard error where nothing can be compared.

    Raises `DataError` for a token file of another tokenizer, `ConfigError` for a reference that has another one.
    """
    model = Path(options.model)
    if options.data is not None:
        if read_manifest(options.data) is None:
            _not_compared(f"{options.data} has no manifest")
        elif not (model / TOKENIZER).is_file():
            _not_compared(f"{model} has no {TOKENIZER}")
        else:
            check_tokenizer(options.data, options.model)
            check_bos(options.data, options.model)
    if options.reference is not None:
        _check_reference(model / TOKENIZER, Path(options.reference) / TOKENIZER)


def _not_compared(why: str) -> None:
    print(f"not checked whether the ids are those of the model's tokenizer: {why}", file=sys.stderr)


def _check_reference(own: Path, other: Path) -> None:
    """Two files may be written differently and still be the same tokenizer."""
    absent = [path for path in (own, other) if not path.is_file()]
    if absent:
        _not_compared(f"{absent[0].parent} has no {TOKENIZER}")
    elif own.read_bytes() != other.read_bytes() and read_object(own, _DAMAGED) != read_object(other, _DAMAGED):
        raise ConfigError(
            found=f"{other} describes another tokenizer than {own}",
            required="a reference with the model's tokenizer: both models read the same ids",
            remedy="choose another --reference, or leave it out to compare with the same weights as an ordinary decoder",
        )


def read_documents(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the documents, cut to `max_length`. Raises `DataError` if none is long enough for a prompt."""
    if options.data is not None:
        stored = TokenFile(options.data)
        lengths = stored.lengths(0, min(options.documents, len(stored))).tolist()
        documents = [stored.read(index, 0, min(length, options.max_length)).tolist() for index, length in enumerate(lengths)]
    else:
        try:
            text = options.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(found=f"{options.text}: {error}", required="a text file in UTF-8", remedy="correct --text") from error
        from megatron_dmtd.inference.text import encode, load_tokenizer

        ids = encode(load_tokenizer(Path(options.model)), text)
        starts = range(0, len(ids), options.max_length)
        documents = [ids[start : start + options.max_length] for start in starts][: options.documents]
    if not any(len(document) > options.prompt_length for document in documents):
        raise DataError(
            found=f"documents of at most {max(map(len, documents), default=0)} tokens",
            required=f"one of more than --prompt-length {options.prompt_length}",
            remedy="give longer texts, or lower --prompt-length",
        )
    return documents


def loss_by_phase(engine: Engine, documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Mean loss in nats per token, over all predicted tokens and by the phase of the predicting position."""
    from megatron_dmtd.inference import score

    sums = [0.0] * engine.method.cycle_length
    counts = [0] * engine.method.cycle_length
    for document in documents:
        for position, logprob in enumerate(score(engine, document)):
            sums[engine.method.phase(position)] -= logprob
            counts[engine.method.phase(position)] += 1
    by_phase = [total / count if count else None for total, count in zip(sums, counts)]
    return {"loss": sum(sums) / sum(counts), "tokens": sum(counts), "loss_by_phase": by_phase}


def outputs(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """Greedy outputs, and their combined tokens per second, including the time for prompts."""
    from megatron_dmtd.inference import SamplingParams

    start = time.perf_counter()
    completions = engine.generate(prompts, max_new_tokens=max_new_tokens, params=SamplingParams(ignore_eos=True))
    seconds = time.perf_counter() - start
    refused = [completion.refusal for completion in completions if completion.refusal is not None]
    if refused:
        raise refused[0]
    return [completion.token_ids for completion in completions], len(prompts) * max_new_tokens / seconds


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Share of equal tokens at each distance from the prompt, and the mean length of the common prefix."""
    equal = [[one == other for one, other in zip(*pair)] for pair in zip(ours, theirs)]
    common = [row.index(False) if False in row else len(row) for row in equal]
    return {
        "share": statistics.fmean(value for row in equal for value in row),
        "share_by_distance": [statistics.fmean(column) for column in zip(*equal)],
        "common_beginning": statistics.fmean(common),
        "outputs": len(equal),
    }


def make_engine(model: str, options: argparse.Namespace, *, batch: int, variant: str | None = None) -> Engine:
    """An engine with room for documents and outputs. Raises `ConfigError` if the model is too short."""
    from megatron_dmtd.inference import Engine, EngineConfig

    config = EngineConfig(max_batch=batch, prefix_caching=False)
    engine = Engine(model, config, dtype=options.dtype, device=options.device, variant=variant)
    needed = max(options.max_length, options.prompt_length + options.max_new_tokens)
    if engine.max_length < needed:
        raise ConfigError(
            found=f"texts of {needed} tokens for {model}",
            required=f"at most {engine.max_length}",
            remedy="lower --max-length, --prompt-length or --max-new-tokens",
        )
    return engine


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Compute all results."""
    documents = read_documents(options)
    engine = make_engine(options.model, options, batch=options.batch)
    results: dict[str, Any] = {"model": str(options.model), "variant": engine.method.variant}
    results["held_out"] = loss_by_phase(engine, [document for document in documents if len(document) > 1])
    prompts = [document[: options.prompt_length] for document in documents if len(document) > options.prompt_length]
    reference = options.reference or options.model
    other = make_engine(reference, options, batch=options.batch, variant=None if options.reference else "vanilla")
    results["reference"] = {"model": str(reference), "variant": other.method.variant}
    results["reference"]["held_out"] = loss_by_phase(other, [document for document in documents if len(document) > 1])
    own, own_speed = outputs(engine, prompts, options.max_new_tokens)
    theirs, their_speed = outputs(other, prompts, options.max_new_tokens)
    results["agreement"] = agreement(own, theirs)
    results["speed"] = {"tokens_per_s": own_speed, "reference_tokens_per_s": their_speed, "batch": options.batch}
    return results


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw the three plots."""
    from matplotlib.figure import Figure

    reference = results["reference"]
    names = (results["variant"], f"reference ({reference['variant']})")

    def save(name: str, fill: Callable[[Any], None]) -> None:
        figure = Figure(figsize=(6, 4), layout="constrained")
        fill(figure.subplots())
        figure.savefig(folder / name, dpi=120)

    def loss(axes: Any) -> None:
        by_phase = [value if value is not None else float("nan") for value in results["held_out"]["loss_by_phase"]]
        axes.bar([str(phase) for phase in range(len(by_phase))], by_phase, label=names[0])
        axes.axhline(reference["held_out"]["loss"], color="black", linestyle="--", label=names[1])
        axes.set(xlabel="phase of the cycle", ylabel="held-out loss, nats per token", title="Loss by phase")
        axes.legend()

    def agree(axes: Any) -> None:
        axes.plot(results["agreement"]["share_by_distance"])
        axes.set(
            xlabel="tokens after the prompt", ylabel="share of equal tokens", ylim=(0, 1.02), title="Agreement with the reference"
        )

    def speed(axes: Any) -> None:
        axes.bar(names, [results["speed"]["tokens_per_s"], results["speed"]["reference_tokens_per_s"]])
        axes.set(ylabel="tokens/s", title=f"Greedy decoding, {results['speed']['batch']} at once, prompts included")

    save("loss.png", loss)
    save("agreement.png", agree)
    save("speed.png", speed)


def make_parent(target: Path) -> None:
    """Create the parent folder of `target` before the long work. Raises `ConfigError` if nothing can be written there."""
    refusal = Refusal(ConfigError, required="a folder that can be created", remedy="choose another --output")
    with disk_errors(refusal, found=f"--output {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()


def write_report(results: dict[str, Any], target: Path) -> None:
    """Write `target` completely, or not at all."""
    with new_directory(target, error=ConfigError) as folder:
        (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        draw(results, folder)


def check_inputs(argv: Sequence[str] | None, *, come_later: bool) -> argparse.Namespace:
    """The options, if they are possible and, unless they `come_later`, their inputs are there. Raises `DMTDError`."""
    options = arguments(argv)
    if options.output.exists():
        raise ConfigError(found=f"{options.output} exists", required="a new folder", remedy="choose another --output")
    if not come_later:
        for model in filter(None, (options.model, options.reference)):
            require_directory(Path(model))
        if options.data is not None:
            TokenFile(options.data)
        elif not options.text.is_file():
            raise DataError(found=f"no file {options.text}", required="a text file in UTF-8", remedy="correct --text")
        check_tokenizers(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused (the message says what to change), 130 interrupted."""
    try:
        options = check_inputs(argv, come_later=False)
        make_parent(options.output)
        results = evaluate(options)
        write_report(results, options.output)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    held_out, speed = results["held_out"], results["speed"]
    phases = ", ".join("-" if value is None else f"{value:.3f}" for value in held_out["loss_by_phase"])
    print(f"held-out loss {held_out['loss']:.4f} over {held_out['tokens']} tokens; by phase {phases}")
    print(f"reference ({results['reference']['variant']}) {results['reference']['held_out']['loss']:.4f}")
    print(
        f"agreement {results['agreement']['share']:.3f}, common beginning {results['agreement']['common_beginning']:.1f} tokens"
    )
    print(f"{speed['tokens_per_s']:.2f} tokens/s, reference {speed['reference_tokens_per_s']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
