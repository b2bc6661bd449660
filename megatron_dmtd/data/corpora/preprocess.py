"""Documents to token files: tokenise, end each text with EOS, and write Megatron's IndexedDataset with a manifest.

The result depends only on the inputs, the tokenizer and the options: the number of workers, an interruption, and the library that
tokenises do not change a byte of it. Everything that can be refused is refused before the first document is tokenised.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.data.batches.manifest import Manifest, dump_manifest, read_manifest
from megatron_dmtd.data.batches.token_file import token_dtype
from megatron_dmtd.data.corpora.bos import AddBos, bos_of
from megatron_dmtd.data.corpora.documents import RecordKeys, Split, check_fraction
from megatron_dmtd.data.corpora.encoding import BlockEncoder, BlockTokens, EncodingJob, sample_texts
from megatron_dmtd.data.corpora.fast_encoder import Choice, EncoderName, check_equal, choose_encoder
from megatron_dmtd.data.corpora.inputs import BLOCK_BYTES, Block, Input
from megatron_dmtd.data.corpora.output import PartialOutput, RunState, final_paths
from megatron_dmtd.data.corpora.shards import Shard, make_shard, source_sha256
from megatron_dmtd.data.corpora.tokenizer import (
    ControlIds,
    TextEncoder,
    control_ids,
    encoder_json,
    load_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
)
from megatron_dmtd.data.corpora.workers import WorkerPool
from megatron_dmtd.errors import DataError

#: characters of each input, and inputs, on which the fast encoder is compared before it is used
_SAMPLE_CHARACTERS = 100_000
_SAMPLED_INPUTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """What to make of the inputs."""

    tokenizer_dir: str
    """Folder of a Hugging Face fast tokenizer."""
    output_prefix: str
    """The token file, without a suffix; with a held-out split, what its two names start with."""
    heldout_fraction: float = 0.0
    """Share of the documents to hold out, at least 0 and less than 1. Above 0 there are two files, `-train` and `-heldout`."""
    mask_token_id: int | None = None
    """The MASK id that the model will use. None: the tokenizer's."""
    add_bos: AddBos = "auto"
    """Whether BOS begins each text. `auto`: as the tokenizer does. Chats begin as their template says."""
    keys: RecordKeys = field(default_factory=RecordKeys)
    """Which field of a record is read, and whether it is a chat."""
    assistant_loss: bool = False
    """In chats, only what the assistant wrote carries loss."""
    skip_bad: bool = False
    """Leave out, and count, documents that cannot be used, instead of refusing the first."""
    dtype: str = "auto"
    """Type of the ids in the file, `uint16` or `int32`. `auto`: the smaller that holds the vocabulary."""
    encoder: EncoderName | None = None
    """The library that tokenises. None: the fast one where it gives equal ids."""
    num_workers: int | None = None
    """Processes that tokenise; 1: this one. None: one per CPU that this process may use."""
    shard: tuple[int, int] = (0, 1)
    """(i, n): read the i-th of n parts of the inputs, i from 0."""
    overwrite: bool = False
    """Whether to replace files that exist, and discard an unfinished run of other inputs or options."""
    save_seconds: float = 10.0
    """Time between two points from which an interrupted run can resume."""
    block_bytes: int = BLOCK_BYTES
    """Raw content that is tokenised at once."""
    show_progress: bool = False
    """A progress bar on stderr."""

    def outputs(self) -> dict[Split, str]:
        """The prefix of each token file."""
        index, count = self.shard
        prefix = self.output_prefix if count == 1 else f"{self.output_prefix}-{index:05d}-of-{count:05d}"
        if self.heldout_fraction == 0:
            return {"all": prefix}
        return {"train": f"{prefix}-train", "heldout": f"{prefix}-heldout"}

    def partial_prefix(self) -> str:
        """Prefix of the unfinished run's folder."""
        index, count = self.shard
        return self.output_prefix if count == 1 else f"{self.output_prefix}-{index:05d}-of-{count:05d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run."""

    manifests: dict[str, Manifest]
    """By prefix."""
    choice: Choice | None
    """Which library tokenised, and why. None: an earlier run had tokenised everything."""
    resumed: bool
    """Whether it continued an interrupted run."""


def preprocess(inputs: Sequence[Input], options: PreprocessOptions, *, say: Callable[[str], None] = lambda _: None) -> Result:
    """Write the token files of `inputs`; `say` is called with what was decided before the work begins.

    Raises:
        DataError: the tokenizer cannot be used, an output exists, a document cannot be used (unless it may be skipped), a split
            holds no text, the disk is full.

    """
    _check_options(options)
    tokenizer = load_tokenizer(options.tokenizer_dir)
    control = control_ids(tokenizer, mask_token_id=options.mask_token_id)
    chats = options.keys.messages is not None
    renderer = ChatTemplates(tokenizer) if chats else None
    text = encoder_json(tokenizer, control, chats=chats)
    vocab_size = vocabulary_size(text, control)
    dtype = _dtype(options.dtype, vocab_size)
    shard = make_shard(inputs, index=options.shard[0], count=options.shard[1])
    bos = None if chats else bos_of(tokenizer, options.add_bos)
    header = _header(inputs, shard, options, control, dtype, bos)
    _check_outputs(options, header)
    with PartialOutput(
        options.partial_prefix(),
        options.outputs(),
        header=header,
        dtype=dtype,
        with_loss=options.assistant_loss,
        overwrite=options.overwrite,
        save_seconds=options.save_seconds,
    ) as output:
        if output.resumed:
            state = output.state
            say(f"going on with {output.folder}, after {state.input} inputs and {state.block} blocks")
        choice = None
        if not output.state.finished:
            reference = TextEncoder(text, chats=chats)
            choice = _choose(inputs, options, text, renderer, reference)
            say(f"tokenising with {choice.name}: {choice.reason}")
            if not chats:
                say(f"each document begins with BOS, id {bos}" if bos is not None else "documents begin without BOS")
            job = EncodingJob(
                tokenizer_dir=options.tokenizer_dir,
                tokenizer_json=text,
                encoder=choice.name,
                fast_model=choice.model,
                control=control,
                vocab_size=vocab_size,
                chats=chats,
                assistant_loss=options.assistant_loss,
                bos=bos,
                heldout_fraction=options.heldout_fraction,
                dtype=dtype,
            )
            unread = _write(_Blocks(shard, options, output.state, say), output, job, options, reference)
            for name, count in sorted(unread.items()):
                say(f"the chat template does not write {name}, which {count} chats have: the model does not learn from them")
            _check_counts(output)
            manifests = {split: _manifest(split, inputs, shard, output, job, options) for split in output.outputs}
            output.finish({split: dump_manifest(manifest) for split, manifest in manifests.items()})
        resumed = output.resumed
        output.publish()
    return Result(manifests={prefix: _published(prefix) for prefix in options.outputs().values()}, choice=choice, resumed=resumed)


def _published(prefix: str) -> Manifest:
    manifest = read_manifest(prefix)
    assert manifest is not None, prefix
    return manifest


def _check_options(options: PreprocessOptions) -> None:
    check_fraction(options.heldout_fraction)
    index, count = options.shard
    if not 0 <= index < count:
        raise DataError(found=f"shard {index}/{count}", required="i/n with i from 0 to n - 1", remedy="correct --shard")
    if options.num_workers is not None and options.num_workers < 1:
        raise DataError(found=f"{options.num_workers} workers", required="at least 1", remedy="correct --workers")
    if options.assistant_loss and options.keys.messages is None:
        raise DataError(
            found="loss on assistant turns only, of texts",
            required="chats",
            remedy="name the key of the turns with --messages-key",
        )


def _dtype(name: str, vocab_size: int) -> type[np.integer]:
    known: dict[str, type[np.integer]] = {"auto": token_dtype(vocab_size), "uint16": np.uint16, "int32": np.int32}
    dtype = known[name]
    if vocab_size - 1 > np.iinfo(dtype).max:
        raise DataError(
            found=f"ids up to {vocab_size - 1} in the type {name}",
            required=f"ids up to {np.iinfo(dtype).max}",
            remedy="use --dtype int32, or leave the choice to the command",
        )
    return dtype


def _header(
    inputs: Sequence[Input],
    shard: Shard,
    options: PreprocessOptions,
    control: ControlIds,
    dtype: type[np.integer],
    bos: int | None,
) -> dict[str, Any]:
    """Everything that determines the result, by a name for messages; not `skip_bad`, with which a refused run may be resumed."""
    return {
        "input": [one.identity() for one in inputs],
        "key": [options.keys.text, options.keys.messages],
        "tokenizer": tokenizer_sha256(options.tokenizer_dir),
        "mask id": control.mask,
        **({} if bos is None else {"BOS": bos}),  # absent without, as in runs that an older version began
        "held-out fraction": options.heldout_fraction,
        "loss": options.assistant_loss,
        "type": np.dtype(dtype).name,
        "shard": [shard.index, shard.count, shard.order],
        "block size": options.block_bytes,
    }


def _check_outputs(options: PreprocessOptions, header: dict[str, Any]) -> None:
    existing = [str(path) for path in final_paths(options.outputs()) if path.exists()]
    if not existing or options.overwrite or PartialOutput.is_publishing(options.partial_prefix(), header):
        return
    raise DataError(
        found=f"{', '.join(existing)} already there", required="new files", remedy="name another output, or pass --overwrite"
    )


def _choose(
    inputs: Sequence[Input],
    options: PreprocessOptions,
    tokenizer_json: str,
    renderer: ChatTemplates | None,
    reference: TextEncoder,
) -> Choice:
    chats = options.keys.messages is not None
    if options.assistant_loss:  # needs to know where in the text a token lies
        if options.encoder == "gigatoken":
            raise DataError(
                found="--encoder gigatoken with loss on assistant turns only",
                required="tokenizers, which says where in the text each token lies",
                remedy="leave the choice to the command",
            )
        return Choice(name="tokenizers", reason="it says where in the text each token lies")
    sample: list[str] = []
    for one in inputs[:: max(1, len(inputs) // _SAMPLED_INPUTS)][:_SAMPLED_INPUTS]:
        sample += sample_texts(one.blocks(_SAMPLE_CHARACTERS), renderer, num_characters=_SAMPLE_CHARACTERS)
    return choose_encoder(tokenizer_json, sample, chats=chats, wanted=options.encoder, reference=reference)


class _Blocks:
    """The blocks of this shard that are not done yet."""

    def __init__(self, shard: Shard, options: PreprocessOptions, state: RunState, say: Callable[[str], None]) -> None:
        self._shard, self._options, self._state, self._say = shard, options, state, say
        self._ends: deque[tuple[int, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """All of this shard; 0 if unknown."""
        return self._shard.num_bytes

    def __iter__(self) -> Iterator[Block]:
        state = self._state
        for nth, number, block in self._shard.blocks(self._options.block_bytes, first_input=state.input, first_block=state.block):
            self._ends.append((nth, number + 1))
            yield block

    def done(self) -> None:
        """Note in the state that the oldest block that was drawn is about to be written."""
        nth, number = self._ends.popleft()
        self._record_sources(until=nth)
        self._state.input, self._state.block = nth, number

    def all_done(self) -> None:
        """Note in the state that nothing is left."""
        self._record_sources(until=len(self._shard.inputs))
        self._state.input, self._state.block = len(self._shard.inputs), 0

    def _record_sources(self, *, until: int) -> None:
        """Keep the checksums of the inputs that were read to their ends."""
        for one in self._shard.inputs[len(self._state.sources) : until]:
            source = {"name": one.name, "num_bytes": one.num_bytes, "sha256": one.sha256}
            if one.remark:
                self._say(f"{one.name}: {one.remark}")
                source["remark"] = one.remark
            self._state.sources.append(source)


def _write(
    blocks: _Blocks, output: PartialOutput, job: EncodingJob, options: PreprocessOptions, reference: TextEncoder
) -> Counter[str]:
    """Returns what the chat template did not even name, with the number of chats that have it."""
    unread: Counter[str] = Counter()
    # closing: an error below must end the workers now, not when its traceback is forgotten
    with (
        _Progress(blocks.num_bytes, shown=options.show_progress) as progress,
        contextlib.closing(_encoded(blocks, job, options)) as encoded,
    ):
        for tokens in encoded:
            if tokens.bad and not options.skip_bad:
                if output.has_progress:
                    output.save(now=True)
                raise tokens.bad[0].error()
            if tokens.sample is not None:
                name, text, ids = tokens.sample
                check_equal(reference, text, ids, where=name)
            output.append(tokens.splits)
            output.state.skip(tokens.bad)
            blocks.done()
            output.save()
            unread.update(tokens.unread)
            progress.advance(tokens)
    blocks.all_done()
    return unread


def _encoded(blocks: _Blocks, job: EncodingJob, options: PreprocessOptions) -> Generator[BlockTokens, None, None]:
    """The result of each block, in order. For small inputs, starting processes is not worthwhile."""
    num_workers = options.num_workers or len(os.sched_getaffinity(0))
    if num_workers == 1 or (options.num_workers is None and 0 < blocks.num_bytes <= options.block_bytes):
        encode = BlockEncoder(job)
        yield from (encode(block) for block in blocks)
        return
    pool: WorkerPool[Block, BlockTokens]
    with WorkerPool(num_workers, BlockEncoder, job) as pool:
        yield from pool.ordered(blocks)


class _Progress:
    """A bar over the bytes of this shard, with time left, documents/s and tokens/s of this run."""

    def __init__(self, num_bytes: int, *, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=num_bytes or None, unit="B", unit_scale=True, disable=not shown)
        self._started = time.monotonic()
        self._num_documents = self._num_tokens = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, tokens: BlockTokens) -> None:
        self._num_documents += tokens.num_documents
        self._num_tokens += tokens.num_tokens
        seconds = max(time.monotonic() - self._started, 1e-6)
        self._bar.set_postfix_str(
            f"{self._num_documents} documents, {self._num_documents / seconds:.0f}/s, {self._num_tokens / seconds:.3g} tokens/s"
        )
        self._bar.update(tokens.num_bytes)


def _check_counts(output: PartialOutput) -> None:
    for split in output.outputs:
        counts = output.state.splits[split]
        if counts.num_documents and counts.num_without_targets == counts.num_documents:
            output.discard()
            raise DataError(
                found=f"{counts.num_documents} chats without a word of the assistant's, all of the split {split!r}",
                required="at least one token that carries loss in each token file",
                remedy="check the roles of the turns, or leave out --assistant-loss",
            )
        if counts.num_documents == 0:
            skipped = sum(output.state.skipped_counts.values())
            output.discard()  # no later run can make more of it
            raise DataError(
                found=f"no text in the split {split!r} ({skipped} documents left out)",
                required="at least one document with text in each token file",
                remedy="check the input, or change the held-out fraction",
            )


def _manifest(
    split: Split, inputs: Sequence[Input], shard: Shard, output: PartialOutput, job: EncodingJob, options: PreprocessOptions
) -> Manifest:
    state = output.state
    counts = state.splits[split]
    return Manifest(
        num_documents=counts.num_documents,
        num_tokens=counts.num_tokens,
        skipped_counts=dict(sorted(state.skipped_counts.items())),
        skipped=state.skipped,
        dtype=np.dtype(job.dtype).name,
        max_token_id=counts.max_token_id,
        vocab_size=job.vocab_size,
        eos_token_id=job.control.eos,
        pad_token_id=job.control.pad,
        mask_token_id=job.control.mask,
        add_bos="template" if job.chats else "no" if job.bos is None else "yes",
        bos_token_id=job.bos,
        num_without_targets=counts.num_without_targets,
        tokenizer_sha256=tokenizer_sha256(options.tokenizer_dir),
        source="; ".join(one.description for one in inputs),
        split=split,
        heldout_fraction=options.heldout_fraction,
        shard=f"{shard.index}/{shard.count}",
        order=shard.order,
        source_sha256=source_sha256(inputs),
        block_bytes=0 if shard.whole_inputs else options.block_bytes,
        loss="assistant" if options.assistant_loss else "all",
        bin_sha256=output.bin_sha256(split),
        first_source=shard.first_input,
        sources=state.sources,
    )
