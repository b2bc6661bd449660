"""Whole conversions: nothing is lost, and the model is the same on both sides."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.sources import open_source
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import CheckpointError, ConfigError, ConversionError
from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM
from megatron_dmtd.weights.checkpoint_files import saved_config
from megatron_dmtd.weights.safetensors_files import WeightFiles
from tests.families.dory_directories import DIALECTS, save_dory, tensors
from tests.support.hf_models import save_tokenizer
from tests.support.ranks import run_ranks

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
CYCLE = CycleConfig(variant="bidirectional-refresh", num_parallel_layers=2, mask_token_id=99)
# Two rows of two documents; every document fills whole cycles.
TOKENS_BN = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(0))
POSITIONS_BN = torch.tensor([[*range(8), *range(8)], [*range(4), *range(12)]])
DOCUMENT_LENGTHS = ((8, 8), (4, 12))


def save_dmtd(directory, variant: str, **changes) -> DMTDQwen3ForCausalLM:
    torch.manual_seed(5)
    history, block_attention = VARIANTS[variant]
    cycles = {"mtp_horizon": 4, "num_parallel_layers": 2, "num_sequential_layers": 2, "mask_token_id": 99}
    modes = {"dmtd_history_mode": history, "dmtd_block_attention": block_attention}
    model = DMTDQwen3ForCausalLM(DMTDQwen3Config(**SIZES | cycles | modes | changes)).eval()
    with torch.no_grad():  # norms of one would hide a norm that is mapped to another
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


def save_plain(directory, *, qk_norm: bool, tied: bool):
    torch.manual_seed(6)
    config, kind = (Qwen3Config, Qwen3ForCausalLM) if qk_norm else (LlamaConfig, LlamaForCausalLM)
    model = kind(config(**SIZES, tie_word_embeddings=tied)).eval()
    model.save_pretrained(directory)
    return model


def read_hf_tensors(directory) -> dict[str, torch.Tensor]:
    files = WeightFiles(directory)
    return {name: files.read(name) for name in files.specs}


def assert_same_tensors(first, second) -> None:
    tensors, others = read_hf_tensors(first), read_hf_tensors(second)
    assert sorted(tensors) == sorted(others)
    assert all(torch.equal(others[name], tensor) and others[name].dtype == tensor.dtype for name, tensor in tensors.items())


def megatron_logits(checkpoint: str, tokens_BN: torch.Tensor, start_from: str = "") -> torch.Tensor:
    """Logits of the model that the trainer builds and fills from a checkpoint, or from `start_from`. Runs on a rank."""
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.checkpoints.checkpoint import load_weights
    from megatron_dmtd.training.setup import build_run

    platform = prepare_megatron()
    config = saved_config(checkpoint)
    config = replace(config, data=replace(config.data, seq_length=16, pad_token_id=0))
    init_parallel(config, platform)
    run = build_run(config, platform)
    load_weights(run, start_from or checkpoint)
    with torch.no_grad():
        return run.model(tokens_BN, POSITIONS_BN, document_lengths=DOCUMENT_LENGTHS)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_an_imported_model_computes_what_the_hugging_face_model_computes(tmp_path, variant):
    """Level: fp32 tolerance; the two add up in another order. Largest difference seen 8e-7; swapped gate and up give 0.8."""
    theirs = save_dmtd(tmp_path / "hf", variant, tie_word_embeddings=variant.startswith("causal"))
    import_hf(tmp_path / "hf", tmp_path / "start")
    (logits_BNV,) = run_ranks(1, megatron_logits, str(tmp_path / "start"), TOKENS_BN)
    with torch.no_grad():
        expected_BNV = theirs(input_ids=TOKENS_BN, position_ids=POSITIONS_BN, use_cache=False).logits
    assert expected_BNV.std() > 0.5
    torch.testing.assert_close(logits_BNV, expected_BNV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_an_imported_plain_decoder_computes_what_transformers_computes(tmp_path, qk_norm):
    theirs = save_plain(tmp_path / "hf", qk_norm=qk_norm, tied=qk_norm)
    import_hf(tmp_path / "hf", tmp_path / "start")
    (logits_BNV,) = run_ranks(1, megatron_logits, str(tmp_path / "start"), TOKENS_BN)
    with torch.no_grad():
        documents = [theirs(TOKENS_BN[row : row + 1, part]).logits for row, part in ((0, slice(0, 8)), (1, slice(4, 16)))]
    torch.testing.assert_close(logits_BNV[:1, :8], documents[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_BNV[1:, 4:], documents[1], rtol=1e-5, atol=1e-5)
    (direct_BNV,) = run_ranks(1, megatron_logits, str(tmp_path / "start"), TOKENS_BN, str(tmp_path / "hf"))
    assert torch.equal(direct_BNV, logits_BNV), "a directory starts a run as its import does, bit for bit"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", ["causal-norefresh", "bidirectional-refresh"])
def test_a_dmtd_directory_comes_back_byte_for_byte(tmp_path, variant, tied):
    save_dmtd(tmp_path / "hf", variant, tie_word_embeddings=tied)
    first = import_hf(tmp_path / "hf", tmp_path / "start")
    second = export_hf(tmp_path / "start", tmp_path / "out")
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")
    assert (second.model, second.cycle) == (first.model, first.cycle) == (open_source(tmp_path / "hf").model, first.cycle)
    assert second.cycle.variant == variant
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(reloaded, DMTDQwen3ForCausalLM)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_directory_comes_back_byte_for_byte(tmp_path, qk_norm, tied):
    theirs = save_plain(tmp_path / "hf", qk_norm=qk_norm, tied=tied)
    assert import_hf(tmp_path / "hf", tmp_path / "start").cycle.is_vanilla
    export_hf(tmp_path / "start", tmp_path / "out")
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(reloaded) is type(theirs)
    with torch.no_grad():
        assert torch.equal(reloaded(TOKENS_BN).logits, theirs(TOKENS_BN).logits)


def test_a_plain_decoder_may_learn_cycles_and_go_back_to_vanilla(tmp_path):
    save_plain(tmp_path / "hf", qk_norm=True, tied=True)
    assert import_hf(tmp_path / "hf", tmp_path / "start", cycle=CYCLE).cycle == CYCLE
    assert export_hf(tmp_path / "start", tmp_path / "dmtd").cycle == CYCLE
    assert export_hf(tmp_path / "start", tmp_path / "vanilla", as_vanilla=True).cycle.is_vanilla
    assert json.loads((tmp_path / "vanilla/config.json").read_text())["model_type"] == "qwen3"
    for name in ("dmtd", "vanilla"):
        assert_same_tensors(tmp_path / "hf", tmp_path / name)


@pytest.mark.parametrize("as_vanilla", [True, False])
def test_an_export_may_be_cast(tmp_path, as_vanilla):
    save_dmtd(tmp_path / "hf", "causal-refresh")
    import_hf(tmp_path / "hf", tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out", dtype=torch.bfloat16, as_vanilla=as_vanilla)
    cast, full = read_hf_tensors(tmp_path / "out"), read_hf_tensors(tmp_path / "hf")
    assert all(torch.equal(cast[name], tensor.bfloat16()) for name, tensor in full.items())


@pytest.mark.parametrize("as_vanilla", [True, False])
def test_the_tokenizer_travels(tmp_path, as_vanilla):
    save_dmtd(tmp_path / "hf", "causal-refresh", vocab_size=300, mask_token_id=2)
    save_tokenizer(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "start")
    assert saved_config(tmp_path / "start").data.tokenizer == str(tmp_path / "hf")
    export_hf(tmp_path / "start", tmp_path / "out", as_vanilla=as_vanilla)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_a_tokenizer_that_is_gone_is_refused(tmp_path):
    save_dmtd(tmp_path / "hf", "causal-refresh")
    import_hf(tmp_path / "hf", tmp_path / "start")
    with pytest.raises(ConversionError, match="no tokenizer in"):
        export_hf(tmp_path / "start", tmp_path / "out", tokenizer_dir=tmp_path)
    assert not (tmp_path / "out").exists()


def test_cycles_of_a_dmtd_directory_cannot_be_replaced(tmp_path):
    save_dmtd(tmp_path / "hf", "causal-refresh")
    with pytest.raises(ConversionError, match="which has cycles"):
        import_hf(tmp_path / "hf", tmp_path / "start", cycle=CYCLE)


def test_cycles_that_do_not_fit_are_refused(tmp_path):
    save_plain(tmp_path / "hf", qk_norm=True, tied=True)
    with pytest.raises(ConfigError, match="4 parallel layers of 4"):
        import_hf(tmp_path / "hf", tmp_path / "start", cycle=CycleConfig(num_parallel_layers=4, mask_token_id=99))
    assert not (tmp_path / "start").exists()


def test_used_targets_are_refused_before_anything_is_read(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("keep")
    for convert in (import_hf, export_hf):
        with pytest.raises(ConversionError, match="not an empty directory"):
            convert(tmp_path / "no such source", tmp_path / "used")


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        open_source(tmp_path)
    save_plain(tmp_path / "hf", qk_norm=True, tied=True)
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(fields | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.3\."):
        open_source(tmp_path / "hf")


# Dory.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dory_directory_comes_back_with_every_tensor_and_described_in_both_dialects(tmp_path, dialect, dtype):
    weights = tensors(dtype=dtype)
    source = save_dory(tmp_path / "hf", dialect=dialect, weights=weights)
    import_hf(source, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "export")
    assert_same_tensors(source, tmp_path / "export")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    different = {name for name, value in DIALECTS["both"].items() if written[name] != value}
    assert different == {"swa_head_dim"}, "stated instead of null"


def test_transformers_loads_an_exported_dory_and_the_trainer_computes_the_same(tmp_path):
    """Level: transformers bitwise from both directories; Megatron within 3e-5 in fp32."""
    source = save_dory(tmp_path / "hf")
    import_hf(source, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "export")
    tokens_BN = TOKENS_BN[:, :8]
    first, second = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval() for path in (source, tmp_path / "export")
    )
    with torch.no_grad():
        expected_BNV, again_BNV = (
            model(tokens_BN, attention_mask=torch.ones_like(tokens_BN)).logits for model in (first, second)
        )
    assert torch.equal(expected_BNV, again_BNV) and expected_BNV.std() > 1
    (logits_BNV,) = run_ranks(1, megatron_logits, str(tmp_path / "start"), TOKENS_BN)
    torch.testing.assert_close(logits_BNV[:1, :8], expected_BNV[:1], rtol=3e-5, atol=3e-5)
    (direct_BNV,) = run_ranks(1, megatron_logits, str(tmp_path / "start"), TOKENS_BN, str(source))
    assert torch.equal(direct_BNV, logits_BNV)


def test_a_dory_directory_without_a_tensor_or_with_an_unknown_one_is_refused(tmp_path):
    weights = tensors()
    for name in ("backbone.layers.0.mixer.sqk", "lm_head.logit_scale", "backbone.layers.7.mlp_alpha"):
        missing = save_dory(tmp_path / name, weights={key: value for key, value in weights.items() if key != name})
        with pytest.raises(ConversionError, match=f"missing: {name}"):
            import_hf(missing, tmp_path / "start")
    unknown = save_dory(tmp_path / "unknown", weights=weights | {"backbone.layers.1.mixer.g_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ConversionError, match=r"unknown: backbone\.layers\.1\.mixer\.g_proj\.weight"):
        import_hf(unknown, tmp_path / "start")
    assert not (tmp_path / "start").exists()
