"""Text, ids and loss of chats, against `apply_chat_template` itself: records times templates, with their marks and without."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megatron_dmtd.chats.spans import render_with_spans
from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.chats.turns import ChatError, read_chat
from megatron_dmtd.data.corpora.encoding import _inside
from megatron_dmtd.data.corpora.tokenizer import TextEncoder, load_tokenizer, train_bpe
from tests.chats.records import FORMS, RECORDS, assistant, user
from tests.chats.templates import CHATML, QWEN3, SPECIAL, TEMPLATES, THINKING_PROMPT, marked, unmarked

TEXTS = ["hi yes no ASSISTANT: yes", " no", " yes", "<tool_call>", "be brief", '{"city": "Paris"}', "system user assistant"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS * 4, vocab_size=330, output_dir=folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>", "</tool_call>")])
    assert any(token.startswith("Ġ") and len(token) > 2 for token in tokenizer.get_vocab()), "no token holds a space"
    return tokenizer


def reference(tokenizer, template, record, **values):
    """Text, ids and mask by transformers; None if it refuses."""
    tokenizer.chat_template = template
    arguments = {"tools": record.get("tools"), **values}
    text = tokenizer.apply_chat_template(record["messages"], tokenize=False, **arguments)
    made = tokenizer.apply_chat_template(record["messages"], return_assistant_tokens_mask=True, return_dict=True, **arguments)
    return text, made["input_ids"], made["assistant_masks"]


def ours(tokenizer, template, record):
    tokenizer.chat_template = template
    text, spans = render_with_spans(ChatTemplates(tokenizer), read_chat(record, "messages"))
    ids, places = TextEncoder(tokenizer.backend_tokenizer.to_str(), chats=True).encode_with_places(text)
    return text, ids.tolist(), _inside(places, spans).tolist()


@pytest.mark.parametrize("made", [marked, unmarked])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_ids_and_loss_are_those_of_transformers(tokenizer, name, made):
    tried = 0
    for record_name, record in RECORDS.items():
        try:
            wanted = reference(tokenizer, marked(TEMPLATES[name]), record)
        except Exception:  # a template that does not support the record
            with pytest.raises(ChatError):
                ours(tokenizer, made(TEMPLATES[name]), record)
            continue
        tried += 1
        try:
            found = ours(tokenizer, made(TEMPLATES[name]), record)
        except ChatError as error:
            raise AssertionError(f"{record_name}: {error}") from error
        assert found[0] == wanted[0], record_name
        assert found[1] == wanted[1], record_name
        shown = [[tokenizer.decode([i]) for i, m in zip(wanted[1], mask) if m] for mask in (found[2], wanted[2])]
        assert found[2] == wanted[2], (record_name, shown, wanted[0])
        assert any(wanted[2]) == (record_name != "no assistant"), record_name
    assert tried >= len(RECORDS) - 1


@pytest.mark.parametrize("made", [marked, unmarked])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_forms_that_mean_the_same_are_written_the_same(tokenizer, name, form, made):
    record, same = FORMS[form]
    template = made(TEMPLATES[name])
    assert ours(tokenizer, template, record) == ours(tokenizer, template, same)


@pytest.mark.parametrize("name", [*TEMPLATES, "thinking prompt"])
def test_a_turn_begins_where_the_prompt_for_it_ends(tokenizer, name):
    template = unmarked({**TEMPLATES, "thinking prompt": THINKING_PROMPT}[name])
    tokenizer.chat_template = template
    templates = ChatTemplates(tokenizer)
    messages = RECORDS["several turns"]["messages"]
    for count in (2, 4, 6):
        text, spans = render_with_spans(templates, read_chat({"messages": messages[:count]}, "messages"))
        prompt = templates.render(read_chat({"messages": messages[: count - 1]}, "messages"), prompt=True)
        assert prompt == tokenizer.apply_chat_template(messages[: count - 1], tokenize=False, add_generation_prompt=True)
        begin = len(prompt.removesuffix("<think>\n"))  # which the template leaves out of turns without thoughts
        assert spans[-1][0] == begin and len(spans) == count // 2 and text[:begin] == prompt[:begin]


def test_a_prompt_that_begins_a_thought(tokenizer):
    text, spans = render(tokenizer, THINKING_PROMPT, *RECORDS["thoughts"]["messages"])
    assert [text[slice(*span)] for span in spans] == ["yes<|im_end|>", "well\nno\n</think>\n\nno<|im_end|>"]


def render(tokenizer, template, *messages):
    tokenizer.chat_template = unmarked(template)
    return render_with_spans(ChatTemplates(tokenizer), read_chat({"messages": list(messages)}, "messages"))


def test_an_assistant_may_begin_a_chat(tokenizer):
    for template in (CHATML, QWEN3):
        text, spans = render(tokenizer, template, assistant("yes"), user("hi"), assistant("<think>\nhm\n</think>\n\nno"))
        assert text[slice(*spans[0])] == "yes<|im_end|>" and text[slice(*spans[1])].endswith("</think>\n\nno<|im_end|>")


def test_without_special_tokens_a_turn_ends_with_its_text(tokenizer):
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    text, spans = render(tokenizer, plain, user("hi"), assistant("yes "), user("so"), assistant("no"))
    assert [text[slice(*span)] for span in spans] == ["yes ", "no"]


@pytest.mark.parametrize(
    "template",
    [
        # turns end differently once others follow
        "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|eot_id|>' }}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content }}{{ '!' * loop.revindex }}<|im_end|>{% endfor %}",
        # no prompt at all, and what the assistant says is put first
        "{% for m in messages | sort(attribute='role') %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}",
        # what a text begins with decides on others
        "{% for m in messages %}{{ loop.length }}{{ m.content }}<|im_end|>{{ messages[0].content.startswith('hi') }}{% endfor %}",
    ],
)
def test_turns_that_cannot_be_placed_are_an_error_and_never_a_guess(tokenizer, template):
    with pytest.raises(ChatError, match=r"in another way once others follow.* with \{% generation %\}"):
        render(tokenizer, template, *RECORDS["several turns"]["messages"])


def test_turns_that_are_written_otherwise_once_others_follow_are_found_by_what_stands_between_them(tokenizer):
    template = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}<|im_end|>{% endfor %}"
    text, spans = render(tokenizer, template, user("hi"), assistant("yes"), user("so"), assistant("no"))
    assert [text[slice(*span)] for span in spans] == ["YES<|im_end|>", "no<|im_end|>"]


def test_characters_with_which_turns_are_told_apart_are_refused_where_they_are_needed(tokenizer):
    chat = [user("hi\U00100001"), assistant("yes"), user("hi"), assistant("no")]
    assert len(render(tokenizer, CHATML, *chat)[1]) == 2
    with pytest.raises(ChatError, match="private use"):
        render(tokenizer, QWEN3, *chat)
