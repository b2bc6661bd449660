"""Control flow of cycled decoding, read off docs/method.md, sections 6 to 10: a walk over tokens, with labels for numbers.

Imports nothing of the package. An entry or a row is a label such as `R5` (real token 5) or `S5` (shadow slot 5). The walk takes
one token after the other, refreshes and computes blocks as two separate stages (docs/method.md, sections 7.2 and 7.4), and notes
for every label what it read. A step of the planner, however large, must show the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Walk:
    """One request. `parallel` and `sequential` are its caches; `read` says what each computed label has read."""

    variant: str
    cycle_length: int
    parallel: list[str] = field(default_factory=list)
    sequential: list[str] = field(default_factory=list)
    read: dict[str, frozenset[str]] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    ended_cycle: list[str] = field(default_factory=list)
    current_cycle: list[str] = field(default_factory=list)

    def take(self, position: int) -> None:
        """One more real token; the first of a cycle runs the parallel layers."""
        if self.variant != "vanilla" and (not self.current_cycle or len(self.current_cycle) == self.cycle_length):
            if self.variant.endswith("-refresh"):
                self._refresh()
            self.current_cycle = []
            self._shadow_block(position)
        self.current_cycle.append(f"R{position}")
        self.sequential.append(f"R{position}")
        label = f"T{position}"
        if self.variant == "vanilla":
            self.read[label] = frozenset(self.sequential)
        else:
            hidden = self.saved[len(self.current_cycle) - 1]
            self.read[label] = frozenset([*self.sequential, f"hidden {hidden}"])

    def _refresh(self) -> None:
        """7.2: the cycle just ended, as one real block, causally; each layer appends."""
        for label in self.current_cycle:
            self.parallel.append(label)
            self.read[label] = frozenset(self.parallel)

    def _shadow_block(self, head: int) -> None:
        """7.4 and 8.2."""
        block = [f"S{head + offset}" for offset in range(self.cycle_length)]
        for offset, label in enumerate(block):
            seen = block if self.variant.startswith("bidirectional") else block[: offset + 1]
            self.read[label] = frozenset([*self.parallel, *seen])
        if self.variant.endswith("-norefresh"):
            self.parallel.extend(block)
        self.saved = block
