"""Python environments without this project, to show that what it exports stands alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path, packages: tuple[str, ...] = (), *, with_dependencies: bool = False) -> Path:
    """A virtual environment whose interpreter does not know this project. Returns the interpreter.

    `packages` come from the package index, `with_dependencies` also what they need and the tests' own interpreter lacks;
    everything else, torch above all, is read where that interpreter has it. Its folder comes last on the path, and `.pth` files
    in it (an editable install of this project) have no effect.
    """
    command = [sys.executable, "-m", "venv", str(folder)]
    subprocess.run(command if packages else [*command, "--without-pip"], check=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if packages:
        options = () if with_dependencies else ("--no-deps",)
        install = [python, "-m", "pip", "install", "-q", *options, *packages]
        subprocess.run(install, check=True, capture_output=True, timeout=900)
    return python


def run_alone(python: Path, script: Path, *arguments: str | Path, cwd: Path, timeout_s: float = 500.0) -> str:
    """Run a script where nothing but the environment is on the path and no hub can be reached. Returns its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(cwd / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-I", str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
