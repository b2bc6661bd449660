import itertools

import pytest
import torch
from transformers import DynamicCache

from megatron_dmtd.hf import DMTDQwen3ForCausalLM
from tests.hf.tiny import NAMES, decoded_logits, each_variant, random_ids, tiny_model, vanilla_decoder

CYCLE = 4


@each_variant
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-3)], ids=["fp64", "fp32"])
def test_teacher_forced_logits_are_those_of_cycled_decoding_from_every_prompt_length(variant, dtype, tolerance):
    model, ids = tiny_model(variant, dtype=dtype), random_ids(1, 15)
    with torch.no_grad():
        forced = model(ids).logits
    assert forced.shape == (1, 15, 61) and forced.std() > 1
    for prompt_length in range(1, 2 * CYCLE + 2):
        torch.testing.assert_close(decoded_logits(model, ids, prompt_length), forced, rtol=0, atol=tolerance)


@each_variant
@pytest.mark.parametrize("cycle_length", [1, 2, 3, 5])
def test_other_cycle_lengths_decode_as_trained(variant, cycle_length):
    model, ids = tiny_model(variant, mtp_horizon=cycle_length), random_ids(1, 11)
    forced = model(ids).logits
    assert forced.std() > 1
    torch.testing.assert_close(decoded_logits(model, ids, 4), forced, rtol=0, atol=1e-11)


@each_variant
def test_several_columns_can_follow_a_cache_at_once(variant):
    model, ids = tiny_model(variant), random_ids(2, 13)
    prompt = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], cache=prompt.cache)
    torch.testing.assert_close(rest.logits, model(ids).logits[:, 5:], rtol=0, atol=1e-11)


def test_the_four_variants_differ_where_the_specification_says_so():
    ids = random_ids(1, 12)
    logits = {variant: tiny_model(variant)(ids).logits[0] for variant in NAMES}
    for one, other in itertools.combinations(NAMES, 2):
        assert (logits[one] - logits[other]).abs().max() > 0.1
    # In the first cycle there is no history, so refresh changes nothing there.
    for block in ("causal", "bidirectional"):
        same = (logits[f"{block}-refresh"] - logits[f"{block}-norefresh"]).abs().amax(dim=1)
        assert same[:CYCLE].max() < 1e-12 and same[CYCLE:].min() > 1e-3


@each_variant
def test_changing_a_token_changes_no_earlier_logits(variant):
    model, ids = tiny_model(variant), random_ids(1, 11)
    logits = model(ids).logits
    for changed in range(11):
        other = ids.clone()
        other[0, changed] = (other[0, changed] + 1) % 60
        difference = (model(other).logits - logits)[0].abs().amax(dim=1)
        assert difference[:changed].sum() < 1e-11
        assert difference[changed] > 1e-3


@each_variant
def test_later_shadow_states_read_earlier_non_head_tokens_exactly_where_history_is_real(variant):
    model, ids = tiny_model(variant), random_ids(1, 10)

    def current_cycle(tokens):
        return model(tokens, use_cache=True).cache.shadow_hidden_BCX

    def change(column):
        other = ids.clone()
        other[0, column] = (other[0, column] + 1) % 60
        return (current_cycle(other) - current_cycle(ids)).abs().max()

    assert current_cycle(ids).shape == (1, 4, 32)
    assert change(4) > 1e-3 and change(8) > 1e-3  # heads
    assert change(9) < 1e-12  # not the head of its own cycle
    assert change(5) > 1e-3 if variant.endswith("-refresh") else change(5) < 1e-12


@each_variant
def test_left_padded_rows_equal_rows_alone(variant):
    model = tiny_model(variant)
    rows = [random_ids(1, length, seed=length) for length in (2, 9, 4, 12)]
    ids = torch.cat([torch.nn.functional.pad(row, (12 - row.shape[1], 0), value=17) for row in rows])
    mask = torch.tensor([[0] * (12 - row.shape[1]) + [1] * row.shape[1] for row in rows])
    logits = model(ids, attention_mask=mask).logits
    for index, row in enumerate(rows):
        torch.testing.assert_close(logits[index, -row.shape[1] :], model(row).logits[0], rtol=0, atol=1e-11)
        assert (logits[index, : -row.shape[1]] == 0).all()


@each_variant
def test_left_padded_rows_decode_as_rows_alone_though_their_phases_differ(variant):
    model = tiny_model(variant)
    prompts = (2, 9, 4, 5)
    rows = [random_ids(1, length + 7, seed=length) for length in prompts]
    widest = max(prompts)
    ids = torch.cat([torch.nn.functional.pad(row, (widest + 7 - row.shape[1], 0)) for row in rows])
    mask = (torch.arange(widest + 7) >= widest - torch.tensor(prompts)[:, None]).long()
    output = model(ids[:, :widest], attention_mask=mask[:, :widest], use_cache=True)
    assert output.cache.lengths == [2, 9, 4, 5]
    logits = [output.logits[:, -1:]]
    for column in range(widest, widest + 7):
        output = model(ids[:, column : column + 1], attention_mask=mask[:, : column + 1], cache=output.cache)
        logits.append(output.logits)
    for index, row in enumerate(rows):
        alone = model(row).logits[0, -8:]
        torch.testing.assert_close(torch.cat(logits, dim=1)[index], alone, rtol=0, atol=1e-11)


@each_variant
def test_packed_documents_equal_documents_alone(variant):
    model = tiny_model(variant)
    lengths = [[1, 2, 3, 4, 5], [5, 5, 1, 3, 1]]
    documents = [[random_ids(1, length, seed=10 * row + length) for length in lengths[row]] for row in range(2)]
    ids = torch.cat([torch.cat(row, dim=1) for row in documents])
    position_ids = torch.cat([torch.cat([torch.arange(length) for length in row])[None] for row in lengths])
    logits = model(ids, position_ids=position_ids).logits
    for row in range(2):
        alone = torch.cat([model(document).logits[0] for document in documents[row]])
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-11)


def test_a_trailing_cycle_is_completed_so_a_bidirectional_head_does_not_depend_on_where_the_document_ends():
    model, ids = tiny_model("bidirectional-refresh"), random_ids(1, 8)
    whole = model(ids).logits
    for length in (5, 6, 7):
        torch.testing.assert_close(model(ids[:, :length]).logits, whole[:, :length], rtol=0, atol=1e-11)


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
@each_variant
def test_with_cycles_of_one_token_both_halves_are_the_layers_of_transformers(variant, qk_norm):
    """Every token is a head: the parallel layers are an ordinary causal decoder, which transformers' Qwen3 and Llama compute."""
    model = tiny_model(variant, dtype=torch.float32, mtp_horizon=1, qk_norm=qk_norm)
    ids = random_ids(2, 10)
    vanilla = vanilla_decoder(model).model
    layers, embedded = vanilla.layers, vanilla.embed_tokens(ids)
    norm, vanilla.norm = vanilla.norm, torch.nn.Identity()
    vanilla.layers = layers[:2]
    parallel = vanilla(inputs_embeds=embedded, use_cache=False).last_hidden_state
    vanilla.layers, vanilla.norm = layers[2:], norm
    hidden = vanilla(inputs_embeds=embedded + parallel, use_cache=False).last_hidden_state
    expected = model.lm_head(hidden)
    assert expected.std() > 1
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-4)


def test_weight_names_are_exactly_those_of_qwen3():
    model = tiny_model("causal-refresh", dtype=torch.float32)
    assert set(vanilla_decoder(model).state_dict()) == set(model.state_dict())
    assert len(model.state_dict()) == 4 * 11 + 3


@each_variant
def test_caches_hold_what_the_specification_says_after_every_token(variant):
    """Contents against K and V that transformers' Qwen3 computes: over real tokens, or over the shadow stream."""
    model, ids = tiny_model(variant, dtype=torch.float32), random_ids(1, 16)
    is_real = variant.endswith("-refresh")
    shadow = torch.full_like(ids, 60)
    shadow[0, [0, 4, 8, 12]] = ids[0, [0, 4, 8, 12]]
    real_kv, shadow_kv = DynamicCache(), DynamicCache()
    vanilla = vanilla_decoder(model)
    vanilla(ids, cache=real_kv)
    vanilla(shadow, cache=shadow_kv)
    output = model(ids[:, :1], use_cache=True)
    for length in range(1, 17):
        if length > 1:
            output = model(ids[:, length - 1 : length], cache=output.cache)
        ended = (length - 1) // 4 * 4  # tokens of the cycles before the last token's
        assert output.cache.layer_lengths(0) == [ended if is_real else ended + 4]
        assert output.cache.layer_lengths(2) == output.cache.layer_lengths(3) == [length]
        for layer in (0, 1):
            if not output.cache.layer_lengths(layer)[0]:
                continue
            keys, values = output.cache.row(layer, 0)
            reference = (real_kv if is_real else shadow_kv).layers[layer]
            other = (shadow_kv if is_real else real_kv).layers[layer]
            if variant == "bidirectional-norefresh" and layer == 1:
                continue  # its shadow K and V are not those of a causal pass; see the next test
            torch.testing.assert_close(keys, reference.keys[0].transpose(0, 1)[: len(keys)], rtol=0, atol=1e-3)
            torch.testing.assert_close(values, reference.values[0].transpose(0, 1)[: len(keys)], rtol=0, atol=1e-3)
            assert (values - other.values[0].transpose(0, 1)[: len(keys)]).abs().max() > 0.1


@each_variant
def test_decoding_leaves_the_cache_that_a_longer_prompt_fills(variant):
    model, ids = tiny_model(variant), random_ids(1, 13)
    stepped = model(ids[:, :3], use_cache=True).cache
    for column in range(3, 13):
        model(ids[:, column : column + 1], cache=stepped)
        prompted = model(ids[:, : column + 1], use_cache=True).cache
        assert stepped.lengths == prompted.lengths == [column + 1]
        torch.testing.assert_close(stepped.shadow_hidden_BCX, prompted.shadow_hidden_BCX, rtol=0, atol=1e-11)
        in_cycle = column % 4 + 1
        assert torch.equal(stepped.cycle_ids_BC[:, :in_cycle], prompted.cycle_ids_BC[:, :in_cycle])
        for layer in range(4):
            if stepped.layer_lengths(layer)[0]:
                for mine, other in zip(stepped.row(layer, 0), prompted.row(layer, 0)):
                    torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_the_first_cycle_takes_four_slots_and_later_heads_eight_in_refresh():
    model, ids = tiny_model("causal-refresh"), random_ids(1, 9)
    widths = []
    model.model.layers[0].register_forward_pre_hook(lambda _, arguments: widths.append(arguments[0].shape[1]))
    output = model(ids[:, :1], use_cache=True)
    for column in range(1, 9):
        output = model(ids[:, column : column + 1], cache=output.cache)
    assert widths == [4, 8, 8]


def test_the_last_parallel_layer_computes_no_queries_of_the_real_stream():
    model, ids = tiny_model("causal-refresh"), random_ids(1, 8)
    widths = {}
    for index in (0, 1):
        attention = model.model.layers[index].self_attn
        for name in ("q_proj", "k_proj", "o_proj"):
            getattr(attention, name).register_forward_pre_hook(
                lambda _, arguments, key=(index, name): widths.__setitem__(key, arguments[0].shape[1])
            )
    model(ids)
    assert widths == {
        (0, "q_proj"): 16,
        (0, "k_proj"): 16,
        (0, "o_proj"): 16,
        (1, "q_proj"): 8,
        (1, "k_proj"): 16,
        (1, "o_proj"): 8,
    }


def test_the_loss_is_next_token_cross_entropy_within_documents():
    model, ids = tiny_model("bidirectional-refresh", dtype=torch.float32), random_ids(1, 9)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    labels = ids.clone()
    labels[0, 2] = -100
    output = model(ids, position_ids=position_ids, labels=labels)
    log_p = output.logits[0].log_softmax(dim=-1)
    predicted = [0, 2, 3, 5, 6, 7]  # not 1 (its label is -100), not 4 (the next token is of another document)
    expected = -torch.stack([log_p[column, ids[0, column + 1]] for column in predicted]).mean()
    torch.testing.assert_close(output.loss, expected)
    summed = model(ids, position_ids=position_ids, labels=labels, num_items_in_batch=12).loss
    torch.testing.assert_close(summed, expected * 6 / 12)


def test_gradients_reach_every_weight():
    model, ids = tiny_model("bidirectional-refresh"), random_ids(2, 10)
    model(ids, labels=ids).loss.backward()
    silent = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.abs().sum() > 0]
    assert silent == []


def test_only_asked_logits_are_computed():
    model, ids = tiny_model("causal-norefresh"), random_ids(2, 7)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])
    assert len(model(ids, return_dict=False)) == 1
    assert len(model(ids, return_dict=False, labels=ids, use_cache=True)) == 3


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_is_bitwise(tmp_path, tied):
    model = tiny_model("bidirectional-refresh", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = DMTDQwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert set(loaded.state_dict()) == set(model.state_dict())
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = random_ids(1, 9)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_bfloat16_is_near_float32():
    ids = random_ids(1, 12)
    wide = tiny_model("bidirectional-refresh", dtype=torch.float32)(ids).logits
    narrow = tiny_model("bidirectional-refresh", dtype=torch.bfloat16)(ids).logits
    assert narrow.dtype == torch.bfloat16
    similarity = torch.nn.functional.cosine_similarity(wide, narrow.float(), dim=-1)
    assert similarity.min() > 0.98


IDS = random_ids(1, 5)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"inputs_embeds": torch.zeros(1, 5, 32)}, "inputs_embeds"),
        ({}, "input_ids of shape None"),
        ({"input_ids": IDS[0]}, r"input_ids of shape \(5,\)"),
        ({"input_ids": IDS, "output_attentions": True}, "output_attentions=True"),
        ({"input_ids": IDS, "output_hidden_states": True}, "output_hidden_states=True"),
        ({"input_ids": IDS, "token_type_ids": IDS}, r"arguments \['token_type_ids'\]"),
        ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, "labels and logits_to_keep"),
        ({"input_ids": IDS, "cache": DynamicCache()}, "a cache of type DynamicCache"),
        ({"input_ids": IDS, "use_cache": True, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, "several documents"),
        ({"input_ids": IDS, "use_cache": True, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padding in the last column"),
    ],
)
def test_what_cannot_work_is_refused_by_name(arguments, found):
    with pytest.raises(ValueError, match=found) as error:
        tiny_model("causal-refresh")(**arguments)
    assert "remedy: " in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"input_ids": random_ids(2, 1)}, "2 rows"),
        ({"attention_mask": torch.tensor([[0]])}, "padding after the first call"),
        ({"position_ids": torch.tensor([[0]])}, r"position_ids \[\[0\]\]"),
        ({"use_cache": False}, "a cache and use_cache=False"),
    ],
)
def test_columns_that_do_not_follow_the_cache_are_refused(arguments, found):
    model = tiny_model("causal-refresh")
    cache = model(IDS, use_cache=True).cache
    with pytest.raises(ValueError, match=found):
        model(**{"input_ids": IDS[:, :1], "cache": cache, **arguments})
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model(IDS[:, :1], cache=cache, past_key_values=cache)
    assert cache.lengths == [5]
