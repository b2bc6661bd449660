"""The oracle agrees with itself: two statements of the method, written apart, give the same numbers; its caches obey the text."""

import dataclasses

import pytest
import torch
import transformers

from tests.oracles.parallel_dmtd import (
    FOUR_VARIANTS,
    CycledTrace,
    Shape,
    cycled_decode,
    cycled_greedy,
    parallel_hidden,
    query_key_value,
    random_weights,
    shadow_document,
    teacher_forced_logits,
    vanilla_logits,
)

SHAPE = Shape(num_layers=4, num_parallel_layers=2, hidden_size=16, intermediate_size=24, head_dim=4)
LLAMA_LIKE = Shape(
    num_layers=3,
    num_parallel_layers=2,
    hidden_size=16,
    intermediate_size=24,
    head_dim=4,
    qk_norm=False,
    tie_word_embeddings=False,
    cycle_length=3,
    mask_token_id=7,
)
#: Biases, windows narrower and wider than a cycle, one layer without a window, and rotary frequencies of its own.
WITH_PARTS = Shape(
    num_layers=5,
    num_parallel_layers=3,
    hidden_size=16,
    intermediate_size=24,
    head_dim=4,
    qk_norm=False,
    qkv_bias=True,
    output_bias=True,
    windows=(3, None, 6, 5, None),
    frequencies=(0.7, 0.02),
    rope_factor=1.2,
)
TOKENS = [11, 4, 59, 23, 8, 8, 42, 17, 30, 5, 51, 2, 36, 19]
VARIANT_IDS = [f"{block}-{history}" for history, block in FOUR_VARIANTS]
each_variant = pytest.mark.parametrize(("history", "block_attention"), FOUR_VARIANTS, ids=VARIANT_IDS)


def decode(shape: Shape, history: str, block_attention: str, token_ids: list[int], prompt_length: int) -> CycledTrace:
    weights = random_weights(shape, seed=3)
    return cycled_decode(
        weights, shape, history=history, block_attention=block_attention, token_ids=token_ids, prompt_length=prompt_length
    )


@each_variant
@pytest.mark.parametrize("shape", [SHAPE, LLAMA_LIKE, WITH_PARTS], ids=["qwen3", "llama", "parts"])
def test_decoding_gives_the_logits_of_the_training_forward_from_every_prompt_length(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    trained = teacher_forced_logits(weights, shape, history=history, block_attention=block_attention, token_ids=TOKENS)
    assert trained.shape == (14, 61) and trained.std() > 1
    prompt_lengths = range(1, 2 * shape.cycle_length + 2)
    assert {length % shape.cycle_length for length in prompt_lengths} == set(range(shape.cycle_length))
    for prompt_length in [*prompt_lengths, len(TOKENS)]:
        trace = decode(shape, history, block_attention, TOKENS, prompt_length)
        assert trace.first_position == prompt_length - 1
        assert trace.logits.shape == (len(TOKENS) - prompt_length + 1, 61)
        torch.testing.assert_close(trace.logits, trained[prompt_length - 1 :], rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ["qkv_bias", "output_bias", "windows", "frequencies", "rope_factor"])
@each_variant
def test_every_part_changes_the_logits(part, history, block_attention):
    kind = {"history": history, "block_attention": block_attention, "token_ids": TOKENS}
    weights = random_weights(WITH_PARTS, seed=3)
    with_it = teacher_forced_logits(weights, WITH_PARTS, **kind)
    without = dataclasses.replace(WITH_PARTS, **{part: getattr(SHAPE, part)})
    dropped = {"qkv_bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"), "output_bias": ("o_proj.bias",)}.get(part, ("none",))
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(dropped)}
    assert (teacher_forced_logits(kept, without, **kind) - with_it).abs().max() > 0.1


def test_the_four_variants_and_the_vanilla_model_give_different_logits():
    weights = random_weights(SHAPE, seed=3)
    results = [
        teacher_forced_logits(weights, SHAPE, history=history, block_attention=block, token_ids=TOKENS)
        for history, block in FOUR_VARIANTS
    ]
    results.append(vanilla_logits(weights, SHAPE, TOKENS))
    for i, one in enumerate(results):
        for other in results[:i]:
            assert (one - other).abs().max() > 0.1


def test_histories_agree_inside_the_first_cycle_and_part_after_it():
    weights = random_weights(SHAPE, seed=3)
    for block in ("causal", "bidirectional"):
        shadow, real = (
            parallel_hidden(weights, SHAPE, history=history, block_attention=block, token_ids=TOKENS)
            for history in ("shadow", "real")
        )
        torch.testing.assert_close(shadow[:4], real[:4], rtol=0, atol=1e-12)
        assert (shadow[4:] - real[4:]).abs().amin(dim=1).max() > 1e-3


@each_variant
def test_a_later_token_changes_no_earlier_logit(history, block_attention):
    weights = random_weights(SHAPE, seed=3)
    logits = []
    for token in (42, 43):
        token_ids = [*TOKENS[:6], token, *TOKENS[7:]]
        logits.append(
            teacher_forced_logits(weights, SHAPE, history=history, block_attention=block_attention, token_ids=token_ids)
        )
    assert torch.equal(logits[0][:6], logits[1][:6])
    assert (logits[0][6] - logits[1][6]).abs().max() > 0.1


@each_variant
def test_a_document_that_ends_inside_a_cycle_needs_its_whole_block_when_blocks_are_bidirectional(history, block_attention):
    weights = random_weights(SHAPE, seed=3)
    assert len(TOKENS) % SHAPE.cycle_length == 2
    whole, short = (
        teacher_forced_logits(
            weights,
            SHAPE,
            history=history,
            block_attention=block_attention,
            token_ids=TOKENS,
            complete_last_cycle=complete,
        )
        for complete in (True, False)
    )
    torch.testing.assert_close(whole[:12], short[:12], rtol=0, atol=1e-12)
    if block_attention == "bidirectional":
        assert (whole[12:] - short[12:]).abs().max() > 0.1
    else:
        torch.testing.assert_close(whole[12:], short[12:], rtol=0, atol=1e-12)


def test_shadow_document_keeps_heads_and_completes_the_last_cycle():
    assert shadow_document(SHAPE, TOKENS[:6]) == [11, 60, 60, 60, 8, 60, 60, 60]
    assert shadow_document(SHAPE, TOKENS[:6], complete_last_cycle=False) == [11, 60, 60, 60, 8, 60]
    assert shadow_document(SHAPE, TOKENS[:8]) == [11, 60, 60, 60, 8, 60, 60, 60]


@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_refresh_keeps_real_entries_of_earlier_cycles_only(block_attention):
    trace = decode(SHAPE, "real", block_attention, TOKENS, 6)
    assert [snapshot.cycle for snapshot in trace.snapshots] == [1, 2, 3]
    for snapshot in trace.snapshots:
        assert set(snapshot.parallel) == {0, 1}
        for cache in snapshot.parallel.values():
            assert cache.positions == tuple(range(4 * snapshot.cycle))
            assert set(cache.kinds) == {"real"}
            assert cache.keys.shape == cache.values.shape == (4 * snapshot.cycle, 2, 4)


@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_norefresh_keeps_the_shadow_entries_of_every_cycle_and_of_the_current_block(block_attention):
    trace = decode(SHAPE, "shadow", block_attention, TOKENS, 6)
    assert [snapshot.cycle for snapshot in trace.snapshots] == [1, 2, 3]
    for snapshot in trace.snapshots:
        for cache in snapshot.parallel.values():
            assert cache.positions == tuple(range(4 * snapshot.cycle + 4))
            assert set(cache.kinds) == {"shadow"}


@each_variant
def test_sequential_caches_are_dense_and_real_and_count_the_tokens(history, block_attention):
    trace = decode(SHAPE, history, block_attention, TOKENS, 6)
    lengths = []
    for snapshot in trace.snapshots:
        assert set(snapshot.sequential) == {2, 3}
        for cache in snapshot.sequential.values():
            assert set(cache.kinds) == {"real"}
            lengths.append(len(cache.positions))
    assert lengths == [8, 8, 12, 12, 14, 14]


@each_variant
def test_caches_are_appended_to_and_never_rewritten(history, block_attention):
    trace = decode(SHAPE, history, block_attention, TOKENS, 1)
    assert len(trace.snapshots) == 4
    for earlier, later in zip(trace.snapshots[:-1], trace.snapshots[1:], strict=True):
        for before, after in ((earlier.parallel, later.parallel), (earlier.sequential, later.sequential)):
            for layer, cache in before.items():
                assert torch.equal(after[layer].keys[: len(cache.positions)], cache.keys)
                assert torch.equal(after[layer].values[: len(cache.positions)], cache.values)


@each_variant
def test_the_prompt_boundary_leaves_no_trace_in_the_caches(history, block_attention):
    one = decode(SHAPE, history, block_attention, TOKENS, 1).snapshots[-1]
    other = decode(SHAPE, history, block_attention, TOKENS, 12).snapshots[-1]
    assert one.cycle == other.cycle == 3
    for layer in one.parallel:
        torch.testing.assert_close(one.parallel[layer].keys, other.parallel[layer].keys, rtol=0, atol=1e-12)
    for layer in one.sequential:
        torch.testing.assert_close(one.sequential[layer].values, other.sequential[layer].values, rtol=0, atol=1e-12)


def test_first_layer_caches_hold_the_tokens_of_their_kind():
    weights = random_weights(SHAPE, seed=3)
    embeddings = weights["model.embed_tokens.weight"]
    for history, ids in (("real", TOKENS[:12]), ("shadow", shadow_document(SHAPE, TOKENS))):
        cache = decode(SHAPE, history, "bidirectional", TOKENS, 1).snapshots[-1].parallel[0]
        assert len(cache.positions) == len(ids)
        for position, token in enumerate(ids):
            _, key, value = query_key_value(weights, SHAPE, 0, embeddings[token], position)
            assert torch.equal(cache.keys[position], key) and torch.equal(cache.values[position], value)


@each_variant
def test_greedy_decoding_picks_the_training_forwards_best_token_at_each_step(history, block_attention):
    weights = random_weights(SHAPE, seed=3)
    new_ids = cycled_greedy(
        weights, SHAPE, history=history, block_attention=block_attention, prompt_ids=TOKENS[:5], max_new_tokens=6
    )
    assert len(new_ids) == 6
    token_ids = [*TOKENS[:5], *new_ids]
    logits = teacher_forced_logits(weights, SHAPE, history=history, block_attention=block_attention, token_ids=token_ids)
    assert logits[4:10].argmax(dim=1).tolist() == new_ids


@pytest.mark.parametrize(
    ("family", "shape", "fields"),
    [
        ("Qwen3", SHAPE, {}),
        ("Llama", LLAMA_LIKE, {}),
        ("Llama", dataclasses.replace(LLAMA_LIKE, qkv_bias=True, output_bias=True), {"attention_bias": True}),
        ("Qwen2", dataclasses.replace(LLAMA_LIKE, qkv_bias=True), {}),
        (
            "Qwen2",
            dataclasses.replace(LLAMA_LIKE, qkv_bias=True, windows=(None, 5, 5)),
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ),
        ("Mistral", dataclasses.replace(LLAMA_LIKE, windows=(5,) * 3), {"sliding_window": 5}),
    ],
    ids=["qwen3", "llama", "llama-biases", "qwen2", "qwen2-windows", "mistral"],
)
def test_vanilla_logits_are_those_of_the_published_decoders(family, shape, fields):
    """The arithmetic of one layer is anchored to code that knows nothing of this method."""
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_word_embeddings,
        attn_implementation="eager",
        **fields,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    weights = random_weights(shape, seed=3)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        published = model(torch.tensor([TOKENS])).logits[0]
    # The published model keeps its rotary table and softmax in float32.
    torch.testing.assert_close(vanilla_logits(weights, shape, TOKENS), published.double(), rtol=0, atol=2e-5)
