"""Commands printed in documents, recipes and help are possible: options, subcommands and the recipes that they name exist."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import COMMANDS, LOG_MD, PAGES, ROOT, name_of

SOURCES = [path for path in PAGES if path != LOG_MD] + COMMANDS
SOURCES += sorted((ROOT / "examples").rglob("*.s*")) + sorted((ROOT / "examples").rglob("*.yaml"))
SUBCOMMANDS = {
    "tools/convert.py": {"import", "export", "inspect", "verify", "diff"},
    "tools/preprocess.py": {"verify", "inspect", "packing", "merge"},
    "tools/digests.py": {"record", "compare"},
}
_USE = re.compile(r"(?:^|[\s`(])(tools/(?:bench/)?\w+\.py)((?: [^`#\n|;]*)?)", re.MULTILINE)


def printed_uses(text: str) -> list[tuple[str, list[str]]]:
    """(tool, its words) of every printed command, joined over continued lines, without what follows a bare `--`."""
    joined = re.sub(r"\\\n\s*(?:#\s*)?", " ", text)
    return [(tool, re.split(r" -- |\s{4,}", words)[0].split()) for tool, words in _USE.findall(joined)]


@functools.cache
def help_of(*words: str) -> str:
    """What a tool, or its subcommand, says with --help."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, *words, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unknown_options(tool: str, words: list[str]) -> list[str]:
    """Options of a printed command that its tool does not have."""
    subcommand = [word for word in words[:1] if word in SUBCOMMANDS.get(tool, ())]
    known = set(re.findall(r"--[\w.-]+", help_of(tool, *subcommand))) | {"--help"}
    options = {match[0] for word in words if (match := re.match(r"--\w[\w.-]*", word.strip("'\"[]()")))}
    return sorted(option.rstrip(".") for option in options if option.rstrip(".") not in known)


def test_printed_commands_are_recognised():
    text = "    python tools/x.py export A --a 1 \\\n      --b   # why --c\n#   tools/bench/y.py --d=2 -- z.py --e\n"
    text += "see `tools/z.py --f`, --g"
    assert printed_uses(text) == [
        ("tools/x.py", ["export", "A", "--a", "1", "--b"]),
        ("tools/bench/y.py", ["--d=2"]),
        ("tools/z.py", ["--f"]),
    ]
    assert unknown_options("tools/convert.py", ["export", "a", "b", "--dtype", "x", "--variant", "y"]) == ["--variant"]
    assert unknown_options("tools/train.py", ["--config", "a", "--optimizer.lr", "--optimizer.rate"]) == ["--optimizer.rate"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_options_and_recipes_of_printed_commands_exist(path):
    for tool, words in printed_uses(path.read_text()):
        assert unknown_options(tool, words) == [], (tool, words)
        recipes = [word for word in words if re.fullmatch(r"examples/[\w/.-]+\.(?:yaml|sbatch|sh)", word)]
        assert [recipe for recipe in recipes if not Path(ROOT / recipe).is_file()] == []
