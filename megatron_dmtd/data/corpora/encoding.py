"""From a block of documents to the arrays that are written: the work of one worker, a pure function of the block and the job.

A text becomes its ids and EOS. A chat becomes the ids of what the template writes, and nothing else.

Shape legend: D documents of a split of the block, T tokens of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_dmtd.data.corpora.chat import ChatError, ChatRenderer, Span
from megatron_dmtd.data.corpora.documents import BadDocument, Document, Split, is_heldout
from megatron_dmtd.data.corpora.fast_encoder import EncoderName, FastModel, make_encoder
from megatron_dmtd.data.corpora.inputs import Block
from megatron_dmtd.data.corpora.tokenizer import ControlIds, TextEncoder, load_tokenizer

#: characters of the longest document whose ids are handed back for comparison
_SAMPLE_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingJob:
    """All that a worker must know; can be sent to another process."""

    tokenizer_dir: str
    tokenizer_json: str
    """From `encoder_json`."""
    encoder: EncoderName
    fast_model: FastModel | None
    """What `gigatoken` loads; None if it is not the encoder."""
    control: ControlIds
    vocab_size: int
    """The highest id that may be written, plus 1."""
    chats: bool
    assistant_loss: bool
    """Whether only what the assistant wrote carries loss."""
    heldout_fraction: float
    dtype: type[np.integer]
    """Type of the ids in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTokens:
    """What a block adds to one token file."""

    tokens_T: npt.NDArray[np.integer]
    lengths_D: npt.NDArray[np.int32]
    loss_T: npt.NDArray[np.uint8] | None = None
    """1 where the token is a target, 0 elsewhere. None: all are."""
    max_token_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTokens:
    """What became of a block."""

    splits: dict[Split, SplitTokens]
    bad: list[BadDocument]
    num_bytes: int
    sample: tuple[str, str, npt.NDArray[np.integer]] | None = field(default=None)
    """Name, text and ids (without EOS) of one document, for comparison with the reference encoder."""

    @property
    def num_documents(self) -> int:
        """Documents of all splits."""
        return sum(split.lengths_D.size for split in self.splits.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all splits."""
        return sum(split.tokens_T.size for split in self.splits.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """A document as text, and what of it carries loss (None: all)."""

    name: str
    text: str
    spans: list[Span] | None = None


class BlockEncoder:
    """The encoder of one worker."""

    def __init__(self, job: EncodingJob) -> None:
        self._job = job
        self._renderer = ChatRenderer(load_tokenizer(job.tokenizer_dir)) if job.chats else None
        self._encoder = make_encoder(job.encoder, job.tokenizer_json, chats=job.chats, model=job.fast_model)
        self._reference = TextEncoder(job.tokenizer_json, chats=job.chats) if job.assistant_loss else None

    def __call__(self, block: Block) -> BlockTokens:
        """Encode all documents of `block`."""
        bad: list[BadDocument] = []
        texts: list[_Text] = []
        for entry in block.entries():
            ready = self._text(entry) if isinstance(entry, Document) else entry
            if isinstance(ready, BadDocument):
                bad.append(ready)
            else:
                texts.append(ready)
        tokens_T, lengths_D, loss_T = self._encode(texts)
        refused_D = self._refused(texts, tokens_T, lengths_D, bad)
        splits = self._split(texts, tokens_T, lengths_D, loss_T, refused_D)
        return BlockTokens(splits=splits, bad=bad, num_bytes=block.num_bytes, sample=self._sample(texts, tokens_T, lengths_D))

    def _text(self, document: Document) -> _Text | BadDocument:
        if self._renderer is None:
            return _Text(name=document.name, text=document.text)
        assert document.messages is not None, document
        try:
            if self._job.assistant_loss:
                text, spans = self._renderer.render_with_spans(document.messages)
                return _Text(name=document.name, text=text, spans=spans)
            return _Text(name=document.name, text=self._renderer.render(document.messages))
        except ChatError as error:
            found = f"{document.name}: {error}"
            return BadDocument(name=document.name, kind="no chat", found=found, required="a chat that the template can write")

    def _encode(self, texts: list[_Text]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.uint8] | None]:
        """Ids of all texts, their number per text, and which carry loss."""
        if self._reference is None:
            tokens_T, lengths_D = self._encoder.encode_flat([text.text for text in texts])
            return tokens_T, lengths_D, None
        ids, losses = [np.empty(0, np.int32)], [np.empty(0, np.uint8)]
        for text in texts:
            tokens, starts = self._reference.encode_with_starts(text.text)
            ids.append(tokens)
            losses.append(_inside(starts, text.spans or []))
        lengths_D = np.array([tokens.size for tokens in ids[1:]], dtype=np.int64)
        return np.concatenate(ids), lengths_D, np.concatenate(losses)

    def _refused(
        self, texts: list[_Text], tokens_T: npt.NDArray[np.int32], lengths_D: npt.NDArray[np.int64], bad: list[BadDocument]
    ) -> npt.NDArray[np.bool_]:
        """Which documents hold an id that no document may hold; each is added to `bad`."""
        control = self._job.control
        # a template writes EOS and PAD where they belong; MASK stands for a token not yet known, and belongs nowhere
        forbidden = (control.mask,) if self._job.chats else (control.eos, control.pad, control.mask)
        hits = np.flatnonzero(np.isin(tokens_T, forbidden))
        refused_D = np.zeros(len(texts), dtype=bool)
        for hit in hits.tolist():
            nth = int(np.searchsorted(np.cumsum(lengths_D), hit, side="right"))
            if not refused_D[nth]:
                refused_D[nth] = True
                found = f"{texts[nth].name}: the control id {tokens_T[hit]} from the text {texts[nth].text[:60]!r}"
                required = "control ids that no text can spell"
                bad.append(BadDocument(name=texts[nth].name, kind="control token", found=found, required=required))
        return refused_D

    def _split(
        self,
        texts: list[_Text],
        tokens_T: npt.NDArray[np.int32],
        lengths_D: npt.NDArray[np.int64],
        loss_T: npt.NDArray[np.uint8] | None,
        refused_D: npt.NDArray[np.bool_],
    ) -> dict[Split, SplitTokens]:
        if not self._job.chats:  # each text ends with EOS
            tokens_T = np.insert(tokens_T, np.cumsum(lengths_D), np.int32(self._job.control.eos))
            lengths_D = lengths_D + 1
        if self._job.heldout_fraction == 0:
            chosen: dict[Split, npt.NDArray[np.bool_]] = {"all": ~refused_D}
        else:
            heldout_D = np.array([is_heldout(text.name, self._job.heldout_fraction) for text in texts], dtype=bool)
            chosen = {"train": ~heldout_D & ~refused_D, "heldout": heldout_D & ~refused_D}
        return {split: self._select(chosen_D, tokens_T, lengths_D, loss_T) for split, chosen_D in chosen.items()}

    def _select(
        self,
        chosen_D: npt.NDArray[np.bool_],
        tokens_T: npt.NDArray[np.int32],
        lengths_D: npt.NDArray[np.int64],
        loss_T: npt.NDArray[np.uint8] | None,
    ) -> SplitTokens:
        if not chosen_D.all():
            chosen_T = np.repeat(chosen_D, lengths_D)
            tokens_T, lengths_D = tokens_T[chosen_T], lengths_D[chosen_D]
            loss_T = None if loss_T is None else loss_T[chosen_T]
        highest = int(tokens_T.max(initial=0))
        assert highest <= np.iinfo(self._job.dtype).max, (highest, self._job.dtype)
        assert lengths_D.max(initial=0) < 2**31, "an index holds lengths of 32 bits"
        return SplitTokens(
            tokens_T=tokens_T.astype(self._job.dtype), lengths_D=lengths_D.astype(np.int32), loss_T=loss_T, max_token_id=highest
        )

    def _sample(
        self, texts: list[_Text], tokens_T: npt.NDArray[np.int32], lengths_D: npt.NDArray[np.int64]
    ) -> tuple[str, str, npt.NDArray[np.integer]] | None:
        """The longest document that is not too long to be compared at every block."""
        if self._job.encoder == "tokenizers":
            return None
        candidates = [(len(text.text), nth) for nth, text in enumerate(texts) if len(text.text) <= _SAMPLE_CHARACTERS]
        if not candidates:
            return None
        _, nth = max(candidates)
        begin = int(lengths_D[:nth].sum())
        return texts[nth].name, texts[nth].text, tokens_T[begin : begin + int(lengths_D[nth])]


def _inside(starts: npt.NDArray[np.int64], spans: list[Span]) -> npt.NDArray[np.uint8]:
    """1 for each token that starts inside a span."""
    inside = np.zeros(starts.size, dtype=np.uint8)
    for begin, end in spans:
        inside |= ((starts >= begin) & (starts < end)).astype(np.uint8)
    return inside


def sample_texts(blocks: Iterator[Block], job_renderer: ChatRenderer | None, *, num_characters: int) -> list[str]:
    """The first documents of `blocks`, up to about `num_characters`, to choose an encoder by."""
    texts: list[str] = []
    size = 0
    for block in blocks:
        for entry in block.entries():
            if not isinstance(entry, Document):
                continue
            text = entry.text
            if job_renderer is not None:
                try:
                    text = job_renderer.render(entry.messages or [])
                except ChatError:
                    continue  # reported when its block is encoded
            texts.append(text[:num_characters])
            size += len(text)
            if size >= num_characters:
                return texts
    return texts
