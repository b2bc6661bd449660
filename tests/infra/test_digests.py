import hashlib
import os
from pathlib import Path

from megatron_dmtd.infra.digests import sha256_of_file, sha256_of_text, stable_hash


def test_a_files_digest_is_that_of_its_bytes_and_reading_is_reported_block_by_block(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "empty").touch()
    seen: list[int] = []
    assert sha256_of_file(tmp_path / "file", seen.append) == hashlib.sha256(data).hexdigest()
    assert seen == [2**20, 2**20, len(data) - 2**21]
    assert sha256_of_file(tmp_path / "empty") == hashlib.sha256().hexdigest()


def test_a_texts_digest_is_that_of_its_utf_8() -> None:
    assert sha256_of_text("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of_text("ä") == hashlib.sha256(b"\xc3\xa4").hexdigest()


def test_a_stable_hash_never_changes_and_takes_any_file_name() -> None:
    assert stable_hash("a.jsonl:1") == 0xA1225AF6F453B9A4
    assert stable_hash("") == 0xE4A6A0577479B2B4
    name = os.fsdecode(b"\xff.txt")
    assert stable_hash(name) == int.from_bytes(hashlib.blake2b(b"\xff.txt", digest_size=8).digest(), "big")
