import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from megatron_dmtd.errors import ConfigError, DataError, Refusal
from megatron_dmtd.infra.disk import FULL, UNWRITABLE, disk_errors, free_bytes, full_disk_behind

NO_ROOM = Refusal(DataError, required="room", remedy="make some")


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_refusal_has_the_words_of_the_caller_and_the_system() -> None:
    with pytest.raises(DataError) as caught, disk_errors(NO_ROOM, found="writing to a"):
        raise os_error(errno.ENOSPC)
    assert (caught.value.found, caught.value.required, caught.value.remedy) == (
        "writing to a: No space left on device",
        "room",
        "make some",
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_without_a_number_keeps_its_own_words() -> None:
    with pytest.raises(DataError, match="a: the tape is torn"), disk_errors(NO_ROOM, found="a"):
        raise OSError("the tape is torn")


def test_what_is_not_the_users_to_mend_passes_as_it_is() -> None:
    for number in sorted(UNWRITABLE - FULL):
        with pytest.raises(OSError, match=re.escape(os.strerror(number))), disk_errors(NO_ROOM, found="a", only=FULL):
            raise os_error(number)
    with pytest.raises(ZeroDivisionError), disk_errors(NO_ROOM, found="a"):
        raise ZeroDivisionError
    with pytest.raises(ConfigError), disk_errors(NO_ROOM, found="a"):
        raise ConfigError(found="x", required="y", remedy="z")


def test_a_full_disk_is_found_behind_the_errors_of_libraries() -> None:
    full = os_error(errno.EDQUOT)
    wrapped, unrelated = RuntimeError("stream"), ValueError("x")
    wrapped.__cause__ = ValueError("writer")
    wrapped.__cause__.__context__ = full
    assert full_disk_behind(wrapped) is full
    unrelated.__context__ = os_error(errno.EACCES)
    assert full_disk_behind(unrelated) is None and full_disk_behind(None) is None


def test_room_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    found, existing = free_bytes(tmp_path / "not" / "yet")
    assert existing == tmp_path
    assert abs(found - shutil.disk_usage(tmp_path).free) < 2**30
