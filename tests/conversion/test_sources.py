import dataclasses
import json

import pytest
import torch

from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.sources import Checkpoint, HFDirectory, num_parameters, open_source, verified_meanwhile
from megatron_dmtd.errors import CheckpointError, ConversionError, ModelError
from megatron_dmtd.infra import checksums
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.weights.megatron_names import rules
from megatron_dmtd.weights.safetensors_files import WeightFiles, write_weights
from megatron_dmtd.weights.specs import spec_of
from tests.support.hf_models import change_fields, random_hf_directory, small_model


@pytest.fixture
def hf(tmp_path):
    return random_hf_directory(tmp_path / "hf", small_model())


def rewrite(directory, change):
    files = WeightFiles(directory)
    tensors = {name: files.read(name) for name in files.specs}
    change(tensors)
    write_weights(directory, {name: spec_of(tensor) for name, tensor in tensors.items()}, tensors.items())


def test_both_formats_give_the_same_tensors_by_the_same_names(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    first, second = open_source(hf), open_source(tmp_path / "start")
    assert isinstance(first, HFDirectory) and isinstance(second, Checkpoint)
    assert first.hf_specs() == second.hf_specs() and first.model == second.model
    names = []
    for rule in rules(first.description.decoder):
        for (name, tensor), (other_name, other) in zip(first.hf(rule), second.hf(rule), strict=True):
            assert name == other_name and torch.equal(tensor, other)
            names.append(name)
    assert names == list(first.hf_specs())
    assert num_parameters(second) - num_parameters(first) == 28 * 32  # 100 rows are padded to 128


def test_a_head_stored_with_the_table_that_it_is_tied_to_must_equal_it(hf, tmp_path):
    rewrite(hf, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" in open_source(hf).stored and "lm_head.weight" not in open_source(hf).hf_specs()
    import_hf(hf, tmp_path / "start")

    def spoil(tensors):
        tensors["lm_head.weight"][99, 31] += 1

    rewrite(hf, spoil)
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs"):
        import_hf(hf, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_configuration_that_contradicts_the_weights_is_refused_with_every_fault(hf, tmp_path):
    change_fields(hf, num_hidden_layers=3, intermediate_size=40, tie_word_embeddings=False)
    with pytest.raises(ConversionError) as caught:
        import_hf(hf, tmp_path / "start")
    assert caught.value.found.startswith(f"{1 + 3 * 3 + 11} fault(s)")
    for fault in (
        "missing: lm_head.weight [100, 32]",
        "wrong shape: model.layers.0.mlp.up_proj.weight is [48, 32], not [40, 32]",
    ):
        assert fault in caught.value.found
    assert caught.value.found.count("unknown: model.layers.3.") == 11
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


DAMAGED = r"__3_0\.distcp .* is not what was written"


def flip_a_bit(path):
    """Inside the file's largest part, a tensor's numbers: nothing but a checksum would notice."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__3_0.distcp", ".metadata", "config.yaml"])
def test_a_flipped_bit_of_any_file_is_refused_by_name_when_a_checkpoint_is_opened(hf, tmp_path, name):
    import_hf(hf, tmp_path / "start")
    flip_a_bit(tmp_path / "start" / name)
    with pytest.raises(CheckpointError, match=rf"{name} \(\d+ bytes\) is not what was written"):
        open_source(tmp_path / "start")


def test_an_import_may_lack_checksums_and_a_runs_step_may_not(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    (tmp_path / "start" / paths.CHECKSUMS_FILE).unlink()
    flip_a_bit(tmp_path / "start" / "__3_0.distcp")
    open_source(tmp_path / "start")
    step = (tmp_path / "start").rename(tmp_path / paths.step_directory_name(5))
    with pytest.raises(CheckpointError, match=r"no checksums\.sha256"):
        open_source(step)
    open_source(step, verify=False)


def test_an_import_records_every_file_that_it_writes(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    recorded = checksums.read_checksums(tmp_path / "start", paths.DAMAGED)
    files = {path.name for path in (tmp_path / "start").iterdir()} - {paths.CHECKSUMS_FILE}
    assert set(recorded) == files and sum(name.endswith(".distcp") for name in files) == 7
    checksums.verify(tmp_path / "start", paths.DAMAGED)


def test_what_is_neither_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="is not a JSON object"):
        open_source(tmp_path)


def test_weights_are_compared_during_the_work_and_everything_else_before_it(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    with verified_meanwhile(tmp_path / "start") as (checkpoint, wait_for_verdict):
        assert checkpoint.stored
        wait_for_verdict()
    flip_a_bit(tmp_path / "start" / "__3_0.distcp")
    with verified_meanwhile(tmp_path / "start", verify=False) as (_, wait_for_verdict):
        wait_for_verdict()
    with pytest.raises(CheckpointError, match=DAMAGED), verified_meanwhile(tmp_path / "start") as (_, wait_for_verdict):
        wait_for_verdict()
    unreadable = CheckpointError(found="bytes that make no tensor", required="a tensor", remedy="none")
    with pytest.raises(CheckpointError, match=DAMAGED), verified_meanwhile(tmp_path / "start"):
        raise unreadable
    with pytest.raises(ValueError, match="something else"), verified_meanwhile(tmp_path / "start"):
        raise ValueError("something else")
    flip_a_bit(tmp_path / "start" / "config.yaml")
    with pytest.raises(CheckpointError, match=r"config\.yaml .* is not what was written"), verified_meanwhile(tmp_path / "start"):
        pytest.fail("the configuration was read before it was compared")


def test_damaged_weights_are_never_exported(hf, tmp_path):
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "whole")
    table = tmp_path / "start" / "__1_0.distcp"  # a single tensor, so that the file's middle is one of its numbers
    flip_a_bit(table)
    export_hf(tmp_path / "start", tmp_path / "unverified", verify=False)  # nothing but a checksum notices
    with pytest.raises(CheckpointError, match=rf"{table.name} .* is not what was written"):
        export_hf(tmp_path / "start", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "start", "unverified", "whole"]


def test_layers_share_room_and_two_of_them_hold_at_a_time(tmp_path):
    """The padded table has the shape of gate and up here, and must not share theirs."""
    model = dataclasses.replace(small_model(), num_layers=4, intermediate_size=64)
    source = HFDirectory(random_hf_directory(tmp_path / "hf", model))
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(4)]
    first, second = source.megatron(names[0]), source.megatron(names[1])
    table = source.megatron("embedding.word_embeddings.weight")
    assert table.shape == first.shape
    kept = [tensor.clone() for tensor in (first, second, table)]
    assert source.megatron("embedding.word_embeddings.weight").data_ptr() not in {tensor.data_ptr() for tensor in (first, second)}
    assert all(torch.equal(now, then) for now, then in zip((first, second, table), kept, strict=True))
    assert source.megatron(names[2]).data_ptr() == first.data_ptr() and source.megatron(names[3]).data_ptr() == second.data_ptr()
    assert torch.equal(source.megatron(names[0]), kept[0])
