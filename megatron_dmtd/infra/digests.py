"""Digests of files and texts, the same on every machine and in every version of Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

_BLOCK_BYTES = 2**20


def no_report(num_bytes: int) -> None:
    """The default: progress is not reported."""


def sha256_of_file(path: Path, on_bytes: Callable[[int], None] = no_report) -> str:
    """Digest of a file's bytes, in hexadecimal. `on_bytes` is called with the size of each block read. Raises `OSError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            on_bytes(size)
    return digest.hexdigest()


def sha256_of_text(text: str) -> str:
    """Digest of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def stable_hash(text: str) -> int:
    """64 evenly distributed bits of a text, which may be a file name that is not UTF-8."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "big")
