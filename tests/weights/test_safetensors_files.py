import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dmtd.errors import ConversionError
from megatron_dmtd.weights.safetensors_files import WeightFiles, write_weights
from megatron_dmtd.weights.specs import TensorSpec, spec_of


def tensors():
    whole = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    first, second = whole.t().chunk(2, dim=1)
    assert not first.is_contiguous()
    return {"b": first, "a": second, "c": torch.full((3,), -0.0, dtype=torch.bfloat16), "d": torch.zeros(0, 5)}


def write(directory, items=None, **options):
    items = items or tensors()
    directory.mkdir(exist_ok=True)
    write_weights(directory, {name: spec_of(tensor) for name, tensor in items.items()}, items.items(), **options)
    return directory


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    directory = write(tmp_path / "sharded", shard_bytes=9000)
    assert len(list(directory.glob("*.safetensors"))) == 2
    return directory


def test_what_is_written_is_read(sharded):
    files = WeightFiles(sharded)
    assert list(files.specs) == ["b", "a", "c", "d"]
    for name, tensor in tensors().items():
        assert files.specs[name] == TensorSpec(tuple(tensor.shape), tensor.dtype)
        read = files.read(name)
        assert torch.equal(read, tensor) and read.dtype == tensor.dtype
    assert torch.signbit(files.read("c")).all()


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(sharded, tmp_path):
    theirs = {name: tensor for path in sorted(sharded.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    assert theirs.keys() == tensors().keys() and all(torch.equal(theirs[name], tensor) for name, tensor in tensors().items())
    save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors().items())


def test_the_index_states_every_tensor_and_the_total_size(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 4 * 4096 + 6}, "weight_map": {"a": second, "b": first, "c": second, "d": second}}


def test_data_begin_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 9):
        content = (write(tmp_path / str(length), {"x" * length: torch.ones(1)}) / "model.safetensors").read_bytes()
        assert int.from_bytes(content[:8], "little") % 8 == 0


def test_a_tensor_larger_than_a_shard_gets_a_file_of_its_own(tmp_path):
    items = {"a": torch.ones(1), "b": torch.ones(100), "c": torch.ones(1)}
    files = sorted(path.name for path in write(tmp_path / "out", items, shard_bytes=100).glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def test_a_tensor_is_read_into_its_place_in_another(sharded):
    whole = torch.zeros(2, 64, 2, 32)
    WeightFiles(sharded).read_into("a", whole[1, :, 1])
    assert torch.equal(whole[1, :, 1], tensors()["a"])
    assert not whole[0].any() and not whole[1, :, 0].any()


def test_equality_is_of_bits(tmp_path):
    zeros = torch.zeros(5)
    nans = torch.full((5,), torch.nan)
    files = WeightFiles(
        write(tmp_path / "out", {"a": zeros, "b": -zeros, "c": zeros.clone(), "d": zeros[:4], "e": nans, "f": nans})
    )
    assert files.are_equal("a", "c") and files.are_equal("e", "f")
    assert not files.are_equal("a", "b") and not files.are_equal("a", "d")


def test_a_missing_shard_is_named(sharded):
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ConversionError, match=f"lacks {lost.name}"):
        WeightFiles(sharded)


@pytest.mark.parametrize(
    ("size", "named"),
    [(3, "no safetensors header"), (20, "cut off inside its header"), (-1, "bytes long, where its header needs")],
)
def test_truncated_shards_are_all_named_in_one_error(sharded, size, named):
    paths = sorted(sharded.glob("*.safetensors"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConversionError) as caught:
        WeightFiles(sharded)
    assert all(path.name in caught.value.found for path in paths) and caught.value.found.count(named) == 2


def test_bytes_after_the_last_tensor_are_refused(sharded):
    path = sorted(sharded.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ConversionError, match="bytes long"):
        WeightFiles(sharded)


def test_a_file_that_shrinks_while_it_is_read_is_refused(sharded):
    files = WeightFiles(sharded)
    path = sorted(sharded.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConversionError, match="became shorter"):
        files.read("b")


def header_file(path, entries, data=b""):
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not a JSON object"),
        ({"a": {}}, "dtype"),
        ({"a": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}, "a has type U16"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"a of shape \[2\] has 4 bytes"),
        ({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, "overlap"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path, entries, named):
    header_file(tmp_path / "model.safetensors", entries, bytes(8))
    with pytest.raises(ConversionError, match=named):
        WeightFiles(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "one")
    save_file({"b": torch.zeros(1)}, tmp_path / "two")
    write_index(tmp_path, {"a": "one", "c": "two"})
    with pytest.raises(ConversionError) as caught:
        WeightFiles(tmp_path)
    for fault in ("b is in 2 files", "c is not in two", "b of two is not in the index"):
        assert fault in caught.value.found


@pytest.mark.parametrize("text", ["{}", "[", '{"weight_map": []}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConversionError, match="weight_map"):
        WeightFiles(tmp_path)


def test_directories_without_safetensors_are_refused(tmp_path):
    with pytest.raises(ConversionError, match="no safetensors"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ConversionError, match=r"but pytorch_model\.bin"):
        WeightFiles(tmp_path)
