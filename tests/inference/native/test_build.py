import ctypes

import pytest

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.inference.native import build


def test_every_c_file_is_compiled_into_one_library_that_has_every_kernel():
    assert [path.name for path in build.SOURCES] == ["attention.c", "elementwise.c", "matmul.c", "panels.c"]
    library = build.load_kernels()
    assert all(getattr(library, name).argtypes == types for name, types in build.SIGNATURES.items())
    assert library is build.load_kernels()
    with pytest.raises(ctypes.ArgumentError):
        library.dmtd_norm(1, 2, 3, 4, 5, "eps")


def test_a_missing_or_failing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(CapabilityError, match="no C compiler"):
        build.load_kernels.__wrapped__()
    monkeypatch.setattr(build, "COMPILERS", ("false",))
    with pytest.raises(CapabilityError, match="cannot compile"):
        build.load_kernels.__wrapped__()
