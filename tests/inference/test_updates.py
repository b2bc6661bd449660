"""New weights in a running engine give what a fresh engine on them gives.

Level: tokens equal, log probabilities to rounding. Their last bits may differ: MKL's products of one row depend on where the
operands lie in memory.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from megatron_dmtd.errors import CheckpointError, ConfigError
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams, score
from megatron_dmtd.weights.streams import stream_directory
from tests.hf.tiny import tiny_model, vanilla_decoder
from tests.inference.models import KINDS, SMALL

PROMPTS = [list(range(3, 3 + length)) for length in (40, 5, 21)]
TEXT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 1]
FORMS = {
    "float64": {"dtype": "float64"},
    "native": {"dtype": "float32"},
    "bfloat16 matrices": {"dtype": "float32", "matrix_dtype": "bfloat16"},
    "static shapes": {"dtype": "float32"},
}


def config_of(form: str) -> EngineConfig:
    return dataclasses.replace(SMALL, cuda_graphs="shapes") if form == "static shapes" else SMALL


def directories(folder, kind: str, **changes):
    """Two models of one shape; heads of 16, which the native kernels take."""
    sizes = {"head_dim": 16, **changes}
    source = tiny_model("causal-refresh" if kind == "vanilla" else kind, **sizes)
    found = []
    for name in ("old", "new"):
        with torch.no_grad():
            for index, weight in enumerate(source.parameters()):
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index), dtype=weight.dtype))
        (vanilla_decoder(source) if kind == "vanilla" else source).save_pretrained(folder / name)
        found.append(folder / name)
    return found


@dataclasses.dataclass
class Answers:
    tokens: list[tuple[int, ...]]
    logprobs: list[float]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answers)
        return self.tokens == other.tokens and self.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-5)


def answers(engine: Engine) -> Answers:
    engine.prefix_index.clear()
    completions = engine.generate(PROMPTS, max_new_tokens=12, params=SamplingParams(ignore_eos=True, logprobs=2))
    logprobs = [choice.logprob for one in completions for choice in one.logprobs]
    return Answers([one.token_ids for one in completions], [*logprobs, *score(engine, TEXT)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_updated_engine_is_a_fresh_one(tmp_path, kind, form):
    old, new = directories(tmp_path, kind)
    running, fresh = (Engine(path, config_of(form), device="cpu", **FORMS[form]) for path in (old, new))
    before, expected = answers(running), answers(fresh)
    assert before != expected and (form != "native" or not running.kernel_note)
    assert len(running.prefix_index) > 0
    assert running.update_weights(stream_directory(new)) == 1 == running.weights_version
    assert len(running.prefix_index) == 0
    assert answers(running) == expected
    running.check_integrity()
    running.update_weights(dict(stream_directory(old)))
    assert answers(running) == before


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_have_begun_go_on_as_a_fresh_engine_would(tmp_path, kind):
    old, new = directories(tmp_path, kind)
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    params = SamplingParams(ignore_eos=True)
    ids = [engine.submit(prompt, max_new_tokens=12, params=params) for prompt in PROMPTS]
    begun: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while min(len(tokens) for tokens in begun.values()) < 3:
        for event in engine.step():
            begun[event.request_id].append(event.token_id)
    engine.update_weights(stream_directory(new), version=7)
    done = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    fresh = Engine(new, SMALL, dtype="float64", device="cpu")
    for request_id, prompt in zip(ids, PROMPTS):
        first = begun[request_id]
        (rest,) = fresh.generate([[*prompt, *first]], max_new_tokens=12 - len(first), params=params)
        assert done[request_id].token_ids == (*first, *rest.token_ids)
        assert done[request_id].weights_versions == (0,) * len(first) + (7,) * (12 - len(first))
    engine.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_old_weights_computed_serves_nobody_else(tmp_path, kind):
    old, new = directories(tmp_path, kind)
    engine, fresh = Engine(old, SMALL, dtype="float64", device="cpu"), Engine(new, SMALL, dtype="float64", device="cpu")
    params = SamplingParams(ignore_eos=True)
    request_id = engine.submit(PROMPTS[0], max_new_tokens=40, params=params)
    for _ in range(8):
        engine.step()
    engine.update_weights(stream_directory(new), running="keep")
    while engine.has_work:
        kept = [event.completion for event in engine.step() if event.completion is not None]
    assert kept[0].request_id == request_id and set(kept[0].weights_versions) == {0, 1}
    assert len(engine.prefix_index) == 0, "nothing of the mixed request may be found by others"
    assert engine.generate([PROMPTS[0]], max_new_tokens=12, params=params)[0].token_ids == (
        fresh.generate([PROMPTS[0]], max_new_tokens=12, params=params)[0].token_ids
    )
    engine.check_integrity()


def broken(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "model.layers.2.mlp.down_proj.weight"
    if how == "missing":
        return {other: tensor for other, tensor in tensors.items() if other != name}
    if how == "unknown":
        return tensors | {"model.layers.9.mlp.down_proj.weight": tensors[name]}
    return tensors | {name: tensors[name][:, 1:]}


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("missing", "1 tensors missing, among them model.layers.2.mlp.down_proj.weight"),
        ("unknown", "model.layers.9.mlp.down_proj.weight, which the model has not"),
        ("shape", r"model.layers.2.mlp.down_proj.weight of shape \[32, 47\], where the model has \[32, 48\]"),
    ],
)
def test_other_weights_are_refused_and_a_mapping_changes_nothing(tmp_path, how, found):
    old, new = directories(tmp_path, "causal-refresh")
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    before, wrong = answers(engine), broken(load_file(new / "model.safetensors"), how)
    with pytest.raises(CheckpointError, match=found):
        engine.update_weights(wrong)
    assert answers(engine) == before and engine.weights_version == 0
    with pytest.raises(CheckpointError, match=found):
        engine.update_weights(iter(wrong.items()))
    with pytest.raises(CheckpointError, match="an update replaced only a part"):
        engine.generate([[1, 2]], max_new_tokens=1)
    engine.update_weights(stream_directory(old))
    assert answers(engine) == before


def test_a_tensor_that_comes_twice_is_refused(tmp_path):
    old, _ = directories(tmp_path, "vanilla")
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    (first, *rest) = stream_directory(old)
    with pytest.raises(CheckpointError, match=f"{first[0]} twice"):
        engine.update_weights([first, first, *rest])


def test_the_second_name_of_a_tied_head_is_passed_over(tmp_path):
    old, new = directories(tmp_path, "causal-norefresh", tie_word_embeddings=True)
    engine, fresh = (Engine(path, SMALL, dtype="float64", device="cpu") for path in (old, new))
    tensors = load_file(new / "model.safetensors")
    engine.update_weights(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert answers(engine) == answers(fresh)


def test_an_unknown_wish_for_running_requests_is_refused(tmp_path):
    old, new = directories(tmp_path, "vanilla")
    with pytest.raises(ConfigError, match="running='stop'"):
        Engine(old, SMALL, device="cpu").update_weights(stream_directory(new), running="stop")
