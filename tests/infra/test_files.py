import os
import stat
from pathlib import Path

import pytest

from megatron_dmtd.infra.files import TEMPORARY_NAME, flush, replacing, write_atomically, write_durably


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was flushed, in order."""
    names: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return names


def test_a_file_is_flushed_before_it_gets_its_name_and_the_name_afterwards(tmp_path: Path, flushed: list[str]) -> None:
    write_atomically(tmp_path / "latest", "step_1 äöü\n")
    assert (tmp_path / "latest").read_bytes() == "step_1 äöü\n".encode()
    assert flushed == [f".latest.{os.getpid()}.tmp", tmp_path.name]
    assert TEMPORARY_NAME.fullmatch(flushed[0]) and not TEMPORARY_NAME.fullmatch("latest")


def test_a_file_and_a_directory_can_be_flushed(tmp_path: Path, flushed: list[str]) -> None:
    write_durably(tmp_path / "file", b"x")
    flush(tmp_path / "file")
    flush(tmp_path)
    assert flushed == ["file", "file", tmp_path.name]
    with pytest.raises(FileNotFoundError):
        flush(tmp_path / "absent")


def test_a_failed_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")

    def fail() -> None:
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("half")
            assert temporary.parent == tmp_path and (tmp_path / "file").read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """`/dev/full` fails every write as a full disk does."""
    write_atomically(tmp_path / "file", "old")

    def fill() -> None:
        with replacing(tmp_path / "file") as temporary:
            temporary.symlink_to("/dev/full")
            with open(temporary, "wb", buffering=0) as file:
                file.write(b"new")

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", "x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
