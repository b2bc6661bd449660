import pytest
import torch

from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.errors import CheckpointError, ConversionError
from megatron_dmtd.training.checkpoints.paths import find_step_directory
from megatron_dmtd.weights.streams import stream_checkpoint, stream_directory
from tests.support.hf_models import change_fields, random_hf_directory, small_model


@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_and_the_checkpoint_made_of_it_give_one_stream(tmp_path, tied):
    directory = random_hf_directory(tmp_path / "hf", small_model(tie_word_embeddings=tied))
    import_hf(directory, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    first = list(stream_directory(directory))
    for other in (stream_checkpoint(find_step_directory(tmp_path / "start")), stream_directory(tmp_path / "out")):
        second = list(other)
        assert [name for name, _ in first] == [name for name, _ in second]
        assert all(torch.equal(one, two) for (_, one), (_, two) in zip(first, second, strict=True))


def test_what_is_not_whole_is_refused_before_the_first_tensor(tmp_path):
    directory = random_hf_directory(tmp_path / "hf", small_model())
    import_hf(directory, tmp_path / "start")
    change_fields(directory, num_hidden_layers=3, layer_types=None)
    with pytest.raises(ConversionError, match="unknown"):
        stream_directory(directory)
    step = find_step_directory(tmp_path / "start")
    (step / "config.yaml").write_text((step / "config.yaml").read_text().replace("hidden_size: 32", "hidden_size: 64"))
    with pytest.raises(ConversionError, match="wrong shape"):
        stream_checkpoint(step)
    with pytest.raises(CheckpointError):
        stream_checkpoint(tmp_path / "nowhere")
