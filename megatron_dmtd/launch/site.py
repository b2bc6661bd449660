"""The site file: settings of one cluster, in plain bash, which batch scripts source and this module reads without a shell.

Knows nothing of jobs, models or Slurm's state.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.launch.words import WordError, read_assignment, read_shell_text, split_directive

#: numbers that Python and bash read alike
_NUMBERS = {"int": re.compile(r"0|[1-9][0-9]{0,8}"), "float": re.compile(r"[0-9]{1,9}(\.[0-9]+)?")}
#: how ranks find each other's host
_RENDEZVOUS = ("hostname", "address")
#: characters with a special meaning where the path is used
_TAKEN = {"PROJECT_DIR": {":"}, "WORK_DIR": {"%", "\\"}}
_TAKEN_BY = {"PROJECT_DIR": "it becomes part of PYTHONPATH", "WORK_DIR": "Slurm reads it as a pattern in names of log files"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Settings of a cluster, explained in examples/slurm/site.env. Names in the file are in capitals."""

    account: str
    qos: str
    gpu_partition: str
    cpu_partition: str
    sbatch_extra: str
    venv: str
    container_image: str
    container_mounts: str
    project_dir: str
    work_dir: str
    cpus_per_rank: int
    network_interface: str
    gpu_memory_gib: float
    gpu_peak_tflops: float
    cpu_peak_tflops: float
    expected_mfu: float
    max_restarts: int
    min_free_gib: float
    min_bandwidth_gb_s: float
    max_clock_skew_s: float
    setup_file: str = ""
    rendezvous: str = "hostname"

    def variables(self) -> dict[str, str]:
        """The settings by their names in the file."""
        values = {field.name.upper(): getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _text(value) for name, value in values.items()}

    def assignments(self) -> str:
        """The settings as lines of bash."""
        return "".join(f"{name}={shlex.quote(value)}\n" for name, value in self.variables().items())


def _text(value: str | int | float) -> str:
    """A setting as written in a site file, without a trailing `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_site(path: str | Path) -> Site:
    """Read a site file. Raises `ConfigError` if it cannot be read, contradicts itself, or names something that does not exist."""
    values = _read_assignments(Path(path))
    fields = dataclasses.fields(Site)
    known = {field.name.upper(): str(field.type) for field in fields}
    for name in values:
        if name not in known:
            closest = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                found=f"{path}: unknown setting {name}",
                required="the settings of examples/slurm/site.env",
                remedy=f"did you mean {closest[0]}?" if closest else "remove the line",
            )
    required = [field.name.upper() for field in fields if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(
            found=f"{path}: no {', '.join(missing)}",
            required="a line for every setting, empty where it is not used",
            remedy="copy the lines from examples/slurm/site.env",
        )
    site = Site(**{name.lower(): _value(path, name, values[name], kind) for name, kind in known.items() if name in values})  # type: ignore[arg-type]
    _check(path, site)
    return site


def _read_assignments(path: Path) -> dict[str, str]:
    values = {}
    text = read_shell_text(path, "a site file", remedy="copy and edit examples/slurm/site.env")
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            assignment = read_assignment(line)
        except WordError as error:
            raise ConfigError(
                found=f"{path}, line {number}: {error}",
                required='NAME=VALUE or NAME="VALUE WITH SPACES", without commands or variables',
                remedy="write the value itself, in single quotes if it has special characters",
            ) from error
        if assignment is not None:
            values[assignment[0]] = assignment[1]
    return values


def _value(path: str | Path, name: str, text: str, kind: str) -> str | int | float:
    if kind == "str":
        return text
    if not _NUMBERS[kind].fullmatch(text):
        raise ConfigError(
            found=f"{path}: {name}={text}",
            required="a whole number, 0 or more" if kind == "int" else "a number, 0 or more",
            remedy=f"correct {name}",
        )
    return int(text) if kind == "int" else float(text)


def _check(path: str | Path, site: Site) -> None:
    _check_software(path, site)
    _check_choices(path, site)
    _check_paths(path, site)


def _check_software(path: str | Path, site: Site) -> None:
    chosen = [name for name in ("VENV", "CONTAINER_IMAGE") if getattr(site, name.lower())]
    if len(chosen) == 1 or (not chosen and site.setup_file):
        return
    raise ConfigError(
        found=f"{path}: VENV={site.venv} and CONTAINER_IMAGE={site.container_image}",
        required="one of the two; or neither, and a SETUP_FILE that puts a python into PATH",
        remedy="leave the other one empty" if chosen else "set VENV, CONTAINER_IMAGE or SETUP_FILE",
    )


def _check_choices(path: str | Path, site: Site) -> None:
    for name in ("cpus_per_rank", "gpu_peak_tflops", "cpu_peak_tflops", "expected_mfu"):
        if not getattr(site, name):
            raise ConfigError(found=f"{path}: {name.upper()}=0", required="more than 0", remedy=f"correct {name.upper()}")
    if site.rendezvous not in _RENDEZVOUS:
        raise ConfigError(
            found=f"{path}: RENDEZVOUS={site.rendezvous}", required=" or ".join(_RENDEZVOUS), remedy="correct RENDEZVOUS"
        )
    try:
        split_directive(site.sbatch_extra)
    except WordError as error:
        raise ConfigError(
            found=f"{path}: SBATCH_EXTRA={site.sbatch_extra}: {error}",
            required="options of sbatch, as in an #SBATCH line",
            remedy="correct SBATCH_EXTRA",
        ) from error


def _check_paths(path: str | Path, site: Site) -> None:
    must_exist: dict[str, tuple[str, Callable[[], bool], str]] = {
        "PROJECT_DIR": (site.project_dir, Path(site.project_dir, "tools", "train.py").is_file, "this project's checkout"),
        "WORK_DIR": (site.work_dir, Path(site.work_dir).is_dir, "a folder that all nodes see"),
    }
    if site.venv:
        python = Path(site.venv, "bin", "python")
        must_exist["VENV"] = (site.venv, lambda: os.access(python, os.X_OK), "a virtual environment with bin/python")
    if site.setup_file:
        must_exist["SETUP_FILE"] = (site.setup_file, Path(site.setup_file).is_file, "a file of bash commands")
    for name, (value, is_there, what) in must_exist.items():
        if not value.startswith("/") or not is_there():
            raise ConfigError(
                found=f"{path}: {name}={value}", required=f"the absolute path of {what}", remedy=f"correct {name}, or create it"
            )
        if taken := sorted(set(value) & _TAKEN.get(name, set())):
            raise ConfigError(
                found=f"{path}: {name}={value} with {' '.join(taken)}",
                required=f"a path without this character: {_TAKEN_BY[name]}",
                remedy="use another folder, or a symbolic link to it",
            )
