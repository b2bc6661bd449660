"""The step loop: what one step computes and counts, and what a request holds when it ends."""

import pytest

from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from megatron_dmtd.inference.text import load_tokenizer
from tests.hf.tiny import tiny_model
from tests.inference.models import Pair
from tests.inference.scripted import scripted
from tests.inference.tokenizers_in_memory import byte_level, metaspace


def test_a_step_gives_one_token_to_each_request_whose_prompt_is_complete(pair: Pair):
    engine = pair.engine(EngineConfig(max_batch=2, max_length=64, cache_tokens=128, chunk_tokens=8, align_heads=False))
    first = engine.submit([1, 2, 3], max_new_tokens=3, params=SamplingParams(ignore_eos=True))
    long = engine.submit(list(range(20)), max_new_tokens=1, params=SamplingParams(ignore_eos=True))
    seen = []
    while engine.has_work:
        seen.append([event.request_id for event in engine.step()])
    assert seen == [[first], [first], [first, long]]
    stats = engine.stats
    # 3 + 4 tokens in the first step, then 8 and 8 of the long prompt next to single ones
    assert (stats.num_steps, stats.num_new_tokens, stats.num_prompt_tokens) == (3, 4, 23)
    assert stats.num_parallel_passes == (0 if pair.kind == "vanilla" else 3)


def test_an_idle_engine_steps_without_doing_anything(pair: Pair):
    engine = pair.engine()
    assert engine.step() == [] and engine.stats.num_steps == 0


def test_a_prompt_of_which_only_the_log_probabilities_are_asked_for_ends_without_a_token(pair: Pair):
    engine = pair.engine()
    engine.submit([5, 6, 7, 8, 9], max_new_tokens=0, params=SamplingParams(prompt_logprobs=1))
    (event,) = engine.step()
    assert event.choice is None and event.completion.token_ids == () and event.completion.finish_reason == "length"
    assert len(event.completion.prompt_logprobs) == 4
    assert not engine.has_work
    engine.check_integrity()


# Text and stop strings: the same from `generate` and from a stream, wherever the string ends.

KIND_OF_TOKENIZER = {"bpe": byte_level, "sentencepiece": metaspace}


@pytest.fixture(scope="module", params=KIND_OF_TOKENIZER)
def texts(request, tmp_path_factory):
    """A tiny model of cycles of four with a tokenizer, as a directory."""
    tokenizer = KIND_OF_TOKENIZER[request.param]()
    folder = tmp_path_factory.mktemp(request.param) / "model"
    size = len(tokenizer) + 1
    tiny_model("bidirectional-refresh", vocab_size=size, mask_token_id=size - 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def says(folder, output: list[int], *, stop: tuple[str, ...], cap: int, prompt: str = "the") -> tuple[str, int, str]:
    """What an engine gives whose model says `output`: text, number of tokens, reason. By `generate` and by a stream."""
    engine = Engine(folder, EngineConfig(max_batch=2, max_length=128, cache_tokens=256), device="cpu")
    prompt_ids = engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    scripted(engine, output, prompt_length=len(prompt_ids))
    params = SamplingParams(stop=stop, ignore_eos=True, detokenize=True, logprobs=0)
    (whole,) = engine.generate([prompt_ids], max_new_tokens=cap, params=params)
    events = list(engine.stream(prompt_ids, max_new_tokens=cap, params=params))
    end = events[-1].completion
    assert "".join(event.text for event in events) == end.text == whole.text
    assert [event.token_id for event in events] == list(end.token_ids) == list(whole.token_ids) == output[: len(events)]
    assert end.finish_reason == whole.finish_reason and len(whole.logprobs) == len(events)
    offsets = [event.text_offset for event in events]
    assert offsets == sorted(offsets) and offsets[0] == 0
    engine.check_integrity()
    return whole.text, len(whole.token_ids), whole.finish_reason


def test_a_stop_string_ends_an_output_at_every_phase_of_a_cycle_and_at_the_cap(texts):
    tokenizer = load_tokenizer(texts)
    words = tokenizer("the quick fox né 日本 jumps", add_special_tokens=False)["input_ids"]
    phases = set()
    for stop in (" quick", "ick f", "né", "本", " jumps", "日本 j"):
        text, count, reason = says(texts, words, stop=("absent", stop), cap=len(words), prompt="x")
        assert reason == "stop" and stop not in text and (text + stop) in tokenizer.decode([*tokenizer("x")["input_ids"], *words])
        phases.add((len(tokenizer("x", add_special_tokens=False)["input_ids"]) + count) % 4)
        assert says(texts, words, stop=(stop,), cap=count, prompt="x") == (text, count, "stop")
        assert says(texts, words, stop=(stop,), cap=count - 1, prompt="x")[1:] == (count - 1, "length")
    assert len(phases) > 2


def test_a_special_token_as_stop_string_ends_an_output(texts):
    tokenizer = load_tokenizer(texts)
    output = [*tokenizer("the fox", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id, 5, 6]
    expected = " the fox" if tokenizer.eos_token == "</s>" else "the fox"
    for stop in (tokenizer.eos_token, "zz"):
        text, count, reason = says(texts, output, stop=(stop,), cap=len(output))
        assert (reason, count) == (("stop", len(output) - 2) if stop != "zz" else ("length", len(output)))
        assert text == expected if stop != "zz" else text.startswith(expected)
    assert says(texts, output, stop=(f"x{tokenizer.eos_token}",), cap=len(output))[0] == expected[:-1]


def test_a_character_that_the_cap_cuts_is_shown_as_cut(texts):
    words = load_tokenizer(texts)("x日", add_special_tokens=False)["input_ids"]
    text, _, reason = says(texts, words[:-1], stop=("zz",), cap=len(words) - 1)
    assert reason == "length" and text.rstrip("\ufffd").strip() == "x" and text.endswith("\ufffd")


def test_a_cancelled_request_gives_the_text_so_far(texts):
    engine = Engine(texts, EngineConfig(max_batch=1, max_length=64, cache_tokens=64), device="cpu")
    output = engine.tokenizer("fox jumps", add_special_tokens=False)["input_ids"]
    scripted(engine, output, prompt_length=1)
    number = engine.submit(output[:1], max_new_tokens=20, params=SamplingParams(stop=("a long string that holds back",)))
    for _ in range(len(output)):
        engine.step()
    (cancelled,) = engine.cancel(number)
    assert cancelled.text.strip() == "fox jumps" and cancelled.finish_reason == "cancelled"


def test_text_is_given_only_where_it_is_asked_for(texts):
    engine = Engine(texts, EngineConfig(max_batch=1, max_length=64, cache_tokens=64), device="cpu")
    (plain,) = engine.generate([[5]], max_new_tokens=3)
    (asked,) = engine.generate([[5]], max_new_tokens=3, params=SamplingParams(detokenize=True))
    assert plain.text is None and isinstance(asked.text, str) and plain.token_ids == asked.token_ids
