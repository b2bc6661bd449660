import torch

from megatron_dmtd.inference.kv.device_tables import DeviceTable, DeviceTables
from megatron_dmtd.inference.kv.pages import PageTable
from tests.inference.kv.stores import mixed_store, taken

CPU = torch.device("cpu")


def test_only_new_pages_are_written_and_another_table_starts_from_its_first():
    tables = DeviceTable(2, 4, CPU)
    first = PageTable([7, 5])
    tables.update(1, first)
    first.pages.append(3)
    tables.update(1, first)
    assert tables.page_SP.tolist() == [[0, 0, 0, 0], [7, 5, 3, 0]]
    tables.update(1, PageTable([2, 9]))
    assert tables.page_SP[1, :2].tolist() == [2, 9]


def test_every_group_has_its_table_with_a_slot_that_is_nobodys():
    store = mixed_store(page_size=4)
    tables = DeviceTables(store, num_slots=2, max_entries=18, device=CPU)
    own = taken(store, 9)
    tables.update(1, own)
    for name, table in tables.by_group.items():
        assert table.page_SP.shape == (3, 5)
        assert table.page_SP[1, : len(own[name].pages)].tolist() == own[name].pages
