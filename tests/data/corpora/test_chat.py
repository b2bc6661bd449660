"""Chats through the template, and which characters the assistant wrote."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megatron_dmtd.data.corpora.chat import ChatError, ChatRenderer
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, train_bpe
from megatron_dmtd.errors import DataError

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: like Qwen3's: an empty thought is written into the last turn only
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.thought or '' }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "yes"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["hi yes no"] * 3, vocab_size=270, output_dir=folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def renderer(tokenizer, template):
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def written(tokenizer, template, chat):
    text, spans = renderer(tokenizer, template).render_with_spans(chat)
    assert text == renderer(tokenizer, template).render(chat)
    return [text[begin:end] for begin, end in spans]


def test_a_chat_is_what_the_template_writes(tokenizer):
    text = renderer(tokenizer, PLAIN).render(CHAT[1:3])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_turns_are_found_with_their_ends(tokenizer, template):
    # the second user turn equals the first assistant turn: places are not found by their words
    assert written(tokenizer, template, CHAT) == ["yes<|im_end|>", "no<|im_end|>"]


def test_what_the_template_writes_for_the_assistant_belongs_to_its_turn(tokenizer):
    thoughtful = [*CHAT[:-1], {**CHAT[-1], "thought": "hm"}]
    assert written(tokenizer, THINKING, thoughtful) == ["yes<|im_end|>", "<think>hm</think>no<|im_end|>"]


def test_tool_calls_belong_to_the_turn(tokenizer):
    calling = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": [{"name": "clock"}]},
        {"role": "tool", "content": "12"},
    ]
    assert written(tokenizer, PLAIN, calling) == ["<tool_call>clock</tool_call><|im_end|>"]


def test_a_chat_without_an_assistant_has_no_turns(tokenizer):
    assert written(tokenizer, PLAIN, CHAT[:2]) == []


@pytest.mark.parametrize("method", ["render", "render_with_spans"])
@pytest.mark.parametrize("template", ["{{ raise_exception('no system') }}", MARKED.replace("[{{ m.role }}]", "{{ 1 / 0 }}")])
def test_a_chat_that_the_template_refuses_is_an_error(tokenizer, template, method):
    with pytest.raises(ChatError, match="the chat template refuses it"):
        getattr(renderer(tokenizer, template), method)(CHAT)


def test_turns_that_cannot_be_placed_are_an_error_and_never_a_guess(tokenizer):
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ChatError, match=r"where assistant turn 3 lies; mark it with \{% generation %\}"):
        renderer(tokenizer, shouting).render_with_spans(CHAT)


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    with pytest.raises(DataError, match="has no chat template"):
        renderer(tokenizer, None)
