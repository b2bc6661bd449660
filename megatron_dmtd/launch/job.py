"""A batch script of examples/slurm, read as text, and the same with a site's settings filled in: what is submitted.

The scripts stay plain bash that `sbatch` takes too. Three things in them are fixed: the `#SBATCH` lines, the line that sources
the site file, and one array `OPTIONS=( … )` whose words may use the site's variables and nothing else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.launch.site import Site

_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(\S+)", re.MULTILINE)
_SITE_LINE = re.compile(r'^# shellcheck source=site\.env\nsource "\$\{SITE_FILE:-[^"]*\}"\n', re.MULTILINE)
_OPTIONS = re.compile(r"^OPTIONS=\(\n(.*?)^\)\n", re.MULTILINE | re.DOTALL)
#: directives that the layout and the cost follow from
_READABLE = {
    "nodes": (r"[1-9]\d*", "a number of nodes"),
    "ntasks-per-node": (r"[1-9]\d*", "a number of ranks"),
    "array": (r"\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*(%\d+)?", "tasks of an array, such as 0-15"),
    "time": (r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", "a time limit, such as 12:00:00"),
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One batch script, with a site's settings."""

    name: str
    directives: dict[str, str]
    """Options of sbatch by long name, without dashes; the last one of a name counts. Flags have an empty value."""
    options: tuple[str, ...]
    """Options of the tool that the job runs, variables filled in."""
    is_training: bool
    text: str
    """The whole script as it is submitted."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the job, or of each task of an array."""
        return int(self.directives.get("nodes", "1"))

    @property
    def num_ranks(self) -> int:
        """Processes of the job."""
        return self.num_nodes * int(self.directives.get("ntasks-per-node", "1"))

    @property
    def uses_gpus(self) -> bool:
        """Whether it asks for GPUs."""
        return any(name.startswith("gpus") or name == "gres" for name in self.directives)

    @property
    def num_tasks(self) -> int:
        """Tasks of the array; 1 without one."""
        total = 0
        for part in self.directives.get("array", "0").split("%")[0].split(","):
            span, _, stride = part.partition(":")
            first, _, last = span.partition("-")
            total += (int(last or first) - int(first)) // int(stride or 1) + 1
        return total

    @property
    def time_limit_s(self) -> int:
        """Seconds that one attempt may take."""
        return _seconds(self.directives["time"])


def _seconds(text: str) -> int:
    """Slurm's times: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units))


def read_job(
    path: str | Path, site: Site, *, sbatch: Sequence[str] = (), options: Sequence[str] = (), replaces: bool = False
) -> Job:
    """Fill a site's settings into a batch script.

    `sbatch` are further options of sbatch (`--nodes=2`), `options` further ones of the job's tool; with `replaces` they stand
    instead of the script's own. Raises `ConfigError` if it is not a script as this module's head describes it.
    """
    source = _read(Path(path))
    own = (
        [] if replaces else [_expand(word, site, path) for word in shlex.split(_match(_OPTIONS, source, path)[1], comments=True)]
    )
    directives = _directives([*_DIRECTIVE.findall(source), *_site_directives(source, site), *sbatch], path)
    _check_directives(directives, path)
    return Job(
        name=directives.get("job-name", Path(path).stem),
        directives=directives,
        options=(*own, *options),
        is_training="examples/slurm/train.sh" in source,
        text=_fill_in(source, site, directives, list(options), replaces=replaces, path=path),
    )


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(found=f"no file {path}", required="a batch script", remedy="name one of examples/slurm/*.sbatch")
    return path.read_text()


def _match(pattern: re.Pattern[str], source: str, path: str | Path) -> re.Match[str]:
    matches = list(pattern.finditer(source))
    if len(matches) != 1:
        what = "array OPTIONS=( … ) with one word or more a line" if pattern is _OPTIONS else "line that sources the site file"
        raise ConfigError(
            found=f"{path}: {len(matches)} times the {what}", required="once", remedy="follow the scripts of examples/slurm"
        )
    return matches[0]


def _expand(word: str, site: Site, path: str | Path) -> str:
    variables = site.variables()

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise ConfigError(
                found=f"{path}: ${name} in OPTIONS",
                required="variables of the site file only, so that the job can be planned",
                remedy="write the value itself, or put the option where the script runs its tool",
            )
        return variables[name]

    return _VARIABLE.sub(value, word)


def _check_directives(directives: dict[str, str], path: str | Path) -> None:
    """Refuse what the layout and the cost cannot be computed from, although Slurm might take it."""
    for name, (pattern, required) in _READABLE.items():
        value = directives.get(name)
        if (value is None and name == "time") or (value is not None and not re.fullmatch(pattern, value)):
            raise ConfigError(
                found=f"{path} with --{name}={value}" if value is not None else f"{path} without --{name}",
                required=required,
                remedy=f"correct #SBATCH --{name}, or SBATCH_EXTRA in the site file",
            )


def _site_directives(source: str, site: Site) -> list[str]:
    uses_gpus = re.search(r"^#SBATCH --(gpus|gres)", source, re.MULTILINE) is not None
    settings = {
        "account": site.account,
        "qos": site.qos,
        "partition": site.gpu_partition if uses_gpus else site.cpu_partition,
        "chdir": site.work_dir,
        "output": f"{site.work_dir}/slurm-logs/%x-%{'A_%a' if '#SBATCH --array' in source else 'j'}.out",
        # a requeued job goes on in the same file
        "open-mode": "append",
    }
    if uses_gpus:
        settings["cpus-per-task"] = str(site.cpus_per_rank)
    return [f"--{name}={value}" for name, value in settings.items() if value] + shlex.split(site.sbatch_extra)


def _directives(words: Sequence[str], path: str | Path) -> dict[str, str]:
    directives: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.*))?", word)
        if match is None:
            raise ConfigError(
                found=f"{path}: sbatch option {word}", required="--name=value", remedy="write the long form, with an equals sign"
            )
        directives.pop(match[1], None)
        directives[match[1]] = match[2] or ""
    return directives


def _fill_in(source: str, site: Site, directives: dict[str, str], options: list[str], *, replaces: bool, path: str | Path) -> str:
    head = "".join(f"#SBATCH --{name}{'=' + value if value else ''}\n" for name, value in directives.items())
    lines = source.splitlines(keepends=True)
    body = "".join(line for line in lines[1:] if not line.startswith("#SBATCH"))
    comment, _, rest = body.partition("\n\n")
    site_line = _match(_SITE_LINE, rest, path)[0]
    rest = rest.replace(site_line, f"# settings of the site, as they were when the job was submitted\n{site.assignments()}")
    block = _match(_OPTIONS, rest, path)
    if options or replaces:
        words = " ".join(map(shlex.quote, options))
        added = f"OPTIONS=({words})\n" if replaces else f"{block[0]}OPTIONS+=({words})\n"
        rest = rest[: block.start()] + added + rest[block.end() :]
    return f"{lines[0]}{comment}\n{head}\n{rest}"
