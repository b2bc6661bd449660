"""Our reader and writer against Megatron's own, with the real model on two ranks."""

import functools
import io
import json
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.errors import CheckpointError, ConversionError
from megatron_dmtd.weights.checkpoint_files import saved_config
from megatron_dmtd.weights.megatron_names import rules
from megatron_dmtd.weights.specs import spec_of
from megatron_dmtd.weights.torch_dist import CheckpointTensors, _mapped
from megatron_dmtd.weights.torch_dist import write_model_checkpoint as write_lazily
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings


def megatron_tensors(config: Config, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        rule.megatron_name: torch.randn(rule.megatron_shapes[0], generator=generator).to(dtype)
        for rule in rules(decoder_of(config.model))
    }


def write_model_checkpoint(directory, tensors: dict[str, torch.Tensor], config: Config, **options) -> None:
    write_lazily(directory, {name: spec_of(tensor) for name, tensor in tensors.items()}, tensors.__getitem__, config, **options)


def read_model_tensors(directory) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointTensors(directory)
    return {name: checkpoint.read(name) for name in checkpoint.specs}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different and all(found[name].dtype == tensor.dtype for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("form", ["whole", "transposed", "part of its storage", "one number", "scalar"])
def test_a_mapped_tensor_is_the_one_that_torch_loads(form, dtype, tmp_path):
    """The fast path and the slow one, bit for bit: three tensors in one file, the middle one read."""
    numbers = torch.arange(60).reshape(5, 12).to(dtype)
    forms = {"whole": numbers, "transposed": numbers.T, "part of its storage": numbers[2:4]}
    forms |= {"one number": numbers[3:4, 5:6].clone(), "scalar": numbers[1, 1].clone()}
    path = tmp_path / "file"
    with open(path, "wb") as file:
        spans = []
        for tensor in (-numbers, forms[form], 2 * numbers):
            start = file.tell()
            torch.save(tensor, file)
            spans.append((start, file.tell() - start))
    offset, length = spans[1]
    slow = torch.load(io.BytesIO(path.read_bytes()[offset : offset + length]), weights_only=True)
    fast = _mapped(path, offset, length)
    assert (fast.shape, fast.dtype) == (slow.shape, slow.dtype) and torch.equal(fast, slow)
    before = path.read_bytes()
    fast += 1
    assert path.read_bytes() == before, "the file is never written to"


# --- on ranks ---------------------------------------------------------------------------------------------------------------


def save_with_megatron(config: Config, directory: str) -> dict[str, torch.Tensor]:
    """A checkpoint of fresh weights by the trainer; returns this rank's parameters by their global names."""
    from megatron_dmtd.models.initialization import global_name
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.checkpoints.checkpoint import save_checkpoint
    from megatron_dmtd.training.setup import build_run

    platform = prepare_megatron()
    init_parallel(config, platform)
    run = build_run(config, platform)
    run.optimizer.zero_grad()
    run.optimizer.step()  # the optimizer's state, which the file also holds, begins with its first step
    save_checkpoint(run, directory)
    return {global_name(name, run.model): parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def load_with_megatron(config: Config, directory: str) -> dict[str, torch.Tensor]:
    """The parameters of this rank after `checkpoint.init_from`."""
    from megatron_dmtd.models.initialization import global_name
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.checkpoints.checkpoint import load_weights
    from megatron_dmtd.training.setup import build_run

    platform = prepare_megatron()
    init_parallel(config, platform)
    run = build_run(config, platform)
    load_weights(run, directory)
    return {global_name(name, run.model): parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def in_one_piece(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """What tensor-parallel ranks hold, as a whole. Written apart from the library: each rank has its half of gate and of up."""
    if name.endswith("linear_fc1.weight"):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(parts, dim=1)
    return parts[0] if parts[0].dim() == 1 else torch.cat(parts)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("tied", "tensor", "pipeline"), [(True, 2, 1), (False, 1, 2)])
def test_reads_what_the_trainer_saves(tmp_path, tied, tensor, pipeline):
    layout = {"tensor": tensor, "pipeline": pipeline}
    config = tiny_config("causal-refresh", model={"tie_word_embeddings": tied}, parallel=layout)
    ranks = run_ranks(2, save_with_megatron, config, str(tmp_path / "run"))
    found = read_model_tensors(tmp_path / "run" / "step_00000000")
    expected_names = sorted(rule.megatron_name for rule in rules(decoder_of(config.model)))
    assert sorted(found) == expected_names
    if tensor == 2:
        expected = {name: in_one_piece(name, [rank[name] for rank in ranks]) for name in ranks[0]}
    else:
        expected = functools.reduce(lambda first, second: first | second, ranks)
        expected = {name: expected[name] for name in expected_names}
    assert_same(found, expected)
    assert CheckpointTensors(tmp_path / "run" / "step_00000000").specs == {name: spec_of(part) for name, part in found.items()}
    assert saved_config(tmp_path / "run" / "step_00000000") == config


@pytest.mark.multiprocess
@pytest.mark.parametrize(("tied", "tensor", "pipeline"), [(True, 2, 1), (False, 1, 2)])
def test_the_trainer_loads_what_we_write(tmp_path, tied, tensor, pipeline):
    layout = {"tensor": tensor, "pipeline": pipeline}
    config = tiny_config("causal-refresh", model={"tie_word_embeddings": tied}, parallel=layout)
    expected = megatron_tensors(config)
    write_model_checkpoint(tmp_path / "start", expected, config)
    ranks = run_ranks(2, load_with_megatron, config, str(tmp_path / "start"))
    if tensor == 2:
        found = {name: in_one_piece(name, [rank[name] for rank in ranks]) for name in ranks[0]}
    else:
        assert ranks[0].keys() & ranks[1].keys() <= {"embedding.word_embeddings.weight"}
        found = ranks[0] | ranks[1]
    assert_same(found, expected)


def save_interleaved(config: Config, directory: str) -> None:
    """What Megatron's own library writes where this rank holds every second layer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron would spawn the process that holds this queue, which imports the test program and Megatron again.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    rank, num_layers = torch.distributed.get_rank(), config.model.num_layers
    state = {}
    for name, tensor in megatron_tensors(config).items():
        if not name.startswith("decoder.layers."):
            state[name] = ShardedTensor.from_rank_offsets(name, tensor, replica_id=rank)
            continue
        layer, suffix = name.removeprefix("decoder.layers.").split(".", 1)
        if int(layer) % 2 == rank:
            key = f"decoder.layers.{suffix}"
            state[name] = ShardedTensor.from_rank_offsets(key, tensor, (0, int(layer), num_layers), prepend_axis_num=1)
    if rank == 0:
        Path(directory).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state, directory)


# --- in one process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_what_it_writes(tmp_path, dtype):
    config = tiny_config()
    write_model_checkpoint(tmp_path / "a" / "b", megatron_tensors(config, dtype), config)
    assert_same(read_model_tensors(tmp_path / "a" / "b"), megatron_tensors(config, dtype))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_tensors_are_written_in_their_turn_where_there_is_a_gpu(tmp_path, monkeypatch):
    """There torch's writer would copy ahead, small tensors first, on a stream of the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = tiny_config()
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    monkeypatch.undo()
    assert_same(read_model_tensors(tmp_path / "start"), megatron_tensors(config))


def test_megatron_recognises_the_format(tmp_path):
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron.core.dist_checkpointing import check_is_distributed_checkpoint

    config = tiny_config()
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    assert check_is_distributed_checkpoint(str(tmp_path / "start"))


def test_tensors_that_are_not_the_model_are_not_written(tmp_path):
    config = tiny_config()
    tensors = megatron_tensors(config)
    del tensors["decoder.layers.2.mlp.linear_fc2.weight"]
    with pytest.raises(ConversionError, match=r"missing: decoder\.layers\.2\.mlp\.linear_fc2"):
        write_model_checkpoint(tmp_path / "start", tensors, config)
    assert list(tmp_path.iterdir()) == []


def test_layers_of_two_types_are_refused(tmp_path):
    config = tiny_config()
    tensors = megatron_tensors(config)
    tensors["decoder.layers.1.input_layernorm.weight"] = tensors["decoder.layers.1.input_layernorm.weight"].bfloat16()
    with pytest.raises(ConversionError, match=r"input_layernorm\.weight mixes torch\.bfloat16 and"):
        write_model_checkpoint(tmp_path / "start", tensors, config)


def test_a_used_directory_is_refused(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConversionError, match="not an empty directory"):
        write_model_checkpoint(tmp_path, megatron_tensors(tiny_config()), tiny_config())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("damage", ["cut data", "lost data", "cut metadata", "lost metadata"])
def test_a_damaged_checkpoint_is_refused_before_a_tensor_is_read(tmp_path, damage):
    config = tiny_config()
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    victim = tmp_path / "start" / (".metadata" if "metadata" in damage else "__2_0.distcp")
    if damage.startswith("lost"):
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        CheckpointTensors(tmp_path / "start")
    assert "metadata" in damage or "__2_0.distcp " in caught.value.found


def test_a_piece_that_no_rank_wrote_is_noticed(tmp_path):
    config = tiny_config()
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    path = tmp_path / "start" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"mlp\.linear_fc2\.weight has 4,608 of 6,144 numbers"):
        CheckpointTensors(tmp_path / "start")


def test_scrambled_bytes_of_a_tensor_are_refused_when_they_are_read(tmp_path):
    config = tiny_config()
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    victim = tmp_path / "start" / "__2_0.distcp"
    victim.write_bytes(bytes(victim.stat().st_size))
    checkpoint = CheckpointTensors(tmp_path / "start")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read("decoder.layers.0.mlp.linear_fc1.weight")


@pytest.mark.multiprocess
def test_layers_in_any_order_over_ranks_are_read(tmp_path):
    """Interleaved (virtual) pipeline stages: rank 0 holds layers 0 and 2, rank 1 layers 1 and 3."""
    config = tiny_config()
    run_ranks(2, save_interleaved, config, str(tmp_path / "run"))
    assert_same(read_model_tensors(tmp_path / "run"), megatron_tensors(config))


def test_tensors_are_fetched_one_at_a_time_and_the_files_are_those_of_a_layer(tmp_path):
    config = tiny_config()
    tensors, fetched = megatron_tensors(config), []

    def read(name: str) -> torch.Tensor:
        fetched.append(name)
        return tensors[name]

    write_lazily(tmp_path / "start", {name: spec_of(tensor) for name, tensor in tensors.items()}, read, config)
    assert fetched == list(tensors)
    files = sorted(path.name for path in (tmp_path / "start").glob("*.distcp"))
    assert files == [f"__{number}_0.distcp" for number in range(7)]  # objects, embedding, four layers, final norm


def test_a_checkpoint_without_its_configuration_is_refused(tmp_path):
    config = with_settings(tiny_config(), training={"steps": 7})
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    assert saved_config(tmp_path / "start") == config
    (tmp_path / "start" / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        saved_config(tmp_path / "start")


def test_the_metadata_names_the_format(tmp_path):
    config = tiny_config()
    write_model_checkpoint(tmp_path / "start", megatron_tensors(config), config)
    assert json.loads((tmp_path / "start" / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
