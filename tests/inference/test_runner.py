"""Plans executed: what a step gives does not depend on how its tokens came to be known."""

import pytest
import torch

from megatron_dmtd.inference.kv.codec import PlainCodec
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.planner import Chunk, plan_step
from megatron_dmtd.inference.runner import Runner, num_scratch_pages
from tests.hf.tiny import random_ids
from tests.inference.oracle_models import model_of
from tests.oracles.parallel_dmtd import FOUR_VARIANTS, Shape, random_weights

SHAPE = Shape(num_layers=5, num_parallel_layers=3, qkv_bias=True, windows=(6, None, 6, 3, None))
TOKENS = random_ids(2, 23, seed=4).tolist()
each_kind = pytest.mark.parametrize("kind", FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])


class Texts:
    """Two texts being decoded by a runner, in slots 2 and 0."""

    def __init__(self, kind: tuple[str, str], mode: str = "dynamic") -> None:
        model = model_of(SHAPE, random_weights(SHAPE, seed=2), *kind)
        scratch = num_scratch_pages(mode, 3)
        self.store = KVStore(model.schedule, PlainCodec(torch.float64), num_pages=20, page_size=4, num_scratch_pages=scratch)
        self.runner = Runner(model, self.store, num_slots=3, max_length=32, native=False, mode=mode)
        self.slots, self.tables, self.taken = (2, 0), (PageTables(), PageTables()), [0, 0]

    def step(self, stops: list[int], *, wanted: str = "all") -> torch.Tensor:
        """Take each text to its stop. Logits of all tokens taken, or of the last of each text."""
        chunks = []
        for text, stop in enumerate(stops):
            if stop > self.taken[text]:
                self.store.grow(self.tables[text], stop)
                self.runner.set_pages(self.slots[text], self.tables[text])
                chunks.append(Chunk(self.slots[text], TOKENS[text], self.taken[text], stop))
                self.taken[text] = stop
        plan = plan_step(self.store.method, chunks)
        return self.runner.run(plan, range(len(plan.sequential)) if wanted == "all" else plan.last_rows)


@pytest.fixture(params=FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])
def kind(request) -> tuple[str, str]:
    return request.param


def test_two_texts_at_once_give_what_each_gives_token_by_token(kind):
    single = Texts(kind)
    expected = [[], []]
    for text in (0, 1):
        for position in range(23):
            stops = [0, 0]
            stops[text] = position + 1
            expected[text].append(single.step(stops)[0])
    both = Texts(kind)
    for stops, before in (([7, 2], (0, 0)), ([8, 4], (7, 2)), ([12, 17], (8, 4)), ([23, 18], (12, 17))):
        found = both.step(stops)
        rows = [expected[text][position] for text in (0, 1) for position in range(before[text], stops[text])]
        torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-11)


def test_logits_that_nobody_wants_change_nothing(kind):
    whole, last = Texts(kind), Texts(kind)
    for stops in ([7, 2], [8, 4], [16, 9]):
        before, logits_FV = list(whole.taken), whole.step(stops)
        first = stops[0] - before[0]
        torch.testing.assert_close(last.step(stops, wanted="last"), logits_FV[[first - 1, -1]], rtol=0, atol=1e-11)


def test_steps_of_one_token_in_shapes_that_repeat_give_the_same_logits(kind):
    plain, static = Texts(kind), Texts(kind, "static")
    for stops in ([5, 9], *([5 + count, 9 + count] for count in range(1, 14))):
        torch.testing.assert_close(static.step(stops), plain.step(stops), rtol=0, atol=1e-11)
    assert static.runner.static.num_steps == 13 and plain.runner.static is None


def test_scratch_pages_are_for_every_slot_and_one_that_is_nobodys():
    assert [num_scratch_pages(mode, 3) for mode in ("dynamic", "static", "graphs")] == [0, 4, 4]
