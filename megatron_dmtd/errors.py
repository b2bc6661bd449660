"""Errors meant for users: each says what was found, what is required and what to do.

Broken invariants of this library are `assert`s with values, not these.
"""

from __future__ import annotations

import reprlib
from dataclasses import KW_ONLY, dataclass

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def shown(value: object) -> str:
    """A value in a message: its `repr`, cut short, since users may give anything."""
    return _REPR.repr(value)


class DMTDError(Exception):
    """Base of every error that this library raises on purpose."""

    exit_status = 2
    """What `tools/train.py` ends with: 2, refused, but for the few errors of a run that had begun."""

    def __init__(self, *, found: str, required: str, remedy: str) -> None:
        self.found = found
        self.required = required
        self.remedy = remedy
        super().__init__(f"found: {found}\nrequired: {required}\nremedy: {remedy}")


class ConfigError(DMTDError):
    """A configuration that contradicts itself or names something unknown."""


class DataError(DMTDError):
    """A corpus, tokenizer or token file that cannot be used as asked."""


class CheckpointError(DMTDError):
    """A checkpoint that is absent, incomplete, damaged or of another model."""


class ConversionError(DMTDError):
    """Weights that cannot be mapped one to one between two formats."""


class CapabilityError(DMTDError):
    """A feature that this machine, package or device lacks."""


class ModelError(DMTDError):
    """A model whose description is unknown, contradicts itself, or asks for something that is not computed here."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error without its `found`: what a caller requires and advises, for a lower room that finds what is wrong."""

    error: type[DMTDError]
    _: KW_ONLY
    required: str
    remedy: str

    def __call__(self, found: str) -> DMTDError:
        """The error, to be raised."""
        return self.error(found=found, required=self.required, remedy=self.remedy)
