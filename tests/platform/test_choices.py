"""The choice of a product: clear, recorded, and the same for every process of a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_dmtd.platform import choices, products
from megatron_dmtd.platform.choices import Form


def test_another_product_must_be_clearly_faster_in_three_quarters_of_the_turns() -> None:
    usual = [1.0, 1.1, 0.9, 1.0, 4.0, 1.0, 1.0, 1.0]
    assert choices.fastest({"torch": usual, "onednn": [0.5 * s for s in usual]}) == "onednn"
    assert choices.fastest({"torch": usual, "onednn": [0.99 * s for s in usual]}) == "torch"
    # fast in some turns alone: noise
    assert choices.fastest({"torch": usual, "onednn": [0.1, 0.1, 0.1, 2.0, 9.0, 2.0, 2.0, 2.0]}) == "torch"
    # one slow turn does not matter
    assert choices.fastest({"torch": usual, "onednn": [0.5] * 7 + [9.0]}) == "onednn"
    assert choices.fastest({"torch": usual, "onednn": [0.8] * 8, "widened": [0.4] * 8}) == "widened"


@pytest.mark.parametrize(
    ("rows", "nearest"), [(1, 16), (16, 16), (39, 16), (40, 96), (96, 96), (221, 96), (222, 512), (9999, 512)]
)
def test_a_number_of_rows_is_decided_by_the_nearest_measured_one(rows: int, nearest: int) -> None:
    assert choices.nearest_rows(rows) == nearest


def test_choices_are_measured_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "WIDTH", 32)
    path = tmp_path / "products" / "machine.json"
    measured = choices.choose(products.candidates, path)
    assert measured.path == path and len(measured.all) == 2 * 3 * 3
    assert {row.product for row in measured.all} <= set(products.PRODUCTS)
    assert str(measured).count("weight gradient") == 6

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(choices, "measured", refuse)
        assert choices.choose(products.candidates, path).all == measured.all
    fields = json.loads(path.read_text())
    fields["choices"] = fields["choices"][1:]
    for damaged in ("", "{}", "[]", json.dumps(fields)):
        path.write_text(damaged)
        assert choices.recorded(path) is None
        assert choices.choose(products.candidates, path).path == path
    assert choices.recorded(path) is not None


def test_a_run_goes_by_its_own_copy_whatever_happens_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "WIDTH", 32)
    cache, run = tmp_path / "cache" / "machine.json", tmp_path / "run" / "products"
    first = choices.choose(products.candidates, cache, run)
    copy = run / "machine.json"
    assert copy.read_text() == cache.read_text()
    other = copy.read_text().replace('"product": "onednn"', '"product": "x"').replace('"product": "torch"', '"product": "onednn"')
    cache.write_text(other.replace('"product": "x"', '"product": "torch"'))
    assert choices.choose(products.candidates, cache).all != first.all
    assert choices.choose(products.candidates, cache, run).all == first.all
    cache.unlink()
    assert choices.choose(products.candidates, cache, run).all == first.all and not cache.exists()


def test_real_products_are_measured_even_where_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "WIDTH", 32)
    seen = set()

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.add(type(x))
        return torch.nn.functional.linear(x, weight, bias)

    with FakeTensorMode():
        assert isinstance(torch.empty(1), FakeTensor)
        choices.measured(lambda _: {"torch": spy, "onednn": spy})
    assert seen == {torch.Tensor}


def test_bf16_without_instructions_is_widened_by_rule_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "WIDTH", 32)
    monkeypatch.setattr(products, "has_bf16_instructions", lambda: False)

    def refuse(*_: object) -> None:
        raise AssertionError("its fp32 products would ask for the choices that are being made")

    monkeypatch.setitem(products.PRODUCTS, "widened", refuse)
    found = choices.Choices(choices.measured(products.candidates))
    assert {row.product for row in found.all if row.dtype == "bfloat16"} == {"widened"} and "the only one" in str(found)


def test_bf16_without_instructions_is_widened_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 5).bfloat16(), torch.randn(7, 5).bfloat16()
    monkeypatch.setattr(products, "has_bf16_instructions", lambda: False)
    assert torch.equal(products.linear(x, weight), (x.float() @ weight.float().t()).bfloat16())


def test_without_a_cache_the_choices_live_as_long_as_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "WIDTH", 32)
    (tmp_path / "file").write_text("")
    found = choices.choose(products.candidates, tmp_path / "file" / "machine.json")
    assert found.path is None and found.name(torch.float32, Form.FORWARD, 100) in products.PRODUCTS


def test_another_processor_or_another_limit_has_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = choices.record_path()
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        limited = choices.record_path()
    monkeypatch.setattr(choices, "cpu_facts", lambda: iter(["flags: none"]))
    assert len({here, limited, choices.record_path()}) == 3 and choices.record_path().parent == here.parent


def test_measuring_starts_no_threads_and_restores_their_number() -> None:
    threads = torch.get_num_threads()
    with choices._one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
