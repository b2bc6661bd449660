"""A view shows entries of page sets at the positions of the tokens that they hold."""

import numpy as np

from megatron_dmtd.inference.cache_ops.pages import PageSet
from megatron_dmtd.inference.cache_ops.views import HIDDEN, View
from megatron_dmtd.inference.kv.pages import PageTables


def test_entries_are_numbered_by_page_set_and_hidden_unless_shown():
    view, sets = View(4), [PageSet(PageTables()) for _ in range(6)]
    view.add(sets[0], np.array([1, 2]), np.array([7, 8]))
    view.add(sets[1], np.array([0]), np.array([9]))
    view.add(sets[0], np.array([3]), np.array([10]))
    assert view.position_K.tolist() == [HIDDEN, 7, 8, 10, 9, HIDDEN, HIDDEN, HIDDEN]
    assert view.entry(sets[1], 2) == 6 and view.pages == sets[:2]
    for number, one in enumerate(sets[2:]):
        view.add(one, np.arange(4), np.arange(4) + 11 + 4 * number)
    assert view.position_K[8:].tolist() == list(range(11, 27)) and view.position_K[1] == 7
