import subprocess
from pathlib import Path

import pytest

from megatron_dmtd.errors import CheckpointError, Refusal
from megatron_dmtd.infra import checksums
from megatron_dmtd.infra.digests import sha256_of_file

REFUSAL = Refusal(CheckpointError, required="files as they were written", remedy="copy them again")


def _directory(folder: Path) -> Path:
    for name, data in (("__0_0.distcp", b"weights" * 1000), (".metadata", b"where"), ("config.yaml", b"model: {}\n")):
        (folder / name).write_bytes(data)
    checksums.write_checksums(folder)
    return folder


def test_sha256sum_itself_can_check_a_directory(tmp_path: Path) -> None:
    _directory(tmp_path)
    checked = subprocess.run(["sha256sum", "-c", "checksums.sha256"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stdout == ".metadata: OK\n__0_0.distcp: OK\nconfig.yaml: OK\n"
    checksums.verify(tmp_path, REFUSAL)
    assert checksums.has_checksums(tmp_path)


def test_a_digest_that_is_known_is_not_computed_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    checksums.write_checksums(tmp_path, {"a": "0" * 64})
    assert checksums.read_checksums(tmp_path, REFUSAL) == {"a": "0" * 64, "b": sha256_of_file(tmp_path / "b")}


@pytest.mark.parametrize("position", [0, 3500, 6999])
def test_one_flipped_bit_is_found(tmp_path: Path, position: int) -> None:
    path = _directory(tmp_path) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp \(7000 bytes\) is not what was written"):
        checksums.verify(tmp_path, REFUSAL)


def test_truncated_and_missing_files_are_listed_together(tmp_path: Path) -> None:
    _directory(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with open(tmp_path / "__0_0.distcp", "r+b") as file:
        file.truncate(6999)
    with pytest.raises(CheckpointError) as caught:
        checksums.verify(tmp_path, REFUSAL)
    assert caught.value.found.endswith("__0_0.distcp (6999 bytes) is not what was written; config.yaml is missing")
    assert caught.value.remedy == "copy them again"


def test_only_the_selected_files_are_read(tmp_path: Path) -> None:
    _directory(tmp_path)
    (tmp_path / "config.yaml").write_text("damaged")
    checksums.verify(tmp_path, REFUSAL, select=lambda name: name.endswith(".distcp"))
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        checksums.verify(tmp_path, REFUSAL, select=lambda name: not name.endswith(".distcp"))


def test_an_error_of_the_reporter_ends_the_reading(tmp_path: Path) -> None:
    def give_up(_: int) -> None:
        raise ZeroDivisionError("the work has failed")

    with pytest.raises(ZeroDivisionError, match="has failed"):
        checksums.verify(_directory(tmp_path), REFUSAL, on_bytes=give_up)


def test_files_in_folders_are_recorded_and_compared(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("{}")
    _directory(tmp_path)
    assert "tokenizer/vocab.json" in checksums.read_checksums(tmp_path, REFUSAL)
    (tmp_path / "tokenizer" / "vocab.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer/vocab.json \(2 bytes\) is not what was written"):
        checksums.verify(tmp_path, REFUSAL)


def test_reading_is_reported_to_the_last_byte(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3 * 2**20 + 5))
    _directory(tmp_path)
    seen: list[int] = []
    checksums.verify(tmp_path, REFUSAL, on_bytes=seen.append)
    assert sum(seen) == checksums.num_bytes(tmp_path, REFUSAL) == 3 * 2**20 + 5 + 7000 + 5 + 10
    assert len(seen) > 5, "block by block"


_ZEROS = b"0" * 64


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"no digest  config.yaml\n",
        b"\xff\xfe\n",
        _ZEROS + b"  ../outside\n",
        _ZEROS + b"  /etc/x\n",
        _ZEROS + b"  a/..\n",
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, damage: bytes) -> None:
    (_directory(tmp_path) / "checksums.sha256").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"checksums.sha256 itself is damaged"):
        checksums.verify(tmp_path, REFUSAL)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    assert not checksums.has_checksums(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checksums.sha256"):
        checksums.verify(tmp_path, REFUSAL)
