import errno
import os
import shutil
from pathlib import Path

import pytest

from megatron_dmtd.errors import ConversionError
from megatron_dmtd.infra.directories import (
    REMOVED_NAME,
    SMALL_FILES_BYTES,
    built_aside,
    hide,
    new_directory,
    refuse_used,
    remove,
    require_room,
)


def test_a_directory_appears_when_the_block_has_ended(tmp_path):
    target = tmp_path / "new" / "target"
    with new_directory(target, error=ConversionError) as aside:
        (aside / "file").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(143)])
def test_nothing_stays_when_the_block_fails_or_is_interrupted(tmp_path, error):
    def fail():
        with new_directory(tmp_path / "target", error=ConversionError) as aside:
            (aside / "file").write_text("x")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_replaced_and_others_are_refused_untouched(tmp_path):
    (tmp_path / "empty").mkdir()
    refuse_used(tmp_path / "empty", error=ConversionError)
    with new_directory(tmp_path / "empty", error=ConversionError) as aside:
        (aside / "file").write_text("kept")
    for used in (tmp_path / "empty", tmp_path / "empty" / "file"):
        with pytest.raises(ConversionError, match="not an empty directory"), new_directory(used, error=ConversionError):
            raise AssertionError("the block must not run")
    assert (tmp_path / "empty" / "file").read_text() == "kept"


def test_a_disk_without_room_is_refused_before_anything_is_made(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    require_room(tmp_path / "not" / "yet" / "there", free // 2 - SMALL_FILES_BYTES, error=ConversionError)
    with (
        pytest.raises(ConversionError, match="bytes free"),
        new_directory(tmp_path / "a" / "target", error=ConversionError, num_bytes=2 * free),
    ):
        raise AssertionError("the block must not run")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_a_refusal_too(tmp_path):
    """`/dev/full` fails every write as a full disk does."""
    assert Path("/dev/full").exists()

    def fill():
        with new_directory(tmp_path / "target", error=ConversionError) as aside:
            (aside / "file").write_text("x")
            try:
                with open("/dev/full", "wb", buffering=0) as full:
                    full.write(b"x")
            except OSError as error:
                raise RuntimeError("as torch reports it") from error

    with pytest.raises(ConversionError, match="No space left on device while writing"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_other_system_errors_pass_as_they_are(tmp_path):
    with pytest.raises(PermissionError), new_directory(tmp_path / "target", error=ConversionError):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_symbolic_link_stays_and_what_it_names_is_made(tmp_path, is_there):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "target")
    if is_there:
        (tmp_path / "disk" / "target").mkdir(parents=True)
    with new_directory(tmp_path / "link", error=ConversionError) as aside:
        (aside / "file").write_text("x")
        assert aside.parent == tmp_path / "disk"
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk" / "target").iterdir()] == ["file"]


def test_a_place_where_no_directory_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConversionError, match="can be written to"),
        new_directory(tmp_path / "file" / "target", error=ConversionError),
    ):
        raise AssertionError("the block must not run")


def test_a_directory_that_another_process_made_first_stays(tmp_path):
    def lose():
        with built_aside(tmp_path / "target") as aside:
            (aside / "ours").touch()
            (tmp_path / "target").mkdir()
            (tmp_path / "target" / "theirs").touch()

    with pytest.raises(OSError, match="not empty"):
        lose()
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "theirs"]


def test_a_directory_is_hidden_before_its_files_go(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    hidden = hide(tmp_path / "old")
    assert REMOVED_NAME.fullmatch(hidden.name) and [path.name for path in hidden.iterdir()] == ["file"]
    assert not (tmp_path / "old").exists()
    remove(hidden)
    assert list(tmp_path.iterdir()) == []
