"""Why a command failed, found in its log: what a person should read, without what launchers add.

A rank that fails says why; torchrun then adds forty lines that do not. Several ranks say the same thing, and those that lose
their neighbour complain about that.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

#: torchrun's own lines, and the one with which its report of a failure begins
_LAUNCHER = re.compile(r"^[IWE]\d{4} \d\d:\d\d:\d\d[.\d]* \d+ torch/distributed/.*$", re.MULTILINE)
_REPORT = re.compile(r"^E\d{4} .*failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<rank>\d+)", re.MULTILINE)
#: how commands print a `DMTDError`
_REFUSAL = re.compile(
    r"^(?P<kind>\w+Error)\nfound: (?P<found>.*?)\nrequired: (?P<required>.*?)\nremedy: (?P<remedy>.*?)$", re.MULTILINE | re.DOTALL
)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?P<error>.+)", re.MULTILINE)
_LAST_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a command failed, in the words of `DMTDError`; an empty `remedy` if nothing says what to do."""

    found: str
    required: str = "exit status 0"
    remedy: str = ""


def output_of_last_command(log: str) -> str:
    """The part of a log that the last command wrote, each redrawn line as it stood last."""
    _, _, output = f"\n{log}".rpartition("\n$ ")
    return "\n".join(line.rpartition("\r")[2] for line in output.partition("\n")[2].replace("\r\n", "\n").split("\n"))


def reason(log: str, *, status: int) -> Reason:
    """Why the last command of `log` ended with `status`: a refusal, the signal that ended it, an exception, or its last lines."""
    output = output_of_last_command(log)
    report = _REPORT.search(output)
    said = _LAUNCHER.sub("", output[: report.start()] if report else output)
    if refusal := _REFUSAL.search(said):
        return Reason(found=refusal["found"], required=refusal["required"], remedy=refusal["remedy"])
    who = f"rank {report['rank']}" if report else "it"
    number = -int(report["status"]) if report else -status
    if number > 0:
        return Reason(found=f"{who} was ended by {_name_of(number)}{_cause_of(number)}")
    if error := _TRACEBACK.search(said):
        return Reason(found=f"{error['error']}\n{_end_of(said[: error.end()])}")
    return Reason(found=_end_of(said) or "no output")


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cause_of(number: int) -> str:
    return ": the system does this where memory runs out" if number == signal.SIGKILL else ""


def _end_of(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:])
