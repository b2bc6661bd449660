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


def broken(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor] | list:
    name = "model.layers.2.mlp.down_proj.weight"
    if how == "missing":
        return {other: tensor for other, tensor in tensors.items() if other != name}
    if how == "unknown":
        return tensors | {"model.layers.9.mlp.down_proj.weight": tensors[name]}
    if how == "type":
        return tensors | {name: tensors[name].long()}
    if how == "item":
        return [item if item[0] != name else name for item in tensors.items()]
    return tensors | {name: tensors[name][:, 1:]}


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("missing", "missing: model.layers.2.mlp.down_proj.weight"),
        ("unknown", "unknown: 'model.layers.9.mlp.down_proj.weight'"),
        ("shape", r"wrong shape: model.layers.2.mlp.down_proj.weight of shape \[32, 47\], where the model has \[32, 48\]"),
        ("type", "wrong type: model.layers.2.mlp.down_proj.weight of torch.int64"),
        ("item", "no pair of a name and a tensor: 'model.layers.2.mlp.down_proj.weight'; missing: model.layers.2"),
    ],
)
def test_other_weights_are_refused_and_the_old_ones_stay_in_force(tmp_path, how, found):
    old, new = directories(tmp_path, "causal-refresh")
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    before, wrong = answers(engine), broken(load_file(new / "model.safetensors"), how)
    for tensors in (wrong, iter(wrong.items())) if isinstance(wrong, dict) else (wrong, iter(wrong)):
        with pytest.raises(CheckpointError, match=found):
            engine.update_weights(tensors)
        assert len(engine.prefix_index) > 0 and engine.weights_version == 0
        assert answers(engine) == before
    left = iter(wrong.items() if isinstance(wrong, dict) else wrong)
    with pytest.raises(CheckpointError, match=found):
        engine.update_weights(left, staging=False)
    assert next(left, None) is None, "other ranks wait for the end of a stream"
    with pytest.raises(CheckpointError, match="an update replaced only a part"):
        engine.generate([[1, 2]], max_new_tokens=1)
    engine.update_weights(stream_directory(old))
    assert answers(engine) == before


def test_a_tensor_that_comes_twice_is_refused(tmp_path):
    old, _ = directories(tmp_path, "vanilla")
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    (first, *rest) = stream_directory(old)
    with pytest.raises(CheckpointError, match=f"twice: {first[0]}"):
        engine.update_weights([first, first, *rest])


def test_all_faults_are_named_in_one_error(tmp_path):
    old, _ = directories(tmp_path, "vanilla")
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    (first, second, third, *rest) = stream_directory(old)
    wrong = [first, first, ("extra", second[1]), (third[0], third[1][:1]), *rest]
    with pytest.raises(CheckpointError) as refused:
        engine.update_weights(wrong)
    for fault in (f"twice: {first[0]}", "unknown: 'extra'", f"wrong shape: {third[0]}", f"missing: {second[0]}"):
        assert fault in refused.value.found
    with pytest.raises(CheckpointError, match=r"missing: .*, .*, .* and \d+ more"):
        engine.update_weights([])


def test_a_stream_that_breaks_off_changes_nothing_unless_it_is_written_as_it_comes(tmp_path):
    old, new = directories(tmp_path, "bidirectional-refresh")
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    before = answers(engine)

    def breaking_off():
        yield from list(stream_directory(new))[:9]
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError):
        engine.update_weights(breaking_off())
    assert answers(engine) == before
    with pytest.raises(ConnectionError):
        engine.update_weights(breaking_off(), staging=False)
    with pytest.raises(CheckpointError, match=r"only a part \(ConnectionError: a rank is gone"):
        engine.step()


@pytest.mark.parametrize("staging", [True, False])
def test_every_weight_is_then_bit_for_bit_that_of_a_fresh_engine_in_the_memory_of_the_old_one(tmp_path, staging):
    """A stream may fill one buffer again and again."""
    old, new = directories(tmp_path, "bidirectional-norefresh", attention_bias=True)
    buffer = torch.empty(100_000, dtype=torch.float64)

    def through_one_buffer():
        for name, tensor in stream_directory(new):
            buffer[: tensor.numel()] = tensor.flatten()
            yield name, buffer[: tensor.numel()].view(tensor.shape)

    for options in ({"dtype": "float64"}, {"dtype": "float32", "matrix_dtype": "bfloat16"}, {"dtype": "bfloat16"}):
        engine, fresh = (Engine(path, SMALL, device="cpu", **options) for path in (old, new))
        addresses = [tensor.data_ptr() for tensor in weights_of(engine)]
        engine.update_weights(through_one_buffer(), staging=staging)
        assert len(addresses) == 2 + 4 * 10 and [tensor.data_ptr() for tensor in weights_of(engine)] == addresses
        assert all(torch.equal(one, other) for one, other in zip(weights_of(engine), weights_of(fresh)))


def weights_of(engine: Engine) -> list[torch.Tensor]:
    """Every tensor that a step multiplies with."""
    model = engine.model
    norms = [norm.weight for layer in model.layers for norm in (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)]
    linears = [linear for layer in model.layers for linear in layer.linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [model.embedding_VX, model.head.weight, *norms, *(linear.weight for linear in linears), *biases]


def test_a_tied_head_is_its_table_or_refused(tmp_path):
    old, new = directories(tmp_path, "causal-norefresh", tie_word_embeddings=True)
    engine = Engine(old, SMALL, dtype="float64", device="cpu")
    before, tensors = answers(engine), load_file(new / "model.safetensors")
    other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    for wrong in (other, iter(other.items())):
        with pytest.raises(CheckpointError, match="a tied head with other numbers than its table"):
            engine.update_weights(wrong)
        assert answers(engine) == before
    with pytest.raises(CheckpointError, match="a tied head with other numbers"):
        engine.update_weights(iter(other.items()), staging=False)


@pytest.mark.parametrize("staging", [True, False])
def test_the_second_name_of_a_tied_head_is_passed_over(tmp_path, staging):
    old, new = directories(tmp_path, "causal-norefresh", tie_word_embeddings=True)
    engine, fresh = (Engine(path, SMALL, dtype="float64", device="cpu") for path in (old, new))
    tensors = load_file(new / "model.safetensors")
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    engine.update_weights(iter(tensors.items()), staging=staging)
    assert answers(engine) == answers(fresh)


def test_an_unknown_wish_for_running_requests_is_refused(tmp_path):
    old, new = directories(tmp_path, "vanilla")
    with pytest.raises(ConfigError, match="running='stop'"):
        Engine(old, SMALL, device="cpu").update_weights(stream_directory(new), running="stop")
    with pytest.raises(ConfigError, match="version='2'"):
        Engine(old, SMALL, device="cpu").update_weights(stream_directory(new), version="2")
