"""Turns a block of documents into the arrays that are written: what one worker does, a pure function of the block and the job.

A text becomes its ids and EOS. A chat becomes the ids of what the template writes, and nothing else.

Shape legend: U documents of a split of the block, N tokens of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_dmtd.chats.spans import render_with_spans
from megatron_dmtd.chats.template import ChatTemplates, Span
from megatron_dmtd.chats.turns import ChatError
from megatron_dmtd.data.corpora.documents import BadDocument, Document, Split, is_heldout
from megatron_dmtd.data.corpora.fast_encoder import EncoderName, FastModel, make_encoder
from megatron_dmtd.data.corpora.inputs import Block
from megatron_dmtd.data.corpora.tokenizer import ControlIds, TextEncoder, load_tokenizer

#: longest document, in characters, whose ids are returned for comparison
_SAMPLE_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingJob:
    """Everything that a worker needs; can be sent to another process."""

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
    bos: int | None
    """Put before each text. None: nothing is, as before chats, which begin as their template says."""
    heldout_fraction: float
    dtype: type[np.integer]
    """Type of the ids in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTokens:
    """What a block adds to one token file."""

    tokens_N: npt.NDArray[np.integer]
    lengths_U: npt.NDArray[np.int32]
    loss_N: npt.NDArray[np.uint8] | None = None
    """1 where the token is a target, 0 elsewhere. None: all are."""
    max_token_id: int = 0

    @property
    def num_without_targets(self) -> int:
        """Documents of which no token is a target. A document's first token never is: nothing precedes it."""
        if self.loss_N is None or not self.lengths_U.size:
            return 0
        begins_U = np.concatenate([[0], np.cumsum(self.lengths_U)[:-1]])
        targets_N = self.loss_N.astype(np.int64)
        targets_N[begins_U] = 0
        return int((np.add.reduceat(targets_N, begins_U) == 0).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTokens:
    """The result of a block."""

    splits: dict[Split, SplitTokens]
    bad: list[BadDocument]
    num_bytes: int
    sample: tuple[str, str, npt.NDArray[np.integer]] | None = field(default=None)
    """Name, text and ids (without EOS) of one document, for comparison with the reference encoder."""

    unread: Counter[str] = field(default_factory=Counter)
    """Parts of chats that the template does not even name, and the number of chats that have them."""

    @property
    def num_documents(self) -> int:
        """Documents of all splits."""
        return sum(split.lengths_U.size for split in self.splits.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all splits."""
        return sum(split.tokens_N.size for split in self.splits.values())


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
        self._renderer = ChatTemplates(load_tokenizer(job.tokenizer_dir)) if job.chats else None
        self._encoder = make_encoder(job.encoder, job.tokenizer_json, chats=job.chats, model=job.fast_model)
        self._reference = TextEncoder(job.tokenizer_json, chats=job.chats) if job.assistant_loss else None

    def __call__(self, block: Block) -> BlockTokens:
        """Encode all documents of `block`."""
        bad: list[BadDocument] = []
        texts: list[_Text] = []
        unread: Counter[str] = Counter()
        for entry in block.entries():
            ready = self._text(entry) if isinstance(entry, Document) else entry
            if isinstance(ready, BadDocument):
                bad.append(ready)
            else:
                texts.append(ready)
                if self._renderer is not None and isinstance(entry, Document) and entry.chat is not None:
                    unread.update(self._renderer.of(entry.chat).unread(entry.chat))
        tokens_N, lengths_U, loss_N = self._encode(texts)
        refused_U = self._refused(texts, tokens_N, lengths_U, bad)
        splits = self._split(texts, tokens_N, lengths_U, loss_N, refused_U)
        sample = self._sample(texts, tokens_N, lengths_U)
        return BlockTokens(splits=splits, bad=bad, num_bytes=block.num_bytes, sample=sample, unread=unread)

    def _text(self, document: Document) -> _Text | BadDocument:
        if self._renderer is None:
            return _Text(name=document.name, text=document.text)
        assert document.chat is not None, document
        try:
            if self._job.assistant_loss:
                text, spans = render_with_spans(self._renderer, document.chat)
                return _Text(name=document.name, text=text, spans=spans)
            return _Text(name=document.name, text=self._renderer.render(document.chat))
        except ChatError as error:
            found = f"{document.name}: {error}"
            return BadDocument(name=document.name, kind="no chat", found=found, required="a chat that the template can write")

    def _encode(self, texts: list[_Text]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.uint8] | None]:
        """Ids of all texts, their number per text, and which carry loss."""
        if self._reference is None:
            tokens_N, lengths_U = self._encoder.encode_flat([text.text for text in texts])
            return tokens_N, lengths_U, None
        ids, losses = [np.empty(0, np.int32)], [np.empty(0, np.uint8)]
        for text in texts:
            tokens, places = self._reference.encode_with_places(text.text)
            ids.append(tokens)
            losses.append(_inside(places, text.spans or []))
        lengths_U = np.array([tokens.size for tokens in ids[1:]], dtype=np.int64)
        return np.concatenate(ids), lengths_U, np.concatenate(losses)

    def _refused(
        self, texts: list[_Text], tokens_N: npt.NDArray[np.int32], lengths_U: npt.NDArray[np.int64], bad: list[BadDocument]
    ) -> npt.NDArray[np.bool_]:
        """Which documents contain an id that no document may contain; each is added to `bad`."""
        control = self._job.control
        # a template writes EOS and PAD where they belong; MASK stands for a token not yet known, and belongs nowhere
        forbidden = (control.mask,) if self._job.chats else (control.eos, control.pad, control.mask)
        hits = np.flatnonzero(np.isin(tokens_N, forbidden))
        refused_U = np.zeros(len(texts), dtype=bool)
        for hit in hits.tolist():
            nth = int(np.searchsorted(np.cumsum(lengths_U), hit, side="right"))
            if not refused_U[nth]:
                refused_U[nth] = True
                found = f"{texts[nth].name}: the control id {tokens_N[hit]} from the text {texts[nth].text[:60]!r}"
                required = "control ids that no text can spell"
                bad.append(BadDocument(name=texts[nth].name, kind="control token", found=found, required=required))
        return refused_U

    def _split(
        self,
        texts: list[_Text],
        tokens_N: npt.NDArray[np.int32],
        lengths_U: npt.NDArray[np.int64],
        loss_N: npt.NDArray[np.uint8] | None,
        refused_U: npt.NDArray[np.bool_],
    ) -> dict[Split, SplitTokens]:
        if not self._job.chats:  # each text ends with EOS
            ends_U = np.cumsum(lengths_U)
            tokens_N, lengths_U = self._framed(tokens_N, ends_U - lengths_U, ends_U), lengths_U + 1 + (self._job.bos is not None)
        if self._job.heldout_fraction == 0:
            chosen: dict[Split, npt.NDArray[np.bool_]] = {"all": ~refused_U}
        else:
            heldout_U = np.array([is_heldout(text.name, self._job.heldout_fraction) for text in texts], dtype=bool)
            chosen = {"train": ~heldout_U & ~refused_U, "heldout": heldout_U & ~refused_U}
        return {split: self._select(chosen_U, tokens_N, lengths_U, loss_N) for split, chosen_U in chosen.items()}

    def _framed(
        self, tokens_N: npt.NDArray[np.int32], begins_U: npt.NDArray[np.int64], ends_U: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """The ids with EOS after each text and, where documents have it, BOS before."""
        if self._job.bos is None:
            return np.insert(tokens_N, ends_U, np.int32(self._job.control.eos))
        places = np.stack([begins_U, ends_U], axis=1).reshape(-1)  # where one text ends and the next begins, EOS comes first
        values = np.tile(np.array([self._job.bos, self._job.control.eos], dtype=np.int32), len(begins_U))
        return np.insert(tokens_N, places, values)

    def _select(
        self,
        chosen_U: npt.NDArray[np.bool_],
        tokens_N: npt.NDArray[np.int32],
        lengths_U: npt.NDArray[np.int64],
        loss_N: npt.NDArray[np.uint8] | None,
    ) -> SplitTokens:
        if not chosen_U.all():
            chosen_N = np.repeat(chosen_U, lengths_U)
            tokens_N, lengths_U = tokens_N[chosen_N], lengths_U[chosen_U]
            loss_N = None if loss_N is None else loss_N[chosen_N]
        highest = int(tokens_N.max(initial=0))
        assert highest <= np.iinfo(self._job.dtype).max, (highest, self._job.dtype)
        assert lengths_U.max(initial=0) < 2**31, "an index holds lengths of 32 bits"
        return SplitTokens(
            tokens_N=tokens_N.astype(self._job.dtype), lengths_U=lengths_U.astype(np.int32), loss_N=loss_N, max_token_id=highest
        )

    def _sample(
        self, texts: list[_Text], tokens_N: npt.NDArray[np.int32], lengths_U: npt.NDArray[np.int64]
    ) -> tuple[str, str, npt.NDArray[np.integer]] | None:
        """The longest document that is short enough to be compared for every block."""
        if self._job.encoder == "tokenizers":
            return None
        candidates = [(len(text.text), nth) for nth, text in enumerate(texts) if len(text.text) <= _SAMPLE_CHARACTERS]
        if not candidates:
            return None
        _, nth = max(candidates)
        begin = int(lengths_U[:nth].sum())
        return texts[nth].name, texts[nth].text, tokens_N[begin : begin + int(lengths_U[nth])]


def _inside(places: npt.NDArray[np.int64], spans: list[Span]) -> npt.NDArray[np.uint8]:
    """1 for each token that shares a character with a span, as `apply_chat_template` decides it.

    A token may begin with the space that ends a prompt: the model still has to generate it.
    """
    starts, ends = places[:, 0], places[:, 1]
    inside = np.zeros(starts.size, dtype=np.uint8)
    for begin, end in spans:
        inside |= ((starts < end) & (ends > begin)).astype(np.uint8)
    return inside


def sample_texts(blocks: Iterator[Block], job_renderer: ChatTemplates | None, *, num_characters: int) -> list[str]:
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
                    assert entry.chat is not None, entry
                    text = job_renderer.render(entry.chat)
                except ChatError:
                    continue  # reported when its block is encoded
            texts.append(text[:num_characters])
            size += len(text)
            if size >= num_characters:
                return texts
    return texts
