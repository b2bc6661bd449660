import threading

import pytest

from megatron_dmtd.weights import prefetch
from megatron_dmtd.weights.prefetch import Flusher, SteadyFile, read_ahead


def test_items_come_in_order_and_no_more_than_one_is_read_ahead():
    begun: list[int] = []
    for count, (key, value) in enumerate(read_ahead(range(6), lambda key: begun.append(key) or 10 * key), start=1):
        assert (key, value) == (count - 1, 10 * (count - 1))
        assert len(begun) <= count + 1
    assert begun == list(range(6))
    assert list(read_ahead([], str)) == []


def test_the_next_item_is_read_while_the_last_is_worked_on():
    reached = threading.Event()

    def read(key: int) -> int:
        if key == 1:
            reached.set()
        return key

    items = read_ahead([0, 1], read)
    assert next(items) == (0, 0)
    assert reached.wait(10), "the second must be read before it is asked for"
    assert next(items) == (1, 1)


def test_an_error_of_the_reader_comes_at_its_turn():
    def read(key: int) -> int:
        return 6 // key

    items = read_ahead([3, 2, 0], read)
    assert [next(items), next(items)] == [(3, 2), (2, 3)]
    with pytest.raises(ZeroDivisionError):
        next(items)


def test_a_flush_that_fails_is_an_error_and_others_are_waited_for(tmp_path):
    (tmp_path / "file").write_text("x")
    with Flusher() as flusher:
        flusher.flush(tmp_path / "file")

    def flush_nothing():
        with Flusher() as flusher:
            flusher.flush(tmp_path / "absent")

    with pytest.raises(FileNotFoundError):
        flush_nothing()


def test_the_error_of_the_block_hides_no_other():
    def fail():
        with Flusher():
            raise KeyError("the block's own")

    with pytest.raises(KeyError, match="the block's own"):
        fail()


def test_a_steady_file_holds_what_was_written_and_is_flushed_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "_PIECE_BYTES", 7)
    monkeypatch.setattr(prefetch, "_FLUSHED_BYTES", 20)
    flushed: list[int] = []
    path = tmp_path / "file"
    with Flusher() as flusher:
        monkeypatch.setattr(flusher, "flush", lambda flushed_path: flushed.append(flushed_path.stat().st_size))
        with SteadyFile(path, flusher) as file:
            assert file.write(bytes(range(50))) == 50
            assert file.tell() == 50 and flushed == [21, 42]
            assert file.write(b"") == 0 and file.write(memoryview(b"end")) == 3
    assert path.read_bytes() == bytes(range(50)) + b"end"
    assert flushed == [21, 42, 53], "closing flushes the rest"
