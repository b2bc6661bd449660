"""Settings files as YAML text: what is wrong with one before it is parsed, and on which line a setting stands.

`load.py` parses them with jsonargparse, whose messages name neither file nor line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from megatron_dmtd.errors import ConfigError, shown

_OPTION = "--config"


def named_files(arguments: Sequence[str]) -> list[str]:
    """The settings files that command-line arguments name, in order."""
    following = [value for option, value in itertools.pairwise(arguments) if option == _OPTION]
    joined = [argument.removeprefix(f"{_OPTION}=") for argument in arguments if argument.startswith(f"{_OPTION}=")]
    return following + joined


def check_file(path: str | Path, *, sections: Sequence[str]) -> None:
    """Accept a file of `sections`, each with settings of its own, or raise `ConfigError` with the line at fault.

    A setting that is given twice is refused too: of two values the first would be lost silently.
    """
    root = _tree(path)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            found=f"{path}: {'no settings' if root is None else 'a list or a single value'}",
            required="sections with settings, such as `optimizer: {lr: 1.0e-4}`",
            remedy="see the recipes in examples/",
        )
    seen: dict[str, int] = {}
    for key, key_node, value in _settings(root):
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                found=f"{path}, line {line}: {key} a second time, after line {seen[key]}",
                required="one value for each setting",
                remedy="remove one of them",
            )
        seen[key] = line
        if key in sections and not isinstance(value, yaml.MappingNode):
            raise ConfigError(
                found=f"{path}, line {line}: {key} without settings",
                required=f"settings of {key}, indented below it",
                remedy="indent them, or remove the line",
            )


def line_of(path: str | Path, key: str) -> int | None:
    """The line of a file on which the setting `key`, such as `optimizer.lr`, stands; None if the file does not have it."""
    root = _tree(path)
    if not isinstance(root, yaml.MappingNode):
        return None
    return next((node.start_mark.line + 1 for name, node, _ in _settings(root) if name == key), None)


def _tree(path: str | Path) -> yaml.Node | None:
    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError(found=f"no file {path}", required="a YAML file of settings", remedy="check the path") from None
    except OSError as error:
        raise ConfigError(
            found=f"{path}: {error.strerror}",
            required="a YAML file that can be read",
            remedy="check the path and its permissions",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            found=f"{path}: bytes that are not UTF-8",
            required="a YAML file of settings",
            remedy="check the path, or save it as UTF-8",
        ) from error
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from error


def _not_yaml(path: str | Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    problem = getattr(error, "problem", None) or re.sub(r"\s+", " ", str(error))
    return ConfigError(
        found=f"{path}{line}: {problem}",
        required="YAML: sections, and settings indented with spaces below them",
        remedy="correct this line or the one before it",
    )


def _settings(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Dotted name, key and value of each setting and each section, in the order of the file."""
    for key, value in node.value:
        name = prefix + (key.value if isinstance(key, yaml.ScalarNode) else shown(key.tag))
        yield name, key, value
        if isinstance(value, yaml.MappingNode):
            yield from _settings(value, f"{name}.")
