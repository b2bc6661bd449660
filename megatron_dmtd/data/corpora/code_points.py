r"""On which code points `gigatoken` sees another class of character than `tokenizers`, decided for all 1,112,064 of them.

A byte-level tokenizer cuts a text into words by a regular expression such as ` ?\p{L}+`, and the two libraries have tables of
different versions of Unicode. Comparing ids does not show this reliably: they differ only where a merge crosses the place of the
cut. So the words are compared themselves, through a tokenizer with the same expression and merges that show every cut.

- For `tokenizers`, the class of a code point is the set of the expression's parts that match it. Its library of regular
  expressions is asked about each part with all code points at once, which takes a tenth of a second.
- `gigatoken` cuts a probe for each code point, in which it stands among letters, digits, spaces, marks and quotes.
- Code points of one class that `gigatoken` cuts like the others of their class, of which `tokenizers` cuts some alike, are safe.
  All others are doubtful: a text that holds one is left to `tokenizers`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.native import user_cache

#: raised whenever a change here may decide otherwise
_VERSION = 1
#: the code point `{c}` among all kinds of neighbours that the expressions of tokenizers tell apart
_PROBE = "a{c}a A{c}Aa!!{c}'s 1{c}1'{c} {c}{c}\n"
_NEIGHBOURS = b"aA1! 's\n"
#: code points whose probes are cut at once
_CHUNK = 1 << 16
#: of each class, code points that `tokenizers` itself cuts
_COMPARED = 6
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: parts of an expression that match one character: a bracket, a class, a letter in either case
_PARTS = re.compile(r"\[(?:\\.|[^\]\\\[])*\]|\\[pP](?:\{\^?\w+\}|\w)|\\[a-zA-Z]|[^\x00-\x7f]")


class UnknownWordsError(ValueError):
    """A tokenizer that finds words in a way whose classes of characters are not known here."""


def all_code_points() -> npt.NDArray[np.uint32]:
    """Everything that a text can hold: not the halves of surrogate pairs."""
    return np.concatenate([np.arange(0xD800, dtype=np.uint32), np.arange(0xE000, 0x110000, dtype=np.uint32)])


def _text_of(codes: npt.NDArray[np.uint32]) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def doubtful_code_points(tokenizer_json: str, *, cache: Path | None = None) -> str:
    """All doubtful code points of a tokenizer, as the inside of a bracket of a regular expression; empty if there is none.

    Decided once for each way of finding words and each version of the two libraries, then kept in the user's cache.

    Raises `UnknownWordsError`, or whatever `gigatoken` does for a tokenizer that it does not support.
    """
    words = json.loads(tokenizer_json)["pre_tokenizer"]
    versions = [importlib.metadata.version(name) for name in ("gigatoken", "tokenizers")]
    key = hashlib.sha256(json.dumps([_VERSION, versions, words], sort_keys=True).encode()).hexdigest()
    path = (user_cache().parent / "code_points" if cache is None else cache) / f"{key}.json"
    try:
        kept = json.loads(path.read_text(encoding="ascii"))
        if kept["sha256"] == hashlib.sha256(kept["doubtful"].encode()).hexdigest():
            return str(kept["doubtful"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # none yet, or a damaged one, which is replaced
    doubtful = as_ranges(find_doubtful(words))
    _keep(path, {"sha256": hashlib.sha256(doubtful.encode()).hexdigest(), "doubtful": doubtful})
    return doubtful


def _keep(path: Path, value: dict[str, str]) -> None:
    """A cache that cannot be written costs seconds at every start, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value))
    except OSError:
        return


def as_ranges(codes: npt.NDArray[np.uint32]) -> str:
    """Ascending code points as ranges, escaped."""
    if codes.size == 0:
        return ""
    ends = np.flatnonzero(np.diff(codes) != 1)
    firsts, lasts = codes[np.r_[0, ends + 1]], codes[np.r_[ends, codes.size - 1]]
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in zip(firsts.tolist(), lasts.tolist()))


def find_doubtful(words: Any) -> npt.NDArray[np.uint32]:
    """All doubtful code points for a `pre_tokenizer`, ascending."""
    codes = all_code_points()
    classes = reference_classes(words, codes)
    if classes is None:
        return codes[:0]
    probe = _probe_tokenizer(words)
    fast, reference = _FastCuts(probe), _ReferenceCuts(probe)
    cuts = fast.of(codes)
    doubtful = np.zeros(codes.size, dtype=bool)
    widths = np.searchsorted(np.array([0x80, 0x800, 0x10000]), codes, side="right")  # bytes in UTF-8, less one
    groups = 4 * classes + widths
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        kinds, counts = np.unique(cuts[members], return_counts=True)
        usual = members[cuts[members] == kinds[counts.argmax()]]
        compared = usual[np.linspace(0, usual.size - 1, num=min(_COMPARED, usual.size)).astype(np.int64)]
        same = np.array_equal(cuts[compared], reference.of(codes[compared]))
        doubtful[members] = (cuts[members] != kinds[counts.argmax()]) if same else True
    return _confirmed(codes, doubtful, cuts, reference)


def _confirmed(
    codes: npt.NDArray[np.uint32], doubtful: npt.NDArray[np.bool_], cuts: npt.NDArray[np.uint64], reference: _ReferenceCuts
) -> npt.NDArray[np.uint32]:
    """Without those that `tokenizers` cuts in the same way after all: its own answer, where there are few enough to ask for."""
    (places,) = np.nonzero(doubtful)
    if places.size > _CHUNK:
        return codes[places]
    return codes[places[cuts[places] != reference.of(codes[places])]]


# Classes of `tokenizers`.


def reference_classes(words: Any, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64] | None:
    """A number for the class of each code point; None if words do not depend on characters. Raises `UnknownWordsError`."""
    parts = sorted(set(_parts_of(words)))
    if not parts:
        return None
    text = _text_of(codes)
    # ASCII characters may be named one by one, so each is a class of its own
    numbers = np.where(codes < 0x80, codes, 0x80).astype(np.int64)
    for part in parts:
        _, numbers = np.unique(2 * numbers + _matched(part, text, codes), return_inverse=True)
    return numbers.reshape(-1)


def _parts_of(words: Any) -> Iterator[str]:
    kind = None if words is None else words["type"]
    if kind == "Sequence":
        for one in words["pretokenizers"]:
            yield from _parts_of(one)
    elif kind == "ByteLevel":
        yield from _parts_of_expression(_GPT2) if words.get("use_regex", True) else ()
    elif kind == "Split":
        yield from _parts_of_pattern(words["pattern"])
    elif kind == "Digits":
        yield "Digits"
    elif kind not in (None, "Metaspace"):
        raise UnknownWordsError(f"its pre-tokenizer is {kind}, whose classes of characters are not known")


def _parts_of_pattern(pattern: dict[str, str]) -> Iterator[str]:
    yield from (
        _parts_of_expression(pattern["Regex"]) if "Regex" in pattern else (char for char in pattern["String"] if char > "\x7f")
    )


def _parts_of_expression(expression: str) -> Iterator[str]:
    if re.search(r"&&|\[[^\]\\]*\[", expression):
        raise UnknownWordsError("its pre-tokenizer has brackets in brackets, whose classes of characters are not known")
    parts = _PARTS.findall(expression)
    yield from (part for part in parts if part not in (r"\r", r"\n", r"\t", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G"))
    yield from (
        part for bracket in parts if bracket[0] == "[" for part in _PARTS.findall(bracket[1:-1]) if part not in (r"\r", r"\n")
    )
    if re.search(r"\(\?[a-z]*i", expression):
        yield from (f"(?i:{letter})" for letter in "abcdefghijklmnopqrstuvwxyz")


def _matched(part: str, text: str, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which code points a part of an expression matches, by the reference's own library."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if part == "Digits":  # these are Rust's own
        matched = np.zeros(codes.size, dtype=bool)
        for piece, (begin, end) in pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(text):
            matched[begin:end] = _is_between_others(piece[0])
        return matched
    left = normalizers.Replace(Regex(part), "").normalize_str(text)
    return ~np.isin(codes, np.frombuffer(left.encode("utf-32-le"), dtype="<u4"), assume_unique=True)


def _is_between_others(char: str) -> bool:
    """Whether `Digits` takes a character for a digit: then it is cut off from letters."""
    from tokenizers import pre_tokenizers

    return len(pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(f"a{char}")) == 2


# Cuts, made visible.


def _byte_symbols() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level vocabularies."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    symbols = {byte: chr(byte) for byte in shown} | {byte: chr(256 + nth) for nth, byte in enumerate(hidden)}
    return [symbols[byte] for byte in range(256)]


def _probe_tokenizer(words: Any) -> str:
    """A tokenizer with these words, whose merges join a neighbour and a byte of a code point wherever no cut is between them."""
    symbols = _byte_symbols()
    vocabulary = {symbol: byte for byte, symbol in enumerate(symbols)}
    merges: list[list[str]] = []
    for neighbour in _NEIGHBOURS:
        for other in range(256):
            for pair in ([symbols[neighbour], symbols[other]], [symbols[other], symbols[neighbour]]):
                if "".join(pair) not in vocabulary:
                    vocabulary["".join(pair)] = len(vocabulary)
                    merges.append(pair)
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": merges,
        "byte_fallback": False,
        "ignore_merges": False,
        "fuse_unk": False,
    }
    model |= dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", **empty, "added_tokens": [], "pre_tokenizer": words, "model": model})


class _Cuts:
    """Where a library cuts the probes of code points, as one number for each: equal numbers, equal places."""

    def __init__(self, probe: str) -> None:
        vocabulary = json.loads(probe)["model"]["vocab"]
        byte_of = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        # what a token says about the cuts around it: its bytes, but for those of the code point, which are all one
        kinds = {_kind([byte_of[symbol] for symbol in token]) for token in vocabulary}
        numbers = {kind: number for number, kind in enumerate(sorted(kinds), start=1)}
        self._kind_of = np.zeros(len(vocabulary), dtype=np.uint64)
        for token, token_id in vocabulary.items():
            self._kind_of[token_id] = numbers[_kind([byte_of[symbol] for symbol in token])]

    def of(self, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """One number for each code point."""
        found = [self._hashed(*self._encode(_probes(codes[at : at + _CHUNK]))) for at in range(0, codes.size, _CHUNK)]
        return np.concatenate([np.empty(0, np.uint64), *found])

    def _hashed(self, ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        lengths = np.diff(offsets)
        powers = np.cumprod(np.full(int(lengths.max(initial=0)), 0x9E3779B97F4A7C15, dtype=np.uint64))
        places = np.arange(ids.size) - np.repeat(offsets[:-1], lengths)
        return np.add.reduceat(self._kind_of[ids] * powers[places], offsets[:-1]) if lengths.size else np.empty(0, np.uint64)

    def _encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All ids, and where those of each text begin and the last end."""
        raise NotImplementedError


def _kind(token: Sequence[int]) -> tuple[int, ...]:
    return tuple(byte if byte < 0x80 else 0x80 for byte in token)


def _probes(codes: npt.NDArray[np.uint32]) -> list[str]:
    return [_PROBE.replace("{c}", char) for char in _text_of(codes)]


class _FastCuts(_Cuts):
    """Those of `gigatoken`."""

    def __init__(self, probe: str) -> None:
        import gigatoken

        super().__init__(probe)
        self._tokenizer = gigatoken.Tokenizer.from_json(probe)

    def _encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]].astype(np.int64), offsets - offsets[0]


class _ReferenceCuts(_Cuts):
    """Those of `tokenizers`."""

    def __init__(self, probe: str) -> None:
        from tokenizers import Tokenizer

        super().__init__(probe)
        self._tokenizer = Tokenizer.from_str(probe)

    def _encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        ids = [
            np.array(one.ids, dtype=np.int64) for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        return np.concatenate([np.empty(0, np.int64), *ids]), np.cumsum([0, *(one.size for one in ids)])
