"""The model to try replays with: served like any other, its chats grow without changing."""

import itertools

import pytest
from transformers import AutoTokenizer

from megatron_dmtd.agents.example_model import write_example_model
from megatron_dmtd.inference import Engine


def test_every_request_of_a_history_begins_with_the_one_before(model_folder, record):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    messages = record["messages"]
    texts = [
        tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
        for end in range(2, len(messages))
        if messages[end]["role"] == "assistant"
    ]
    assert len(texts) > 10 and all(new.startswith(old) for old, new in itertools.pairwise(texts))
    call = messages[2]["tool_calls"][0]["function"]
    assert f"<tool_call>{call['name']} {call['arguments']}</tool_call><|im_end|>" in texts[1]


@pytest.mark.parametrize("variant", [None, "bidirectional-refresh"])
def test_it_decodes_with_cycles_and_without(record, tmp_path, variant):
    write_example_model(tmp_path, record, variant=variant, hidden_size=32, num_layers=2, vocab_size=300, max_length=256)
    engine = Engine(tmp_path, device="cpu")
    assert engine.method.variant == (variant or "vanilla") and engine.max_length == 256
    (completion,) = engine.generate([[5, 6, 7]], max_new_tokens=6)
    assert len(completion.token_ids) == 6
