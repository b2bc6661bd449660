"""Chats through a template: as `apply_chat_template` writes them, or refused."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.chats.turns import Chat, ChatError, read_chat
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, train_bpe
from megatron_dmtd.errors import DataError
from tests.chats.records import FORMS, PARIS, RECORDS, WEATHER, assistant, call, tool, user
from tests.chats.templates import LLAMA3, QWEN3, unmarked


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["hi yes no"] * 3, vocab_size=270, output_dir=folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def write(tokenizer, template, *messages, prompt=False, **fields):
    tokenizer.chat_template = template
    return ChatTemplates(tokenizer).render(read_chat({"messages": list(messages), **fields}, "messages"), prompt=prompt)


WORDS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def test_a_chat_is_what_the_template_writes_and_a_prompt_asks_for_more(tokenizer):
    assert write(tokenizer, WORDS, user("hi"), assistant("yes")) == "[user]hi[assistant]yes"
    assert write(tokenizer, WORDS, user("hi"), prompt=True) == "[user]hi[assistant]"


def test_tools_documents_and_values_of_a_record_reach_the_template(tokenizer):
    template = "{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking }}{{ bos_token }}{{ eos_token }}"
    record = {"tools": [WEATHER], "documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"enable_thinking": "no"}}
    text = write(tokenizer, template, user("hi"), **record)
    tokenizer.chat_template = template
    arguments = {"tools": [WEATHER], "documents": record["documents"], "enable_thinking": "no"}
    assert text == tokenizer.apply_chat_template([user("hi")], tokenize=False, **arguments) and '"Paris"' not in text
    assert WEATHER["function"]["description"] in text and "no<|endoftext|>" in text


def test_no_tools_and_an_empty_list_are_told_apart_as_transformers_does(tokenizer):
    template = "{{ 'none' if tools is none else tools | length }}"
    assert write(tokenizer, template, user("hi")) == "none" and write(tokenizer, template, user("hi"), tools=[]) == "0"


def test_a_tokenizers_template_for_tools_is_taken_for_chats_with_tools(tokenizer):
    several = {"default": "plain", "tool_use": "tools"}
    assert write(tokenizer, several, user("hi")) == "plain"
    assert write(tokenizer, several, user("hi"), tools=[WEATHER]) == "tools"


# As Python itself shows values.


@pytest.mark.parametrize(
    "written",
    [
        "{{ m.tool_calls }}",
        "{{ m.tool_calls[0].function.arguments.nested }}",
        "{{ 'x' ~ m.tool_calls[0].function.arguments.nested }}",
        "{{ '%s' % m.tool_calls[0].function }}",
        "{{ '%s' | format(m.tool_calls[0].function) }}",
        "{{ m.tool_calls | join(', ') }}",
        "{{ m }}",
        "{{ messages }}",
        "{{ messages[1:] }}",
        "{{ tools }}",
        "{{ tools | first }}",
        "{{ m.tool_calls[0].function.arguments.items() | list }}",
        "{{ m.tool_calls[0].function.arguments.nothing }}",
    ],
)
def test_nothing_is_written_as_python_shows_it(tokenizer, written):
    calling = assistant("yes", tool_calls=[call("f", {"nested": {"a": [1]}, "nothing": None})])
    template = "{% for m in messages if m.tool_calls %}" + written + "{% endfor %}"
    with pytest.raises(ChatError, match="as Python shows it"):
        write(tokenizer, template, user("hi"), calling, tools=[WEATHER])
    tokenizer.chat_template = template
    by_transformers = tokenizer.apply_chat_template([user("hi"), calling], tools=[WEATHER], tokenize=False)
    assert any(sign in by_transformers for sign in ("'", "None")), "transformers does not write it either"


def test_templates_may_read_loop_over_and_dump_all_values(tokenizer):
    template = (
        "{% for m in messages[::-1] %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "{% if a is mapping %}{% for k, v in a.items() %}{{ k }}={{ v | tojson(indent=1) }}{% endfor %}{% endif %}"
        "{{ a | tojson(ensure_ascii=True) }}{{ a | length }}{{ a.keys() | join }}{% endfor %}{% endfor %}"
        "{% set ns = namespace(x=[]) %}{% set ns.x = ns.x + [messages[0].content] %}{{ ns.x | join(' ') }}"
        "{{ tools | map(attribute='type') | join }}"
    )
    messages = [user("hi"), assistant("", tool_calls=[call("f", {"é": [1, None, True], "b": {"c": {}}})])]
    tokenizer.chat_template = template
    wanted = tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
    assert write(tokenizer, template, *messages, tools=[WEATHER]) == wanted and "null" in wanted


# The forms that a template takes.


def test_parts_are_one_text_unless_the_template_reads_parts(tokenizer):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for template in (WORDS, "{% for m in messages if m.content is string %}[{{ m.role }}]{{ m.content }}{% endfor %}"):
        assert write(tokenizer, template, user(parts), assistant("yes")) == "[user]hi[assistant]yes"
    reading = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert write(tokenizer, reading, user(parts)) == "<h><i>"
    assert write(tokenizer, reading, user("hi")) == "<hi>", "a text would have been lost"


def test_arguments_are_given_in_the_form_that_the_template_takes(tokenizer):
    compact = '{"city":"Zürich"}'
    with_json, with_object = (assistant("", tool_calls=[call("f", value)]) for value in (compact, {"city": "Zürich"}))
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALLED{% endfor %}{% endfor %}"
    only_objects = calls.replace("CALLED", "{{ c.function.arguments | tojson }}")
    only_json = calls.replace("CALLED", "{{ '<' + c.function.arguments + '>' }}")
    assert write(tokenizer, only_objects, user("hi"), with_json) == '{"city": "Zürich"}'
    assert write(tokenizer, only_json, user("hi"), with_object) == '<{"city": "Zürich"}>'
    assert write(tokenizer, only_json, user("hi"), with_json) == f"<{compact}>"
    assert (
        write(tokenizer, calls.replace("CALLED", "{{ c.function.arguments }}"), user("hi"), with_object) == '{"city": "Zürich"}'
    )
    assert compact in write(tokenizer, unmarked(QWEN3), user("hi"), with_json), "a template that takes both is given the record's"
    broken = assistant("", tool_calls=[call("f", "no JSON")])
    assert write(tokenizer, only_objects, user("hi"), broken) == '"no JSON"'


def test_content_that_is_null_is_left_out_or_empty_and_never_a_word(tokenizer):
    calling = assistant(None, tool_calls=[PARIS])
    assert write(tokenizer, WORDS, user("hi"), calling, assistant("yes")) == "[user]hi[assistant][assistant]yes"
    needing = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    assert write(tokenizer, needing, user("hi"), calling) == "<hi><>"
    defined = "{% for m in messages %}{{ 'content' in m }}{% endfor %}"
    assert write(tokenizer, defined, user("hi"), calling) == "TrueFalse"


def test_the_answer_of_a_tool_may_be_an_object_where_the_template_writes_it_as_json(tokenizer):
    messages = user("hi"), assistant(None, tool_calls=[PARIS]), tool({"celsius": 12})
    assert '{"celsius": 12}<|eot_id|>' in write(tokenizer, unmarked(LLAMA3).replace("bos_token", "''"), *messages)
    with pytest.raises(ChatError, match="as Python shows it"):
        write(tokenizer, WORDS, *messages)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system') }}", "{{ 1 / 0 }}", "{{ messages.absent.field }}"])
def test_a_chat_that_the_template_refuses_is_an_error(tokenizer, template):
    with pytest.raises(ChatError, match=r"the chat template refuses it: (Template|ZeroDivision|Undefined)Error"):
        write(tokenizer, template, user("hi"))


def test_what_a_template_does_not_even_name_is_known(tokenizer):
    tokenizer.chat_template = WORDS
    templates, chat = ChatTemplates(tokenizer), read_chat(RECORDS["null content"], "messages")
    assert templates.of(chat).unread(chat) == ["tools", "tool_calls"]
    tokenizer.chat_template = unmarked(QWEN3)
    assert templates.of(chat).unread(chat) == [] == templates.of(chat).unread(Chat(messages=[user("hi")]))


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplates(tokenizer)


def test_there_are_forms_to_try():
    assert {"parts", "arguments in JSON", "tools in JSON"} <= FORMS.keys()
