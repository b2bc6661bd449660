"""C libraries: compiled once, kept under what they depend on, refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.infra import native

REMEDY = "decode with pencil and paper"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return native.user_cache()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_a_library_is_compiled_once(cache, source, monkeypatch):
    assert native.load_library([source], remedy=REMEDY).answer() == 42
    assert len(libraries(cache)) == 1

    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", refuse)
    assert native.load_library([source], remedy=REMEDY).answer() == 42


def test_another_source_or_option_makes_another_library(cache, source):
    native.load_library([source], remedy=REMEDY)
    native.load_library([source], remedy=REMEDY, flags=("-O1", "-fPIC", "-shared"))
    source.write_text("int answer(void) { return 43; }\n")
    assert native.load_library([source], remedy=REMEDY).answer() == 43
    assert len(libraries(cache)) == 3


def test_another_header_makes_another_library(cache, source, tmp_path):
    header = tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    for number in (42, 43):
        header.write_text(f"#define ANSWER {number}\n")
        assert native.load_library([source], headers=[header], remedy=REMEDY).answer() == number
    assert len(libraries(cache)) == 2


def test_only_the_compilers_that_will_do_are_asked_for(source):
    with pytest.raises(CapabilityError, match=r"no C compiler \(no-such-compiler\)"):
        native.load_library([source], compilers=["no-such-compiler"], remedy=REMEDY)


def test_another_kind_of_cpu_makes_another_library(cache, source, monkeypatch):
    native.load_library([source], remedy=REMEDY)
    monkeypatch.setattr(native, "cpu_facts", lambda: iter(["flags: none"]))
    native.load_library([source], remedy=REMEDY)
    assert len(libraries(cache)) == 2


def test_processes_that_start_together_leave_one_library_and_nothing_else(cache, source):
    program = (
        "import sys; from pathlib import Path; from megatron_dmtd.infra.native import load_library\n"
        "assert load_library([Path(sys.argv[1])], remedy='').answer() == 42"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(source)]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert len(libraries(cache)) == 1 and {path.suffix for path in cache.iterdir()} == {".so", ".lock"}


def test_without_a_compiler_it_is_refused_with_the_callers_remedy(source, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(CapabilityError, match=REMEDY) as caught:
        native.load_library([source], remedy=REMEDY)
    assert "no C compiler" in caught.value.found


def test_what_cannot_be_compiled_is_refused_and_leaves_no_library(cache, source):
    source.write_text("int answer(void) { return forty_two; }\n")
    with pytest.raises(CapabilityError, match="forty_two"):
        native.load_library([source], remedy=REMEDY)
    assert not libraries(cache) and not list(cache.glob(".*.tmp"))


def test_a_cache_that_cannot_be_made_is_done_without(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.load_library([source], remedy=REMEDY).answer() == 42


def test_without_a_setting_the_cache_is_in_the_home_directory(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native.user_cache() == Path(os.path.expanduser("~/.cache/megatron_dmtd/native"))
