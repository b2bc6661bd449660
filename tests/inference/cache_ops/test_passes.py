"""Copies of a pass: K is rotated from the position where it is to that where it goes, V is copied."""

import numpy as np
import pytest
import torch

from megatron_dmtd.architecture import AttentionSpec, RotaryProfile
from megatron_dmtd.architecture.rotary import rotary_tables
from megatron_dmtd.inference.cache_ops.pages import PageSet
from megatron_dmtd.inference.cache_ops.passes import PassViews
from megatron_dmtd.inference.cache_ops.views import Moves, View
from megatron_dmtd.inference.kv.codec import PageShape, PlainCodec
from megatron_dmtd.inference.kv.pages import PageTable, PageTables
from megatron_dmtd.inference.native.build import load_kernels
from tests.inference.oracle_models import YARN


class Visit:
    def __init__(self, dtype: torch.dtype) -> None:
        self.group = "g"
        self.attention = AttentionSpec(
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, rotary=RotaryProfile(theta=1e4, scaling=YARN), qk_norm=None
        )
        shape = PageShape(page_size=4, num_key_value_heads=2, head_dim=8)
        self.pages = PlainCodec(dtype).allocate(shape, num_pages=4, device=torch.device("cpu"))


def rotated(k_RGD: torch.Tensor, positions: list[int], profile: RotaryProfile) -> torch.Tensor:
    cos, sin = (table[:, None] for table in rotary_tables(torch.tensor(positions), profile, 8, torch.float64))
    first, second = k_RGD.chunk(2, dim=-1)
    return k_RGD * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 6e-2)])
def test_a_copy_is_what_would_have_been_computed_at_the_new_position(dtype, atol):
    """YaRN's factor on K stays what it was. Level: rounding; of bf16 twice, of the source and of the copy."""
    visit, plain = Visit(dtype), torch.randn(3, 2, 8, dtype=torch.float64)
    values = torch.randn(3, 2, 8, dtype=torch.float64)
    before, after = [30, 5, 81], [2, 3, 4]
    visit.pages.write(
        torch.tensor([1, 1, 2]),
        torch.tensor([0, 3, 2]),
        rotated(plain, before, visit.attention.rotary).to(dtype),
        values.to(dtype),
    )
    source = visit.pages.k_PGDT.clone()
    sets = {page: PageSet(PageTables({"g": PageTable([page])})) for page in (1, 2, 3)}
    moves = Moves(
        [sets[1], sets[1], sets[2]],
        np.array([0, 3, 2]),
        np.array(before),
        [sets[3]] * 3,
        np.array([0, 1, 3]),
        np.array(after),
    )
    view = View(4)
    view.add(sets[3], np.array([0, 1, 3]), np.array(after))
    run = PassViews([view], [moves], rows=[0, -1], slots=[5, 1], groups=["g"], device=torch.device("cpu"))
    run.copy_moved(visit)
    keys, copied = visit.pages.read_entries(torch.tensor([3, 3, 3]), torch.tensor([0, 1, 3]))
    torch.testing.assert_close(keys.double(), rotated(plain, after, visit.attention.rotary), rtol=0, atol=atol)
    assert torch.equal(copied, values.to(dtype)) and torch.equal(visit.pages.k_PGDT[:3], source[:3])


def test_rows_find_their_pages_after_those_of_the_slots():
    sets = [PageSet(PageTables({"g": PageTable([page])})) for page in (7, 9)]
    view, other = View(4), View(4)
    for one in sets:
        view.add(one, np.array([0]), np.array([3]))
    other.add(sets[1], np.array([1]), np.array([0]))
    run = PassViews([view, other], [], rows=[-1, 1, 0], slots=[2, 0, 0], groups=["g"], device=torch.device("cpu"))
    table = run.pages("g", torch.arange(12).view(3, 4))
    assert run.table_R.tolist() == [2, 4, 3] and table[3, :2].tolist() == [7, 9] and table[4, 0] == 9
    pages, positions = run.read("g", [1])
    assert pages.tolist() == [[9, 9]] and positions.tolist() == [[-1, 0, -1, -1, -1, -1, -1, -1]]


def test_copies_in_c_are_those_of_torch():
    """Level: K to rounding in fp32, V bitwise; nothing else changes."""
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(4)
    visits = [Visit(torch.float32), Visit(torch.float32)]
    for name in ("k_PGDT", "v_PGTD"):
        random = torch.randn(getattr(visits[0].pages, name).shape, generator=generator)
        for visit in visits:
            getattr(visit.pages, name).copy_(random)
    sets = {page: PageSet(PageTables({"g": PageTable([page])})) for page in range(4)}
    moves = Moves(
        [sets[0], sets[1], sets[0]],
        np.array([0, 3, 2]),
        np.array([30, 5, 81]),
        [sets[3], sets[2], sets[3]],
        np.array([1, 0, 3]),
        np.array([2, 3, 4]),
    )
    view = View(4)
    view.add(sets[3], np.array([1, 3]), np.array([2, 4]))
    run = PassViews([view], [moves], rows=[0], slots=[0], groups=["g"], device=torch.device("cpu"))

    def move(visit, columns, turns):
        pages = visit.pages.native
        given = [tensor.data_ptr() for tensor in (*columns, *turns)]
        kernels.dmtd_move(pages.k, pages.v, *given, len(columns[0]), 2, 8, 4)

    run.copy_moved(visits[0])
    run.copy_moved(visits[1], move)
    torch.testing.assert_close(visits[1].pages.k_PGDT, visits[0].pages.k_PGDT, rtol=0, atol=1e-6)
    assert torch.equal(visits[1].pages.v_PGTD, visits[0].pages.v_PGTD)
