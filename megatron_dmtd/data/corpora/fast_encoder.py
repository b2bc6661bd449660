"""The fast path of tokenisation: `gigatoken`, where it gives the ids of the user's tokenizer.

The only module that uses `gigatoken`, which implements byte-level BPE by its own rules, so its results are checked. Its normal
form C is not used at all: the Unicode tables of version 0.10 differ from those of `tokenizers`, which showed in one document in
ten thousand of real text; `tokenizers` normalises instead. Texts that hold a character which the two may class otherwise are left
to `tokenizers` too (`code_points.py` decides that for every character). For the rest, `choose_encoder` compares the two on texts
made to find differences and on a sample of the run's own data, and reports what it chose and why.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from megatron_dmtd.data.corpora.code_points import doubtful_code_points
from megatron_dmtd.data.corpora.normal_form import NormalForm
from megatron_dmtd.data.corpora.tokenizer import TextEncoder
from megatron_dmtd.errors import CapabilityError, DataError

EncoderName = Literal["gigatoken", "tokenizers"]

#: texts on which re-implementations of BPE are known to differ: normal forms, spaces, digits, contractions, scripts, bytes
_PROBES = (
    "e\u0301 \ufb01 \u212b \u1100\u1161 \u0958",
    "  two  spaces\t\ttabs\r\n\r\nlines\n \n   end   ",
    "I'm we'LL they'Re 'tis don''t",
    "1234567890 12,345.67 0x1F ½ ² Ⅷ ١٢٣",
    "中文字符 日本語テキスト 한국어 العربية עברית ไทย हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 \U0001f1e9\U0001f1ea",
    "\x00\x01\x1f\x7f\x85\xa0\u2028\u200b\ufeff\ufffd\U0010ffff",
    'if (x != y) { return "a\\n"; } // ///// ===== -----\n',
    "a" * 300,
    " " * 300,
    "",
)

#: approximate limit on what an encoder may add to a process before it is replaced by a new one
MAX_CACHE_BYTES = 512 << 20
#: tokenizers (by digest, and whether for chats) that have passed the probes in this process and are not probed again
_PROBED: set[tuple[bytes, bool]] = set()


class Encoder(Protocol):
    """Texts to ids."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of all texts one after the other, and the number of ids of each."""
        ...


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FastModel:
    """A tokenizer as `gigatoken` loads it. Making one takes a second, so it is made once and given to all workers."""

    json: str
    is_normalizing: bool
    """Whether the tokenizer normalises texts, by NFC."""
    added_tokens: tuple[str, ...]
    """Texts that are one token wherever they occur, before or after normalisation."""
    doubtful: str
    """Characters that `gigatoken` may class otherwise, as `doubtful_code_points` gives them."""


def fast_model(tokenizer_json: str, *, chats: bool) -> FastModel:
    """The tokenizer without what is done elsewhere. Raises `ValueError` for a normalizer that is not known to be the same."""
    model = json.loads(tokenizer_json)
    normalizer = model["normalizer"]
    kinds = [] if normalizer is None else [part["type"] for part in normalizer.get("normalizers", [normalizer])]
    if any(kind != "NFC" for kind in kinds):
        raise ValueError(f"its normalizer is {' and '.join(kinds)}, only NFC is known to be the same")
    model["normalizer"] = None
    model["post_processor"] = None  # it only adds tokens, which are not wanted
    if not chats:
        # gigatoken matches added tokens wherever they occur. Those marked special must stay text, so it is not told of them.
        model["added_tokens"] = [token for token in model["added_tokens"] if not token["special"]]
    contents = tuple(token["content"] for token in model["added_tokens"])
    doubtful = doubtful_code_points(tokenizer_json)
    return FastModel(json=json.dumps(model), is_normalizing=bool(kinds), added_tokens=contents, doubtful=doubtful)


class FastEncoder:
    """Text to ids by `gigatoken`, on the calling thread, and by `tokenizers` for what only it can do."""

    def __init__(self, tokenizer_json: str, *, chats: bool = False, model: FastModel | None = None) -> None:
        """`tokenizer_json` as for `TextEncoder`, `model` from `fast_model`.

        Raises whatever `gigatoken` does for a tokenizer that it does not support.
        """
        self._source, self._chats = tokenizer_json, chats
        self._model = fast_model(tokenizer_json, chats=chats) if model is None else model
        self._normal_form = NormalForm() if self._model.is_normalizing else None
        self._doubtful = re.compile(f"[{self._model.doubtful}]") if self._model.doubtful else None
        self._reference: TextEncoder | None = None
        self._load()

    def _load(self) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(self._model.json)
        self._memory_limit = resident_bytes() + MAX_CACHE_BYTES

    def _bound_memory(self) -> None:
        """Replace an instance that has seen too many words: gigatoken never forgets one."""
        if resident_bytes() > self._memory_limit:
            del self._tokenizer  # before its successor is loaded: there is memory for only one
            self._load()

    def encode_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of all texts one after the other, and the number of ids of each."""
        form = self._normal_form
        changed = [] if form is None else [nth for nth, text in enumerate(texts) if not form.holds(text)]
        ready = list(texts)
        others: set[int] = set()
        for nth in changed:
            assert form is not None
            ready[nth] = form.of(texts[nth])
            # An added token is found before the text around it is normalised: where one is near, the order of the two matters.
            if any(token in texts[nth] or token in ready[nth] for token in self._model.added_tokens):
                others.add(nth)
        if self._doubtful is not None:
            others |= {nth for nth, text in enumerate(ready) if not text.isascii() and self._doubtful.search(text)}
        return self._with_reference(texts, ready, sorted(others)) if others else self._encode(ready)

    def _with_reference(
        self, texts: Sequence[str], ready: list[str], others: list[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of `ready`, with those of the texts `others` replaced by the ids that `tokenizers` gives."""
        left_out = set(others)
        fast, fast_lengths = self._encode([text for nth, text in enumerate(ready) if nth not in left_out])
        parts: list[npt.NDArray[np.int32]] = np.split(fast, np.cumsum(fast_lengths)[:-1]) if fast_lengths.size else []
        if self._reference is None:
            self._reference = TextEncoder(self._source, chats=self._chats)
        for nth, ids in zip(others, self._reference.encode_batch([texts[nth] for nth in others])):
            parts.insert(nth, ids)  # ascending, so that all before it are in their places
        return np.concatenate(parts), np.array([ids.size for ids in parts], dtype=np.int64)

    def _encode(self, texts: list[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        if not texts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        self._bound_memory()
        # gigatoken's thread pool does not survive a fork, and the run has processes of its own
        layout = self._tokenizer.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        flat = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return flat.astype(np.int32), np.diff(offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which library tokenises, and why."""

    name: EncoderName
    reason: str
    model: FastModel | None = None
    """What `FastEncoder` takes, if `gigatoken` was chosen."""


#: of blocks of characters that are all alike, or private, only every n-th character is tested
_UNIFORM = (
    range(0x3400, 0xA000),
    range(0xAC00, 0xD7A4),
    range(0xE000, 0xF900),
    range(0x17000, 0x18D00),
    range(0x20000, 0x110000),
)
_STRIDE = 997
_CHARACTERS_PER_PROBE = 64


def _characters() -> list[str]:
    """Characters whose class (letter, number, space, ...) a library's tables may not know: all but those of uniform blocks."""
    every = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000 and not any(code in block for block in _UNIFORM)]
    return [chr(code) for code in (*every, *(code for block in _UNIFORM for code in block[::_STRIDE]))]


def probes(tokenizer_json: str) -> list[str]:
    """Texts made to find differences: the above, every added token in the middle of words and at line ends, every character."""
    contents = [token["content"] for token in json.loads(tokenizer_json)["added_tokens"]]
    words = [f"a{one}1{one} " for one in _characters()]
    runs = ["".join(words[at : at + _CHARACTERS_PER_PROBE]) for at in range(0, len(words), _CHARACTERS_PER_PROBE)]
    return [*_PROBES, *(f"a{content}b {content} {content}{content}\n {content}" for content in contents), *runs]


def choose_encoder(
    tokenizer_json: str,
    sample: Sequence[str],
    *,
    chats: bool = False,
    wanted: EncoderName | None = None,
    reference: TextEncoder | None = None,
) -> Choice:
    """`gigatoken` if it gives the ids of `tokenizers` on `sample` and on our probes, otherwise `tokenizers`.

    `reference` is the tokenizer's `TextEncoder`, if there is one already.

    Raises `CapabilityError` if `wanted` is `gigatoken` and it cannot be used.
    """
    if wanted == "tokenizers":
        return Choice(name="tokenizers", reason="asked for")
    model, obstacle = _try_fast(tokenizer_json, sample, chats=chats, reference=reference)
    if model is not None:
        size = sum(len(text.encode()) for text in sample)
        reason = f"its ids equal those of tokenizers on {size} bytes of this run's data and on probes"
        return Choice(name="gigatoken", reason=reason, model=model)
    if wanted == "gigatoken":
        raise CapabilityError(found=obstacle, required="gigatoken", remedy="leave the choice to the command: it takes tokenizers")
    return Choice(name="tokenizers", reason=obstacle)


def _try_fast(
    tokenizer_json: str, sample: Sequence[str], *, chats: bool, reference: TextEncoder | None
) -> tuple[FastModel | None, str]:
    """The model for gigatoken, or None and why it cannot be used."""
    if importlib.util.find_spec("gigatoken") is None:
        return None, "gigatoken is not installed"
    key = hashlib.sha256(tokenizer_json.encode()).digest(), chats
    texts = list(sample) if key in _PROBED else [*probes(tokenizer_json), *sample]
    try:
        model = fast_model(tokenizer_json, chats=chats)
        ids, lengths = FastEncoder(tokenizer_json, chats=chats, model=model).encode_flat(texts)
    except BaseException as error:  # what its compiled code raises has no common base, and a panic is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        return None, f"gigatoken does not support this tokenizer ({type(error).__name__}: {str(error)[:200]})"
    expected = (reference or TextEncoder(tokenizer_json, chats=chats)).encode_batch(texts)
    for text, got, want in zip(texts, np.split(ids, np.cumsum(lengths)[:-1]), expected):
        if not np.array_equal(got, want):
            return None, f"gigatoken gives other ids than tokenizers for {text[:60]!r}"
    _PROBED.add(key)
    return model, ""


def make_encoder(name: EncoderName, tokenizer_json: str, *, chats: bool, model: FastModel | None = None) -> Encoder:
    """The chosen encoder; `model` saves `gigatoken` the time to make it."""
    if name == "gigatoken":
        return FastEncoder(tokenizer_json, chats=chats, model=model)
    return TextEncoder(tokenizer_json, chats=chats)


def check_equal(reference: TextEncoder, text: str, ids: npt.NDArray[np.integer], *, where: str) -> None:
    """Raise `DataError` unless `ids` are those of `text`: the check that is repeated throughout a run."""
    (expected,) = reference.encode_batch([text])
    if not np.array_equal(ids, expected):
        raise DataError(
            found=f"{where}: gigatoken's ids differ from those of tokenizers",
            required="equal ids",
            remedy="run again with --encoder tokenizers, and report the text",
        )
