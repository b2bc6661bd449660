import subprocess
from pathlib import Path

import pytest

from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training import checksums


def _directory(folder: Path) -> Path:
    for name, data in (("__0_0.distcp", b"weights" * 1000), (".metadata", b"where"), ("config.yaml", b"model: {}\n")):
        (folder / name).write_bytes(data)
    checksums.write_checksums(folder)
    return folder


def test_sha256sum_itself_can_check_a_checkpoint(tmp_path: Path) -> None:
    _directory(tmp_path)
    checked = subprocess.run(["sha256sum", "-c", "checksums.sha256"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stdout == ".metadata: OK\n__0_0.distcp: OK\nconfig.yaml: OK\n"
    checksums.verify(tmp_path)
    assert checksums.has_checksums(tmp_path)


def test_a_digest_that_is_known_is_not_computed_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    checksums.write_checksums(tmp_path, {"a": "0" * 64})
    assert checksums.read_checksums(tmp_path) == {"a": "0" * 64, "b": checksums.sha256_of(tmp_path / "b")}


@pytest.mark.parametrize("position", [0, 3500, 6999])
def test_one_flipped_bit_is_found(tmp_path: Path, position: int) -> None:
    path = _directory(tmp_path) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp \(7000 bytes\) is not what was written"):
        checksums.verify(tmp_path)


def test_truncated_and_missing_files_are_listed_together(tmp_path: Path) -> None:
    _directory(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with open(tmp_path / "__0_0.distcp", "r+b") as file:
        file.truncate(6999)
    with pytest.raises(CheckpointError) as caught:
        checksums.verify(tmp_path)
    assert caught.value.found.endswith("__0_0.distcp (6999 bytes) is not what was written; config.yaml is missing")
    assert "latest" in caught.value.remedy


@pytest.mark.parametrize("damage", [b"", b"no digest  config.yaml\n", b"\xff\xfe\n"])
def test_a_damaged_record_is_refused(tmp_path: Path, damage: bytes) -> None:
    (_directory(tmp_path) / "checksums.sha256").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"checksums.sha256 itself is damaged"):
        checksums.verify(tmp_path)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    assert not checksums.has_checksums(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checksums.sha256"):
        checksums.verify(tmp_path)
