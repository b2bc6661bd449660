"""Transformers' own `generate` decodes in cycles: the same tokens as without a cache, and stopping works inside a cycle.

No token may come twice, nor the MASK: random models soon repeat one token for ever, and every test would pass on that.
"""

import string

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from megatron_dmtd.hf import DMTDCache
from tests.hf.tiny import MASK_ID, VOCABULARY, each_variant, random_ids, tiny_model

OPTIONS = {
    "max_new_tokens": 11,
    "do_sample": False,
    "pad_token_id": MASK_ID,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [MASK_ID],
}


def greedy(model, ids, **options):
    return model.generate(ids, **{**OPTIONS, **options})


def argmax_continuation(model, ids, count):
    """Greedy tokens from the training forward alone."""
    for _ in range(count):
        logits = model(ids).logits[:, -1].scatter(1, ids, -torch.inf)
        logits[:, MASK_ID] = -torch.inf
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return ids


@each_variant
@pytest.mark.parametrize("prompt_length", range(1, 6))
def test_greedy_tokens_are_those_of_the_training_forward(variant, prompt_length):
    model, ids = tiny_model(variant), random_ids(1, prompt_length, seed=5)
    expected = argmax_continuation(model, ids, 11)
    assert len(set(expected[0, prompt_length:].tolist())) == 11
    assert torch.equal(greedy(model, ids), expected)
    assert torch.equal(greedy(model, ids, use_cache=False), expected)


@each_variant
def test_the_parallel_layers_run_once_per_cycle_and_the_others_once_per_token(variant):
    model, ids = tiny_model(variant), random_ids(1, 4)
    calls = {0: 0, 3: 0}
    for layer in calls:
        model.model.layers[layer].register_forward_hook(lambda *_, layer=layer: calls.__setitem__(layer, calls[layer] + 1))
    greedy(model, ids, max_new_tokens=9)  # the prompt, then tokens at positions 4 to 11
    assert calls == {0: 1 + 2, 3: 1 + 8}


@each_variant
def test_prompts_of_unequal_length_generate_as_alone(variant):
    model = tiny_model(variant)
    prompts = [random_ids(1, length, seed=length) for length in (3, 8, 5)]
    ids = torch.cat([torch.nn.functional.pad(prompt, (8 - prompt.shape[1], 0), value=MASK_ID) for prompt in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(prompt), (8 - prompt.shape[1], 0)) for prompt in prompts])
    together = greedy(model, ids, attention_mask=mask)
    assert torch.equal(greedy(model, ids, attention_mask=mask, use_cache=False), together)
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row, 8:], greedy(model, prompt)[0, prompt.shape[1] :])


@each_variant
def test_a_stop_token_inside_a_cycle_ends_its_row_and_leaves_the_others_alone(variant):
    model, ids = tiny_model(variant), random_ids(2, 4, seed=11)
    free = greedy(model, ids)[:, 4:]
    candidates = [
        (row, step)
        for row in (0, 1)
        for step in range(1, 10)
        if (4 + step) % 4 in (1, 2) and free[row, step] not in free[1 - row]
    ]
    assert candidates, "no token stops one row inside a cycle and the other nowhere"
    row, step = candidates[0]
    stopped = greedy(model, ids, eos_token_id=int(free[row, step]))[:, 4:]
    assert torch.equal(stopped[row, : step + 1], free[row, : step + 1])
    assert (stopped[row, step + 1 :] == MASK_ID).all()
    assert torch.equal(stopped[1 - row], free[1 - row])


@each_variant
def test_the_length_cap_may_cut_a_cycle_anywhere(variant):
    model, ids = tiny_model(variant), random_ids(1, 6)
    longest = greedy(model, ids, max_new_tokens=9)
    for count in range(1, 9):
        assert torch.equal(greedy(model, ids, max_new_tokens=count), longest[:, : 6 + count])


@each_variant
def test_sampling_follows_the_seed_with_and_without_a_cache(variant):
    model, ids = tiny_model(variant), random_ids(2, 5)
    samples = []
    for seed, use_cache in ((0, True), (0, False), (1, True)):
        torch.manual_seed(seed)
        samples.append(greedy(model, ids, do_sample=True, top_k=20, temperature=1.5, use_cache=use_cache))
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])


@each_variant
def test_beam_search_carries_caches_along(variant):
    model, ids = tiny_model(variant), random_ids(2, 5, seed=2)
    beams = greedy(model, ids, num_beams=3)
    assert torch.equal(beams, greedy(model, ids, num_beams=3, use_cache=False))
    assert not torch.equal(beams, greedy(model, ids)), "the beams were never reordered"


def test_streamers_and_logits_processors_work():
    class Collected(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, ids = tiny_model("bidirectional-refresh"), random_ids(1, 6)
    streamer = Collected()
    free = greedy(model, ids, streamer=streamer)
    assert streamer.tokens == free[0].tolist() and streamer.ended
    banned = int(free[0, 8])
    suppressed = greedy(model, ids, suppress_tokens=[banned, MASK_ID])
    assert banned not in suppressed[0, 6:] and torch.equal(suppressed[0, :8], free[0, :8])


@each_variant
def test_a_returned_cache_continues_with_more_text(variant):
    model, ids = tiny_model(variant), random_ids(1, 5)
    first = greedy(model, ids, return_dict_in_generate=True, max_new_tokens=4)
    cache = first.cache
    assert isinstance(cache, DMTDCache) and cache.lengths == [8]  # the last token has not been read yet
    longer = torch.cat([first.sequences, random_ids(1, 3, seed=9)], dim=1)
    assert torch.equal(greedy(model, longer, cache=cache), greedy(model, longer))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"assistant_model": "any"}, "assistant_model"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)}, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds"),
        ({"cache": DynamicCache()}, "a cache of type DynamicCache"),
    ],
)
def test_modes_that_cannot_work_are_refused_by_name(options, found):
    model = tiny_model("causal-refresh")
    with pytest.raises(ValueError, match=found):
        model.generate(random_ids(1, 4), max_new_tokens=2, **options)


@each_variant
@pytest.mark.parametrize("count", [1, 3, 4])
def test_stop_strings_end_an_output_anywhere_in_a_cycle(variant, count):
    model, ids = tiny_model(variant), random_ids(1, 4)
    characters = (string.ascii_letters + string.digits)[:VOCABULARY]
    one_by_one = Tokenizer(WordLevel({character: index for index, character in enumerate(characters)}, unk_token="a"))
    one_by_one.pre_tokenizer, one_by_one.decoder = Split(Regex("."), "isolated"), Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=one_by_one)
    expected = argmax_continuation(model, ids, count)
    stop = characters[int(expected[0, -1])]
    assert torch.equal(greedy(model, ids, stop_strings=[stop], tokenizer=tokenizer), expected)
