"""The pages of every slot, on the device, where kernels and gathers look up addresses.

Kept between steps, so that a step's work does not grow with the length of texts, and at fixed addresses, for recorded steps.

Shape legend: S slots, P pages of the longest request.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_dmtd.inference.kv.pages import PageTable, PageTables
from megatron_dmtd.inference.kv.store import KVStore


class DeviceTable:
    """The pages of every slot in one group."""

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.page_SP = torch.zeros((num_slots, max_pages), dtype=torch.int64, device=device)
        self._known: list[tuple[PageTable | None, int]] = [(None, 0)] * num_slots

    def update(self, slot: int, table: PageTable) -> None:
        """Add the pages of `table` that have come since the last call for `slot`; all of them if it was another table."""
        owner, known = self._known[slot]
        if owner is not table:
            known = 0
        elif known == len(table.pages):
            return
        self.page_SP[slot, known : len(table.pages)] = torch.tensor(table.pages[known:], dtype=torch.int64)
        self._known[slot] = (table, len(table.pages))


class DeviceTables:
    """The same for all groups. There is one slot more than requests, for padding rows."""

    def __init__(self, store: KVStore, *, num_slots: int, max_entries: int, device: torch.device) -> None:
        max_pages = -(-max_entries // store.page_size)
        self.by_group: Mapping[str, DeviceTable] = {name: DeviceTable(num_slots + 1, max_pages, device) for name in store.groups}

    def update(self, slot: int, tables: PageTables) -> None:
        """Record the new pages of the request in `slot`."""
        for name, table in self.by_group.items():
            table.update(slot, tables[name])
