"""Configuration from YAML files and dotted command-line overrides, and back to YAML.

`train.py --config a.yaml --optimizer.lr 1e-4`: later arguments win. Parsing is jsonargparse's; this module adds the closest known
name to an unknown key and turns every parse error into a `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from megatron_dmtd.config.files import check_file, line_of, named_files
from megatron_dmtd.config.metadata import Setting, settings
from megatron_dmtd.config.sections import Config
from megatron_dmtd.errors import ConfigError

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


def _sections() -> dict[str, Any]:
    """The dataclass of each section, by name."""
    return {section.name: section.default_factory for section in dataclasses.fields(Config)}


def _section_names() -> list[str]:
    """The dotted name of each section, such as `optimizer` or `model.rope_scaling`."""
    return sorted({key.rpartition(".")[0] for key in known_keys()})


def known_keys() -> list[str]:
    """Every dotted key of the configuration, such as `optimizer.lr` or `model.rope_scaling.factor`."""
    return [setting.key for setting in settings(Config)]


class RawHelp(jsonargparse.DefaultHelpFormatter):
    """Keep the line breaks of the description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line for line in text.splitlines(keepends=True))


def make_parser(*, description: str, prog: str | None = None) -> jsonargparse.ArgumentParser:
    """A parser of `--config FILE` and of one `--section.field` per configuration field."""
    parser = jsonargparse.ArgumentParser(
        prog=prog, description=description, formatter_class=RawHelp, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--config", action="config", help="YAML file of settings; may be given more than once, later ones win")
    for name, section in _sections().items():
        parser.add_class_arguments(section, name)
    _say_more({setting.key: setting for setting in settings(Config)}, parser)
    return parser


def _say_more(known: dict[str, Setting], parser: jsonargparse.ArgumentParser) -> None:
    """Add to each setting's help what its docstring leaves to the metadata."""
    for action in parser._actions:
        if (setting := known.get(action.dest)) is not None:
            limits = f" {str(setting.range).capitalize()}." if setting.range else ""
            action.help = f"{action.help}{limits}{'' if setting.resume.may_change else ' Fixed for a resumed run.'}"


def _closest(name: str) -> str:
    name = name.lstrip("-")
    keys = known_keys()
    candidates = keys + sorted({key.split(".")[0] for key in keys})
    by_leaf = {key.split(".")[-1]: key for key in keys}
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if not matches:
        matches = [by_leaf[leaf] for leaf in difflib.get_close_matches(name.split(".")[-1], by_leaf, n=1, cutoff=0.5)]
    return f"did you mean {matches[0]}?" if matches else "see --help for the known keys"


#: how jsonargparse words an unknown setting; the key is the named groups joined by a dot
_UNKNOWN = (
    re.compile(r"unrecognized arguments: --(?P<leaf>[-\w.]+)", re.IGNORECASE),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<leaf>[\w.]+)'"),
    re.compile(r"Option '(?P<leaf>[\w.]+)' is not accepted"),
)

#: how it words a single value where a list is expected
_NO_LIST = re.compile(r'Parser key "(?P<key>[\w.]+)":\s+Expected a <class \'tuple\'>\. Got value: (?P<value>[^\n\[\]]+)$')


#: how it words a value of another type, and one that it cannot load
_OTHER_TYPE = re.compile(
    r'Parser key "(?P<key>[\w.]+)":\s+Expected a <class \'(?P<type>\w+)\'>\. Got value: (?P<value>.+)$', re.DOTALL
)
_NO_VALUE = re.compile(r'Parser key "(?P<key>[\w.]+)":')
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "tuple": "a list"}


def _as_config_error(error: Exception, files: Sequence[str] = ()) -> ConfigError:
    """A parse error in words, with the first of `files` that has it when parsed alone, and the line."""
    text = str(error).strip()
    for pattern in _UNKNOWN:
        if match := pattern.search(text):
            key = ".".join(part for part in (match.groupdict().get("group"), match["leaf"]) if part)
            return ConfigError(
                found=f"{_place(files, key)}unknown setting {key}", required="a known setting", remedy=_closest(key)
            )
    if match := _NO_LIST.search(text):
        remedy = (
            f"write a list: --{match['key']} '[{match['value']}]', or {match['key'].split('.')[-1]}: [{match['value']}] in YAML"
        )
        found = f"{_place(files, match['key'])}{match['key']} = {match['value']}"
        return ConfigError(found=found, required="a list", remedy=remedy)
    if (match := _OTHER_TYPE.search(text)) and match["type"] in _TYPES:
        found = f"{_place(files, match['key'])}{match['key']} = {match['value']}"
        return ConfigError(found=found, required=_TYPES[match["type"]], remedy=f"correct {match['key']}")
    key = match["key"] if (match := _NO_VALUE.search(text)) else ""
    return ConfigError(
        found=f"{_place(files, key)}{text}",
        required="values of the types that --help shows",
        remedy="correct the setting named above",
    )


def _place(files: Sequence[str], key: str) -> str:
    """`a.yaml, line 3: ` if the first file that cannot be parsed by itself is a.yaml, and `key` stands there."""
    for file in files:
        try:
            make_parser(description="").parse_args(["--config", file])
        except (jsonargparse.ArgumentError, TypeError):
            line = line_of(file, key)
            return f"{file}: " if line is None else f"{file}, line {line}: "
    return ""


def to_config(namespace: Any) -> Config:
    """The sections of a parsed namespace as a `Config`."""
    return Config(**{name: _to_section(section, namespace[name].as_dict()) for name, section in _sections().items()})


def _to_section(section: Any, values: dict[str, Any]) -> Any:
    nested = {item.name: item.default_factory for item in dataclasses.fields(section)}
    fields = {}
    for name, value in values.items():
        if isinstance(value, dict):
            fields[name] = _to_section(nested[name], value)
        else:
            fields[name] = tuple(value) if isinstance(value, list) else value
    return section(**fields)


def parse(parser: jsonargparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Any:
    """Parse `arguments`; raise `ConfigError` with file, line, and the closest name for an unknown setting."""
    arguments = sys.argv[1:] if arguments is None else arguments
    files = named_files(arguments)
    for file in files:
        check_file(file, sections=_section_names())
    try:
        return parser.parse_args(arguments)
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise _as_config_error(error, files) from error


def load_config(arguments: Sequence[str]) -> Config:
    """A `Config` from command-line style arguments, such as `["--config", "a.yaml", "--optimizer.lr", "1e-4"]`."""
    return to_config(parse(make_parser(description=""), arguments))


def stated_keys(parser: jsonargparse.ArgumentParser, arguments: Sequence[str] | None = None) -> frozenset[str]:
    """The dotted settings that YAML files and options set, rather than leaving them at their defaults.

    The arguments are those that `parse` has accepted.
    """
    given = parser.parse_args(arguments, defaults=False)
    return frozenset(key for key in known_keys() if key in given)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as plain nested dictionaries of JSON and YAML values."""
    return {section: _plain(values) for section, values in dataclasses.asdict(config).items()}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in values.items():
        plain[name] = _plain(value) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else value
    return plain


def to_yaml(config: Config) -> str:
    """The whole resolved configuration as YAML, in the order of the sections."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def from_yaml(path: str | Path) -> Config:
    """A `Config` from a YAML file alone. Raises `ConfigError` if it is absent or holds unknown settings."""
    return load_config(["--config", str(path)])
