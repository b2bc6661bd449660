"""The site file: one cluster's settings, in plain bash that batch scripts source and that this module reads without a shell.

Knows nothing of jobs, models or Slurm's state.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.errors import ConfigError

_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Settings of a cluster; examples/slurm/site.env says what each means. The names in the file are these in capitals."""

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

    def variables(self) -> dict[str, str]:
        """The settings by their names in the file."""
        values = {field.name.upper(): getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}

    def assignments(self) -> str:
        """The settings as lines of bash."""
        return "".join(f"{name}={shlex.quote(value)}\n" for name, value in self.variables().items())


def read_site(path: str | Path) -> Site:
    """The settings of a site file. Raises `ConfigError` if it is none, contradicts itself, or names what is not there."""
    values = _read_assignments(Path(path))
    known = {field.name.upper(): str(field.type) for field in dataclasses.fields(Site)}
    for name in values:
        if name not in known:
            closest = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                found=f"{path}: unknown setting {name}",
                required="the settings of examples/slurm/site.env",
                remedy=f"did you mean {closest[0]}?" if closest else "remove the line",
            )
    if missing := [name for name in known if name not in values]:
        raise ConfigError(
            found=f"{path}: no {', '.join(missing)}",
            required="a line for every setting, empty where it is not used",
            remedy="copy the lines from examples/slurm/site.env",
        )
    site = Site(**{name.lower(): _value(path, name, values[name], kind) for name, kind in known.items()})  # type: ignore[arg-type]
    _check(path, site)
    return site


def _read_assignments(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ConfigError(found=f"no file {path}", required="a site file", remedy="copy and edit examples/slurm/site.env")
    values = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = [*line.split(maxsplit=1), ""]  # a quote that does not end: refused below
        if not words:
            continue
        match = _ASSIGNMENT.fullmatch(words[0])
        # What a shell would expand means one thing to bash and another here.
        if len(words) > 1 or match is None or re.search(r"[$`\\;&|<>()]", words[0]):
            raise ConfigError(
                found=f"{path}, line {number}: {line.strip()}",
                required='NAME=VALUE or NAME="VALUE WITH SPACES", without commands or variables',
                remedy="write the value itself",
            )
        values[match[1]] = match[2]
    return values


def _value(path: str | Path, name: str, text: str, kind: str) -> str | int | float:
    if kind == "str":
        return text
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise ConfigError(
            found=f"{path}: {name}={text}",
            required="a whole number, 0 or more" if kind == "int" else "a number, 0 or more",
            remedy=f"correct {name}",
        )
    return value


def _check(path: str | Path, site: Site) -> None:
    if bool(site.venv) == bool(site.container_image):
        raise ConfigError(
            found=f"{path}: VENV={site.venv} and CONTAINER_IMAGE={site.container_image}",
            required="one of the two",
            remedy="leave the other one empty",
        )
    for name in ("cpus_per_rank", "gpu_peak_tflops", "cpu_peak_tflops", "expected_mfu"):
        if not getattr(site, name):
            raise ConfigError(found=f"{path}: {name.upper()}=0", required="more than 0", remedy=f"correct {name.upper()}")
    must_exist = {
        "PROJECT_DIR": (site.project_dir, Path(site.project_dir, "tools", "train.py").is_file, "this project's checkout"),
        "WORK_DIR": (site.work_dir, Path(site.work_dir).is_dir, "a folder that all nodes see"),
    }
    if site.venv:
        is_executable = os.access(Path(site.venv, "bin", "python"), os.X_OK)
        must_exist["VENV"] = (site.venv, lambda: is_executable, "a virtual environment with bin/python")
    for name, (value, is_there, what) in must_exist.items():
        if not value.startswith("/") or not is_there():
            raise ConfigError(
                found=f"{path}: {name}={value}", required=f"the absolute path of {what}", remedy=f"correct {name}, or make it"
            )
