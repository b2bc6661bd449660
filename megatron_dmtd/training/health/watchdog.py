"""A job that hangs names who hangs, and ends.

Each rank beats when it gets somewhere: at each microbatch, step, evaluation and save. A thread on each rank tells the others,
through torch.distributed's store, how often it has beaten and where it is. When this rank has not beaten for `limit_s`, the
thread reads what the others say, prints a report with the stacks of all threads of this process, and ends the process with
status 5.

All ranks of a job stall together, since they wait for each other. The report tells them apart: a rank whose thread has fallen
silent is frozen or gone; of the others, those that do not wait inside a collective are suspect, and those with the fewest beats.
The thread needs the interpreter lock: code that holds it for ever silences the thread too, and the other ranks report it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_dmtd.training import exit_codes

_STORE_TIMEOUT_S = 10.0
#: signs come every 5 s at most; clocks of nodes differ by less than preflight allows
_SILENT_S = 12.0
_WAITING_IN = os.sep + os.path.join("torch", "distributed") + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """What a rank tells about itself."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    """Finished steps."""
    beats: int
    """How often it got somewhere. Equal on all ranks that are at the same place."""
    moved_at: float
    """Time of its last beat, on its own clock, in seconds since 1970."""
    told_at: float
    """Time of this sign, likewise: of the last one, for a process that is frozen."""
    line: str
    """Where its main thread is."""
    waits: bool
    """Whether its main thread is inside torch.distributed: it waits for the others, or would see them."""
    serial: int
    """Goes up with each sign: one that stays the same comes from a process that is frozen or gone."""


def suspects(before: list[Sign | None], after: list[Sign | None]) -> tuple[list[int], str]:
    """Which ranks hold up the others, and why, from two readings of all ranks' signs a few signs apart."""
    silent = [rank for rank, (old, new) in enumerate(zip(before, after)) if new is None or (old and old.serial == new.serial)]
    if silent:
        return silent, "no sign of life: frozen, or gone"
    signs = [sign for sign in after if sign is not None]
    working = [sign.rank for sign in signs if not sign.waits]
    if working and len(working) < len(signs):
        return working, "not waiting for others"
    fewest = min(sign.beats for sign in signs)
    behind = [sign.rank for sign in signs if sign.beats == fewest]
    return behind, "the furthest behind" if len(behind) < len(signs) else "all at the same place"


def _main_thread_place() -> tuple[str, bool]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    line = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "no Python code"
    return line, any(_WAITING_IN in entry.filename for entry in stack)


def stacks() -> str:
    """The Python stack of each thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for identity, frame in sys._current_frames().items():
        if identity != threading.get_ident():
            parts.append(f"thread {names.get(identity, identity)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)


class Watchdog:
    """One rank's watchdog. `limit_s` 0: it only keeps the books."""

    def __init__(self, *, limit_s: float, rank: int, world_size: int) -> None:
        self._limit_s = limit_s
        self._allowed_s = limit_s
        self._world_size = world_size
        self._store: Any = None
        self._last_beat = time.monotonic()
        self._is_over = threading.Event()
        self._ends_the_job = threading.Lock()
        host = socket.gethostname()
        self._sign = Sign(
            rank=rank,
            host=host,
            pid=os.getpid(),
            phase="start",
            step=0,
            beats=0,
            moved_at=time.time(),
            told_at=time.time(),
            line="",
            waits=False,
            serial=0,
        )

    @property
    def period_s(self) -> float:
        """Seconds between signs. The report comes at most four of them after the limit, the end of the process at most eight."""
        return min(5.0, max(0.1, self._limit_s / 8))

    def start(self) -> None:
        """Begin to watch."""
        if self._limit_s > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def connect(self) -> None:
        """Learn about the other ranks too, once torch.distributed is there."""
        if self._limit_s > 0 and self._world_size > 1:
            # A connection of its own: the main thread may wait inside the original one.
            store = torch.distributed.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(datetime.timedelta(seconds=_STORE_TIMEOUT_S))
            self._store = torch.distributed.PrefixStore("watchdog", store)
            self._tell()  # a rank that freezes before its first period is over is known by name too

    def beat(self, phase: str, *, step: int, allowed_s: float = 0.0) -> None:
        """Note that this rank got somewhere. `allowed_s`: a longer limit for what comes now."""
        self._allowed_s = max(self._limit_s, allowed_s)
        self._sign = replace(self._sign, phase=phase, step=step, beats=self._sign.beats + 1)
        self._last_beat = time.monotonic()

    def stop(self) -> None:
        """Watch no longer. Where the watchdog is ending the process already, that is waited for.

        The rank that reports first also exits first, and so fails the collectives in which the others wait: their main threads
        must not get ahead of their own reports.
        """
        with self._ends_the_job:
            self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(self.period_s):
            self._tell()
            if time.monotonic() - self._last_beat > self._allowed_s:
                with self._ends_the_job:
                    if not self._is_over.is_set():
                        self._end_the_job()

    def _tell(self) -> None:
        line, waits = _main_thread_place()
        now = time.time()
        moved_at = now - (time.monotonic() - self._last_beat)
        self._sign = replace(self._sign, moved_at=moved_at, told_at=now, line=line, waits=waits, serial=self._sign.serial + 1)
        if self._store is not None:
            # A store that is gone took its host with it; that rank will be silent in the report.
            with contextlib.suppress(RuntimeError):
                self._store.set(str(self._sign.rank), json.dumps(_to_json(self._sign)))

    def _read(self) -> list[Sign | None]:
        if self._store is None:
            return [self._sign]
        signs: list[Sign | None] = []
        for rank in range(self._world_size):
            try:
                key = str(rank)
                signs.append(Sign(**json.loads(self._store.get(key))) if self._store.check([key]) else None)
            except RuntimeError:
                signs.append(None)
        return signs

    def _end_the_job(self) -> None:
        beats = self._sign.beats
        before = self._read()
        for _ in range(2):
            time.sleep(self.period_s)
            self._tell()
        if self._sign.beats != beats:  # it was only slow
            return
        os.write(2, self._report(before, self._read()).encode(errors="replace"))
        # The others stalled a little later and are about to report too; the first exit would break their collectives before that.
        time.sleep(4 * self.period_s)
        os._exit(exit_codes.STALLED)

    def _report(self, before: list[Sign | None], after: list[Sign | None]) -> str:
        mine = self._sign
        named, reason = suspects(before, after) if self._store is not None else ([mine.rank], "the only one this rank knows of")
        lines = [
            f"WATCHDOG rank {mine.rank} on {mine.host} (process {mine.pid}): no progress {_since(mine.moved_at, time.time())} "
            f"in phase {mine.phase!r} after step {mine.step}",
            f"stalled: {', '.join(f'rank {rank}' for rank in named)} ({reason})",
            *(
                describe(rank, sign, is_named=rank in named, now=time.time())
                for rank, sign in enumerate(after if self._store is not None else [])
            ),
        ]
        return "\n".join(lines) + f"\nstacks of rank {mine.rank}:\n{stacks()}\n"


def _to_json(sign: Sign) -> dict[str, Any]:
    return {name: getattr(sign, name) for name in Sign.__dataclass_fields__}


def _since(moment: float, now: float) -> str:
    """`since 2026-12-01 14:03:07 (312 s)`, in local time."""
    return f"since {time.strftime('%F %T', time.localtime(moment))} ({max(0.0, now - moment):.0f} s)"


def describe(rank: int, sign: Sign | None, *, is_named: bool, now: float) -> str:
    """The line of a report on one rank. A frozen one told its last sign long ago: its times are counted to `now` all the same."""
    mark = "STALLED" if is_named else "       "
    if sign is None:
        return f"{mark} rank {rank}: never heard of"
    place = f"no progress {_since(sign.moved_at, now)} in phase {sign.phase!r} after step {sign.step}"
    silent = f", no sign of life {_since(sign.told_at, now)}" if now - sign.told_at > _SILENT_S else ""
    waits = ", waits for others" if sign.waits else ""
    return f"{mark} rank {rank} on {sign.host} (process {sign.pid}): {place}{silent}{waits}, at {sign.line}"


def watched(iterator: Iterator[Any], watchdog: Watchdog, *, phase: str, step: Any) -> Iterator[Any]:
    """The same items, with a beat before and after each is made; `step()` is the number of finished steps."""
    while True:
        watchdog.beat(f"{phase}: reading data", step=step())
        try:
            item = next(iterator)
        except StopIteration:
            return
        watchdog.beat(phase, step=step())
        yield item
