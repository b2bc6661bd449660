"""A sample of a token file, tokenised again by the reference: the ids must be those of the Hugging Face tokenizer.

The text is that of the ids themselves, which no tokenizer of bytes loses anything of. So no input is needed, and ids that are not
what `tokenizers` makes of their own text are found, whoever made them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dmtd.data.batches.manifest import Manifest, read_manifest
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.tokenizer import ControlIds, TextEncoder, encoder_json, load_tokenizer
from megatron_dmtd.errors import DataError

#: tokens of a sample, and of one of its documents; longer ones are left out
_MOST_TOKENS, _LONGEST = 2_000_000, 200_000
#: differences that a message shows
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Retokenised:
    """How much was compared."""

    num_documents: int
    num_tokens: int
    reason: str = ""
    """Why nothing could be compared; empty if something was."""


def retokenise(prefix: str, tokenizer_dir: str, *, num_documents: int) -> Retokenised:
    """Compare `num_documents` documents of `prefix`, evenly spread, or all that there are.

    Raises `DataError` that shows the first differences and counts the documents that have one.
    """
    file, manifest = TokenFile(prefix), read_manifest(prefix)
    tokenizer = load_tokenizer(tokenizer_dir)
    if not _is_of_bytes(tokenizer.backend_tokenizer.to_str()):
        return Retokenised(num_documents=0, num_tokens=0, reason="its tokenizer does not decode to the very text")
    reference = _Reference(tokenizer, manifest)
    chosen = np.unique(np.linspace(0, len(file) - 1, num=min(num_documents, len(file))).astype(np.int64)).tolist()
    compared = num_tokens = 0
    different: list[str] = []
    for document in chosen:
        length = int(file.lengths(document, document + 1)[0])
        if length > _LONGEST or num_tokens + length > _MOST_TOKENS:
            continue
        difference = reference.difference(file.read(document, 0, length))
        compared, num_tokens = compared + 1, num_tokens + length
        if difference:
            different.append(f"document {document}, {difference}")
    if different:
        raise DataError(
            found=f"{prefix}: {len(different)} of {compared} documents with other ids: {'; '.join(different[:_SHOWN])}",
            required="the ids that tokenizers gives, which are those of the Hugging Face tokenizer",
            remedy="tokenise again with tools/preprocess.py --encoder tokenizers, and report the text",
        )
    return Retokenised(num_documents=compared, num_tokens=num_tokens, reason="" if compared else "all its documents are too long")


def _is_of_bytes(tokenizer_json: str) -> bool:
    decoder = json.loads(tokenizer_json)["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


class _Reference:
    """The tokenizer, as it makes texts and chats."""

    def __init__(self, tokenizer: object, manifest: Manifest | None) -> None:
        from transformers import PreTrainedTokenizerFast

        assert isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer)
        eos = tokenizer.eos_token_id
        given = ControlIds(eos=eos, pad=eos, mask=eos)
        control = given if manifest is None else ControlIds(eos=eos, pad=manifest.pad_token_id, mask=manifest.mask_token_id)
        self._tokenizer, self._eos = tokenizer, eos
        self._bos = tokenizer.bos_token_id if manifest is None else manifest.bos_token_id
        self._texts = TextEncoder(encoder_json(tokenizer, control, chats=False))
        self._chats = TextEncoder(encoder_json(tokenizer, control, chats=True), chats=True)

    def difference(self, ids_N: npt.NDArray[np.integer]) -> str:
        """Where the ids of a document differ from those of its text; empty if nowhere."""
        found = ids_N.tolist()
        body = found[:-1] if found and found[-1] == self._eos else found
        bos = [self._bos] if self._bos is not None and body[:1] == [self._bos] else []
        as_text = [*bos, *self._again(self._texts, body[len(bos) :])]
        if as_text == body or self._again(self._chats, found) == found:
            return ""
        place = next((nth for nth, pair in enumerate(zip(body, as_text)) if pair[0] != pair[1]), min(len(body), len(as_text)))
        shown, wanted = (self._tokenizer.convert_ids_to_tokens(ids[place : place + 3]) for ids in (body, as_text))
        return f"token {place}: {shown} instead of {wanted}"

    def _again(self, encoder: TextEncoder, ids: list[int]) -> list[int]:
        text = self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        again: list[int] = encoder.encode_batch([text])[0].tolist()
        return again
