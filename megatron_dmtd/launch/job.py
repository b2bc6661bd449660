"""Read a batch script of examples/slurm, and fill in a site's settings: the result is what is submitted.

The scripts stay plain bash that `sbatch` takes too. Three things in them are fixed: the `#SBATCH` lines at the head, the line
that sources the site file, and one array `OPTIONS=( … )` whose words may use the site's variables, in double quotes, and no
others.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.launch.site import Site
from megatron_dmtd.launch.words import WordError, directive, read_shell_text, split_directive, split_words

_DIRECTIVE = "#SBATCH"
_SITE_LINE = re.compile(r'^# shellcheck source=site\.env\nsource "\$\{SITE_FILE:-[^"]*\}"\n', re.MULTILINE)
_OPTIONS = re.compile(r"^OPTIONS=\(\n(.*?)^\)\n", re.MULTILINE | re.DOTALL)
#: directives that determine the layout and the cost
_READABLE = {
    "nodes": (r"[1-9]\d*", "a number of nodes"),
    "ntasks-per-node": (r"[1-9]\d*", "a number of ranks"),
    "array": (r"\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*(%\d+)?", "tasks of an array, such as 0-15"),
    "cpus-per-task": (r"[1-9]\d*", "a number of CPU cores"),
    "job-name": (r"[^/\\%]+", "a name of files: without / \\ %"),
    "time": (r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", "a time limit, such as 12:00:00"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One batch script with a site's settings filled in."""

    name: str
    directives: dict[str, str]
    """Options of sbatch by long name, without dashes. The last value given for a name counts; flags have an empty value."""
    options: tuple[str, ...]
    """Options of the tool that the job runs, with variables filled in."""
    tool: str
    """Name of the command of tools/ that the job runs, such as `train` or `convert`; empty if it runs none of them."""
    text: str
    """The complete script, as submitted."""

    @property
    def is_training(self) -> bool:
        """Whether it runs tools/train.py."""
        return self.tool == "train"

    @property
    def num_nodes(self) -> int:
        """Nodes of the job, or of each array task."""
        return int(self.directives.get("nodes", "1"))

    @property
    def num_ranks(self) -> int:
        """Processes of the job."""
        return self.num_nodes * int(self.directives.get("ntasks-per-node", "1"))

    @property
    def uses_gpus(self) -> bool:
        """Whether it asks for GPUs."""
        return _uses_gpus(self.directives)

    @property
    def num_tasks(self) -> int:
        """Number of array tasks; 1 if the job is not an array."""
        total = 0
        for part in self.directives.get("array", "0").split("%")[0].split(","):
            span, _, stride = part.partition(":")
            first, _, last = span.partition("-")
            total += (int(last or first) - int(first)) // int(stride or 1) + 1
        return total

    @property
    def time_limit_s(self) -> int:
        """Time limit of one attempt, in seconds."""
        return _seconds(self.directives["time"])


def _seconds(text: str) -> int:
    """Seconds of a Slurm time: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units))


def read_job(
    path: str | Path, site: Site, *, sbatch: Sequence[str] = (), options: Sequence[str] = (), replaces: bool = False
) -> Job:
    """Fill a site's settings into a batch script.

    `sbatch` holds additional options of sbatch (`--nodes=2`) and `options` additional options of the job's tool; with
    `replaces`, the latter replace the script's own. Raises `ConfigError` if the script does not have the form described above.
    """
    source = read_shell_text(Path(path), "a batch script", remedy="name one of examples/slurm/*.sbatch")
    own = [] if replaces else _own_options(source, site, path)
    directives = _directives([*_own_directives(source, path), *sbatch], path)
    directives = _with_site(directives, site, sbatch, path)
    _check_directives(directives, path)
    return Job(
        name=directives.get("job-name", Path(path).stem),
        directives=directives,
        options=(*own, *options),
        tool=_tool(source),
        text=_encodable(_fill_in(source, site, directives, list(options), replaces=replaces, path=path)),
    )


def _tool(source: str) -> str:
    if "examples/slurm/train.sh" in source:
        return "train"
    named = re.findall(r"/tools/(\w+)\.py", source.partition("OPTIONS=(")[2])
    return named[-1] if named else ""


def _encodable(text: str) -> str:
    """Return `text`. Raises `ConfigError` if it cannot be encoded: command-line options may hold arbitrary bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            found=f"an option that is not UTF-8: {text[error.start : error.end]!r}",
            required="options in UTF-8",
            remedy="rename the file that it names, or correct the option",
        ) from error
    return text


def _match(pattern: re.Pattern[str], source: str, path: str | Path) -> re.Match[str]:
    matches = list(pattern.finditer(source))
    if len(matches) != 1:
        what = "array OPTIONS=( … ) with one word or more a line" if pattern is _OPTIONS else "line that sources the site file"
        raise ConfigError(
            found=f"{path}: the {what} occurs {len(matches)} times",
            required="once",
            remedy="follow the scripts of examples/slurm",
        )
    return matches[0]


def _own_options(source: str, site: Site, path: str | Path) -> list[str]:
    """The words of the script's OPTIONS."""
    try:
        return split_words(_match(_OPTIONS, source, path)[1], variables=site.variables())
    except WordError as error:
        raise ConfigError(
            found=f"{path}: in OPTIONS, {error}",
            required="plain or quoted words that use no variables but the site file's, so that the job can be planned",
            remedy="write the value itself, in quotes, or move the option to the line that runs the tool",
        ) from error


def _own_directives(source: str, path: str | Path) -> list[str]:
    """The words of the script's `#SBATCH` lines. sbatch reads only those before the first command."""
    words: list[str] = []
    is_head = True
    for line in source.split("\n"):
        is_head = is_head and (not line.strip() or line.startswith("#"))
        if not line.startswith(_DIRECTIVE):
            continue
        try:
            found = split_directive(line.removeprefix(_DIRECTIVE))
        except WordError as error:
            raise ConfigError(found=f"{path}: {line}: {error}", required="--name=value", remedy="correct the line") from error
        if not is_head:
            raise ConfigError(
                found=f"{path}: {line}, below the first command",
                required="#SBATCH lines before any command: sbatch ignores others",
                remedy="move the line up",
            )
        words += found
    return words


def _check_directives(directives: dict[str, str], path: str | Path) -> None:
    """Refuse values from which layout and cost cannot be computed, even if Slurm would accept them."""
    for name, (pattern, required) in _READABLE.items():
        value = directives.get(name)
        if (value is None and name == "time") or (value is not None and not re.fullmatch(pattern, value)):
            raise ConfigError(
                found=f"{path} with --{name}={value}" if value is not None else f"{path} without --{name}",
                required=required,
                remedy=f"correct #SBATCH --{name}, or SBATCH_EXTRA in the site file",
            )


def _with_site(directives: dict[str, str], site: Site, sbatch: Sequence[str], path: str | Path) -> dict[str, str]:
    """A script's directives completed from the site's settings. Options in `sbatch` override both."""
    uses_gpus = _uses_gpus(directives)
    settings = {
        "account": site.account,
        "qos": site.qos,
        "partition": site.gpu_partition if uses_gpus else site.cpu_partition,
        "chdir": site.work_dir,
        "output": f"{site.work_dir}/slurm-logs/%x-%{'A_%a' if 'array' in directives else 'j'}.out",
        # a requeued job appends to the same file
        "open-mode": "append",
    }
    if uses_gpus and "cpus-per-task" not in directives:
        settings["cpus-per-task"] = str(site.cpus_per_rank)
    given = {name: value for name, value in settings.items() if value}
    extra = _directives([*split_directive(site.sbatch_extra), *sbatch], path)
    return {name: value for name, value in directives.items() if name not in given | extra} | given | extra


def _uses_gpus(directives: dict[str, str]) -> bool:
    return any(name.startswith("gpus") or name == "gres" for name in directives)


def _directives(words: Sequence[str], path: str | Path) -> dict[str, str]:
    directives: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.*))?", word)
        if match is None:
            raise ConfigError(
                found=f"{path}: sbatch option {word}", required="--name=value", remedy="use the long form with an equals sign"
            )
        directives.pop(match[1], None)
        directives[match[1]] = match[2] or ""
    return directives


def _fill_in(source: str, site: Site, directives: dict[str, str], options: list[str], *, replaces: bool, path: str | Path) -> str:
    head = "".join(_directive(name, value, path) for name, value in directives.items())
    first, _, text = source.partition("\n")
    body = "".join(f"{line}\n" for line in text.removesuffix("\n").split("\n") if not line.startswith(_DIRECTIVE))
    comment, _, rest = body.partition("\n\n")
    site_line = _match(_SITE_LINE, rest, path)[0]
    rest = rest.replace(site_line, f"# settings of the site, as they were when the job was submitted\n{site.assignments()}")
    block = _match(_OPTIONS, rest, path)
    if options or replaces:
        words = " ".join(map(shlex.quote, options))
        added = f"OPTIONS=({words})\n" if replaces else f"{block[0]}OPTIONS+=({words})\n"
        rest = rest[: block.start()] + added + rest[block.end() :]
    return f"{first}\n{comment}\n{head}\n{rest}"


def _directive(name: str, value: str, path: str | Path) -> str:
    try:
        return directive(name, value)
    except WordError as error:
        raise ConfigError(
            found=f"{path}: --{name} with {error}", required="a line of text", remedy=f"correct --{name}, or the site file"
        ) from error
