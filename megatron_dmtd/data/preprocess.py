"""Documents to token files: tokenise, end each document with EOS, and write Megatron's IndexedDataset with a manifest.

Everything is written under temporary names and renamed at the end, the index last: an interrupted run leaves nothing that looks
finished. All that can be refused is refused before the first document is tokenised.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from megatron_dmtd.data.documents import Document, DocumentSource, Split, check_fraction, in_split
from megatron_dmtd.data.manifest import Manifest, dump_manifest, manifest_path
from megatron_dmtd.data.token_file import token_file_paths
from megatron_dmtd.data.tokenizer import ControlIds, TextEncoder, control_ids, load_tokenizer
from megatron_dmtd.errors import DataError

#: what is tokenised at once, at most, but for a single longer document
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """What to make of a source."""

    tokenizer_dir: str
    """Folder of a Hugging Face fast tokenizer."""
    output_prefix: str
    """The token file, without a suffix; with a held-out split, what its two names start with."""
    heldout_fraction: float = 0.0
    """Share of the documents to hold out, at least 0 and less than 1. Above 0 there are two files, `-train` and `-heldout`."""
    mask_token_id: int | None = None
    """The MASK id that the model will use. None: the tokenizer's."""
    overwrite: bool = False
    """Whether to replace files that exist."""
    show_progress: bool = False
    """A progress bar on stderr."""

    def outputs(self) -> dict[Split, str]:
        """The prefix of each token file."""
        if self.heldout_fraction == 0:
            return {"all": self.output_prefix}
        return {"train": f"{self.output_prefix}-train", "heldout": f"{self.output_prefix}-heldout"}


def preprocess(source: DocumentSource, options: PreprocessOptions) -> dict[str, Manifest]:
    """Write the token files of `source` and return the manifest of each prefix.

    Raises:
        DataError: the tokenizer cannot be used, an output exists, the source or a split holds no text, or the fraction is none.

    """
    _check_options(options)
    tokenizer = load_tokenizer(options.tokenizer_dir)
    control = control_ids(tokenizer, mask_token_id=options.mask_token_id)
    encoder = TextEncoder(tokenizer, control)
    documents = _not_empty(source)
    for prefix in options.outputs().values():
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(_TokenWriter(prefix, vocab_size=encoder.vocab_size))
            for split, prefix in options.outputs().items()
        }
        _write(documents, writers, encoder, control, options)
        _check_counts(writers)
        manifests = {split: _manifest(writer, split, source, encoder, control, options) for split, writer in writers.items()}
        for split, writer in writers.items():
            writer.publish(manifests[split])
        return {writer.prefix: manifests[split] for split, writer in writers.items()}


def _check_options(options: PreprocessOptions) -> None:
    check_fraction(options.heldout_fraction)
    paths = [path for prefix in options.outputs().values() for path in (*token_file_paths(prefix), manifest_path(prefix))]
    existing = [str(path) for path in paths if path.exists()]
    if existing and not options.overwrite:
        raise DataError(
            found=f"{', '.join(existing)} already there", required="new files", remedy="name another output, or pass --overwrite"
        )


def _not_empty(source: DocumentSource) -> Iterator[Document]:
    documents = iter(source)
    first = next(documents, None)
    if first is None:
        raise DataError(
            found=f"no documents in {source.description} ({len(source.skipped)} left out, because they are not text)",
            required="at least one",
            remedy="check the input",
        )
    return chain([first], documents)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(
    documents: Iterator[Document],
    writers: dict[Split, _TokenWriter],
    encoder: TextEncoder,
    control: ControlIds,
    options: PreprocessOptions,
) -> None:
    from tqdm import tqdm

    with tqdm(unit=" documents", disable=not options.show_progress) as bar:
        for batch in _batches(documents):
            for document, ids in zip(batch, encoder.encode_batch([document.text for document in batch])):
                (writer,) = (w for split, w in writers.items() if in_split(document.name, split, options.heldout_fraction))
                if document.text:
                    writer.add(np.append(ids, np.int32(control.eos)))
                else:
                    writer.num_empty += 1
            bar.update(len(batch))


def _check_counts(writers: dict[Split, _TokenWriter]) -> None:
    for split, writer in writers.items():
        if writer.num_documents == 0:
            raise DataError(
                found=f"no text in the split {split!r} ({writer.num_empty} empty documents)",
                required="at least one document with text in each token file",
                remedy="check the input, or change the held-out fraction",
            )


def _manifest(
    writer: _TokenWriter,
    split: Split,
    source: DocumentSource,
    encoder: TextEncoder,
    control: ControlIds,
    options: PreprocessOptions,
) -> Manifest:
    return Manifest(
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        num_empty=writer.num_empty,
        skipped=list(source.skipped),
        dtype=np.dtype(writer.dtype).name,
        max_token_id=writer.max_token_id,
        vocab_size=encoder.vocab_size,
        eos_token_id=control.eos,
        pad_token_id=control.pad,
        mask_token_id=control.mask,
        tokenizer_sha256=hashlib.sha256((Path(options.tokenizer_dir) / "tokenizer.json").read_bytes()).hexdigest(),
        source=source.description,
        split=split,
        heldout_fraction=options.heldout_fraction,
    )


class _TokenWriter:
    """One token file under temporary names, until `publish`. Leaving the context removes what was not published."""

    def __init__(self, prefix: str, *, vocab_size: int) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # seconds of import

        self.prefix = prefix
        self.dtype = DType.optimal_dtype(vocab_size)
        self.num_documents = 0
        self.num_tokens = 0
        self.num_empty = 0
        self.max_token_id = 0
        self._final = (*token_file_paths(prefix), manifest_path(prefix))
        self._partial = tuple(Path(f"{path}.partial-{os.getpid()}") for path in self._final)
        self._builder = IndexedDatasetBuilder(str(self._partial[0]), dtype=self.dtype)

    def __enter__(self) -> _TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._builder.data_file.close()
        for path in self._partial:
            path.unlink(missing_ok=True)

    def add(self, ids: npt.NDArray[np.int32]) -> None:
        """Append one document."""
        self._builder.add_document(ids, [ids.size])
        self.num_documents += 1
        self.num_tokens += ids.size
        self.max_token_id = max(self.max_token_id, int(ids.max()))

    def publish(self, manifest: Manifest) -> None:
        """Give the files their names: the index last, since tokens without it are not a token file."""
        bin_partial, index_partial, manifest_partial = self._partial
        bin_path, index_path, manifest_file = self._final
        self._builder.finalize(str(index_partial))
        manifest_partial.write_text(dump_manifest(manifest), encoding="utf-8")
        for path in self._partial:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        index_path.unlink(missing_ok=True)  # the old index must never describe the new tokens
        os.replace(bin_partial, bin_path)
        os.replace(manifest_partial, manifest_file)
        os.replace(index_partial, index_path)
