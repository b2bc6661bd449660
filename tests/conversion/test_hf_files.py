import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from megatron_dmtd.conversion.hf_files import read_hf_specs, read_hf_tensors, tokenizer_files, write_hf_directory
from megatron_dmtd.conversion.rules import TensorSpec
from megatron_dmtd.errors import ConversionError


def tensors():
    whole = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    first, second = whole.chunk(2)
    return {"a": first, "b": second, "c": torch.ones(3, dtype=torch.bfloat16)}


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    directory = tmp_path / "sharded"
    write_hf_directory(directory, fields={}, tensors=tensors(), shard_size="9KB")
    return directory


def test_what_is_written_is_read(sharded):
    assert len(list(sharded.glob("*.safetensors"))) == 2, "parts of one storage may lie in different shards"
    read = read_hf_tensors(sharded)
    assert sorted(read) == ["a", "b", "c"]
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors().items())


def test_specs_come_from_the_headers(sharded):
    specs = read_hf_specs(sharded)
    assert specs["a"] == TensorSpec((32, 64), torch.float32)
    assert specs["c"] == TensorSpec((3,), torch.bfloat16)


def test_a_cast_is_stated_in_the_config(tmp_path):
    write_hf_directory(tmp_path / "out", fields={"model_type": "x"}, tensors=tensors(), dtype=torch.bfloat16)
    assert {spec.dtype for spec in read_hf_specs(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "x", "torch_dtype": "bfloat16"}


def test_the_tokenizer_is_copied_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (source / name).write_text(name)
    write_hf_directory(tmp_path / "out", fields={}, tensors=tensors(), tokenizer_dir=source)
    assert [path.name for path in tokenizer_files(tmp_path / "out")] == ["tokenizer.json", "tokenizer_config.json"]
    assert not (tmp_path / "out/notes.txt").exists()


def test_a_used_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConversionError, match="not an empty directory"):
        write_hf_directory(tmp_path, fields={}, tensors=tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_hf_directory(tmp_path / "out", fields={"a": object()}, tensors=tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_shard_is_named(sharded):
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ConversionError, match=f"lacks {lost.name}"):
        read_hf_specs(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "one")
    save_file({"b": torch.zeros(1)}, tmp_path / "two")
    write_index(tmp_path, {"a": "one", "c": "two"})
    with pytest.raises(ConversionError) as caught:
        read_hf_specs(tmp_path)
    for fault in ("b is in 2 files", "c is not in two", "b of two is not in the index"):
        assert fault in caught.value.found


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ConversionError, match="no safetensors"):
        read_hf_specs(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ConversionError, match=r"but pytorch_model\.bin"):
        read_hf_specs(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConversionError, match=r"model\.safetensors"):
        read_hf_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConversionError, match="weight_map"):
        read_hf_tensors(tmp_path)


def test_a_type_that_we_do_not_know_is_named(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match="U16"):
        read_hf_specs(tmp_path)
