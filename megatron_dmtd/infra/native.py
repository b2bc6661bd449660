"""Compile C sources for this machine once, and load the library: `load_library`.

A library is kept in the user's cache (`$XDG_CACHE_HOME`, else `~/.cache`), under a digest of everything that its machine code
depends on: sources, options, compiler and CPU. So an edited source, another compiler or another kind of node (a home directory
may be shared) makes its own library, and none is ever replaced by a different one. Processes that start together compile it
once: they wait for a lock. Where the cache cannot be written, the library is compiled in a temporary directory and lives as
long as its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.infra.files import replacing
from megatron_dmtd.infra.locks import FileLock

COMPILERS = ("cc", "gcc", "clang")
#: IEEE arithmetic as written: no reordering, no fused multiply-add in place of a product and a sum, for results equal bit for bit
EXACT_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
NATIVE = "-march=native"
TIMEOUT_S = 300
CPU_FACTS = ("model name", "flags", "Features", "CPU part")


def user_cache() -> Path:
    """Where libraries are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dmtd" / "native"


def find_compiler(compilers: Sequence[str] = COMPILERS, *, remedy: str) -> str:
    """Path of the first of `compilers` that this machine has.

    Raises:
        CapabilityError: There is none; `remedy` says what to do without one.
    """
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise CapabilityError(
            found=f"no C compiler ({', '.join(compilers)})", required="one, for the native kernels", remedy=remedy
        )
    return compiler


def load_library(
    sources: Sequence[Path],
    *,
    remedy: str,
    flags: Sequence[str] = (*EXACT_FLAGS, NATIVE),
    headers: Sequence[Path] = (),
    compilers: Sequence[str] = COMPILERS,
) -> ctypes.CDLL:
    """The library made from `sources`, compiled if this user has not compiled it yet.

    Args:
        sources: C files; all are compiled into one library.
        remedy: What to do where it cannot be compiled, for the error.
        flags: Options of the compiler.
        headers: Files that the sources include: another content makes another library.
        compilers: Names of the compilers that will do, the best one first.

    Raises:
        CapabilityError: There is no C compiler, or it cannot compile them.
    """
    compiler = find_compiler(compilers, remedy=remedy)
    name = f"{sources[0].stem}-{_digest(compiler, [*sources, *headers], flags)}.so"
    with _folder() as folder:
        library = folder / name
        if not library.exists():
            with FileLock(folder / f"{name}.lock") as lock:
                # Without locks two processes may both compile: each puts its own library in place, and they are the same.
                with contextlib.suppress(OSError):
                    lock.acquire()
                if not library.exists():
                    _compile(compiler, sources, library, flags=flags, remedy=remedy)
        return ctypes.CDLL(str(library))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The user's cache, or a temporary directory for as long as the library takes to load."""
    folder = user_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if writable:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="megatron_dmtd-") as temporary:
            yield Path(temporary)


def _digest(compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256()
    for fact in (compiler, version, *flags, platform.machine(), *cpu_facts()):
        digest.update(fact.encode() + b"\0")
    for source in sources:
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def cpu_facts() -> Iterator[str]:
    """What tells CPUs apart that `-march=native` compiles differently for."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        yield platform.processor()
        return
    first_cpu = path.read_text().split("\n\n")[0]
    yield from (line for line in first_cpu.splitlines() if line.split(":")[0].strip() in CPU_FACTS)


def _compile(compiler: str, sources: Sequence[Path], library: Path, *, flags: Sequence[str], remedy: str) -> None:
    with replacing(library) as unfinished:
        command = [compiler, *map(str, sources), "-o", str(unfinished), *flags, "-lm"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if finished.returncode:
            raise CapabilityError(
                found=f"{compiler} cannot compile {sources[0].name}: {finished.stderr.strip()[-500:]}",
                required="a C compiler that can",
                remedy=remedy,
            )
