"""Who owns which part of a written chat, and whether earlier parts are still what they were."""

import json

import pytest

from megatron_dmtd.chats import owners
from megatron_dmtd.chats.owners import Beginnings, render_with_owners
from megatron_dmtd.chats.template import ChatTemplate
from megatron_dmtd.chats.turns import Chat, ChatError, read_turns
from tests.chats.records import PARIS, QUERY, SYSTEM, assistant, tool, user
from tests.chats.templates import CHATML, LLAMA3, MISTRAL, QWEN3, SPACED, TEMPLATES, marked, unmarked

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
AGENT = [
    SYSTEM,
    user("find it"),
    assistant("", tool_calls=[PARIS]),
    tool("12"),
    assistant("more", tool_calls=[QUERY]),
    tool("13"),
    assistant("done"),
    user("thanks"),
]


def chat(*messages) -> Chat:
    return Chat(messages=read_turns(json.loads(json.dumps(messages))))


def parts(template: str, *messages, bos: str | None = "<s>") -> list[str | None]:
    owned = render_with_owners(ChatTemplate(template, SPECIAL), chat(*messages), bos=bos)
    assert owned.text == ChatTemplate(template, SPECIAL).render(chat(*messages), prompt=True)
    return [None if span is None else owned.text[slice(*span)] for span in owned.spans]


@pytest.mark.parametrize("form", [marked, unmarked])
@pytest.mark.parametrize("template", [CHATML, SPACED], ids=["chatml", "spaced"])
def test_where_nothing_is_rewritten_a_message_is_what_it_adds_to_the_text(template, form):
    """The independent way: the chat up to each message, written apart."""
    source = form(template)
    plain = [SYSTEM, user("hi"), assistant("yes"), user("a"), user("a"), assistant("no"), user("hi")]
    written = [ChatTemplate(source, SPECIAL).render(chat(*plain[: count + 1])) for count in range(len(plain))]
    assert parts(source, *plain) == [now.removeprefix(before) for before, now in zip(["", *written], written)]


def numbered(change: int | None = None) -> list[dict]:
    """A chat of all roles, in which one message may say something else."""
    said = [f"number {number}" if number != change else f"other {number}!" for number in range(7)]
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": said[2]}}}
    return [
        SYSTEM | {"content": said[0]},
        user(said[1]),
        assistant("", tool_calls=[call]),
        tool(said[3]),
        assistant(said[4]),
        user(said[5]),
        assistant(said[6]),
    ]


@pytest.mark.parametrize("form", [marked, unmarked])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_message_that_says_something_else_changes_its_own_part_alone(name, form):
    """The independent way: nothing is traced, two texts are compared. Parts follow each other without a gap."""
    source = form(TEMPLATES[name])
    calls_are_shown = name in ("qwen3", "llama3", "mistral")
    compiled = ChatTemplate(source, SPECIAL)
    owned = render_with_owners(compiled, chat(*numbered()), bos="<s>")
    for number, span in enumerate(owned.spans):
        other = compiled.render(chat(*numbered(number)), prompt=True)
        if other == owned.text:  # only templates without calls, of the message that has nothing else
            assert number == 2 and not calls_are_shown
            continue
        if name == "mistral" and number == 0:
            assert span is None  # what the last question holds is that question's
            continue
        begin = next(place for place, (a, b) in enumerate(zip(owned.text, other)) if a != b)
        same = next(place for place, (a, b) in enumerate(zip(owned.text[::-1], other[::-1])) if a != b)
        assert span is not None and span[0] <= begin <= len(owned.text) - same <= span[1]
    known = [span for span in owned.spans if span is not None]
    assert [end for _, end in known[:-1]] == [begin for begin, _ in known[1:]]


def test_a_system_message_that_is_written_elsewhere_has_no_part():
    """Nothing would be dropped with it."""
    assert parts(unmarked(MISTRAL), SYSTEM, user("hi"))[0] is None
    assert parts(unmarked(MISTRAL), user("hi"))[0] == "[INST] hi[/INST]"


def test_qwen_like_turns_own_headers_calls_and_answers():
    found = parts(unmarked(QWEN3), *AGENT)
    assert found[0] == "<|im_start|>system\nbe brief<|im_end|>\n" and found[1] == "<|im_start|>user\nfind it<|im_end|>\n"
    assert found[2] == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
    )
    assert found[3] == "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
    assert found[7] == "<|im_start|>user\nthanks<|im_end|>\n"


def test_neighbouring_answers_of_tools_share_a_header_and_an_end():
    found = parts(unmarked(QWEN3), user("hi"), assistant("", tool_calls=[PARIS, QUERY]), tool("1"), tool("2"))
    assert found[2:] == [
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>",
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n",
    ]


def test_a_system_message_written_before_the_loop_owns_that_without_what_begins_a_text():
    found = parts(unmarked(LLAMA3), SYSTEM, user("hi"), assistant("yes"), user("so"))
    assert found[0] == "<|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
    assert found[2] == "<|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>"
    assert parts(unmarked(LLAMA3), user("hi"))[0] == "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    # Without a system message nobody owns the empty one that the template writes.
    assert parts(unmarked(LLAMA3), SYSTEM, user("hi"), bos=None)[0].startswith("<s><|start_header_id|>system")


def test_two_messages_before_the_loop_cannot_be_told_apart():
    source = "{{ messages[0].content }}{{ messages[1].content }}{% for m in messages[2:] %}{{ m.content }}{% endfor %}"
    assert parts(source, SYSTEM, user("hi"), assistant("yes")) == [None, None, "yes"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "{% set t %}{% for m in messages %} {{ m.content }} {% endfor %}{% endset %}{{ t | trim }}",
            "changes what it has written",
        ),
        ("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}", "another order"),
    ],
)
def test_a_text_that_cannot_be_traced_is_refused(source, said):
    with pytest.raises(ChatError, match=said):
        parts(source, user("a"), assistant("b"), user("c"))


def test_characters_that_are_marks_are_refused():
    with pytest.raises(ChatError, match="private use"):
        parts(unmarked(CHATML), user("\U000f0001"))


# Whether earlier text has changed.


def check(template: str, messages, numbers, beginnings: Beginnings | None = None) -> None:
    compiled, whole = ChatTemplate(template, SPECIAL), chat(*messages)
    owned = render_with_owners(compiled, whole, bos="<s>")
    (beginnings or Beginnings()).check(compiled, whole, owned, numbers)


def test_a_chat_that_only_grows_is_accepted():
    for template in (CHATML, QWEN3, LLAMA3):
        messages = [
            SYSTEM,
            user("hi"),
            assistant("", tool_calls=[PARIS]),
            tool("1"),
            assistant("yes"),
            user("so"),
            assistant("no"),
        ]
        if template is CHATML:
            messages[2] = assistant("calls")
        check(unmarked(template), [*messages, user("hm")], range(7))


def test_thoughts_that_a_later_question_removes_are_found():
    thinking = [user("hi"), assistant("", reasoning_content="hm", tool_calls=[PARIS]), tool("1"), assistant("yes")]
    check(unmarked(QWEN3), thinking[:3], [0, 2])
    with pytest.raises(ChatError, match="messages up to 2 in another way"):
        check(unmarked(QWEN3), [*thinking, user("so")], [2])
    # Before the thought nothing has changed, and without thoughts nothing does.
    check(unmarked(QWEN3), [*thinking, user("so")], [0])
    check(unmarked(QWEN3), [user("hi"), assistant("", tool_calls=[PARIS]), tool("1"), assistant("yes"), user("so")], [0, 2, 4])


def test_a_system_message_that_moves_to_the_last_question_is_found():
    with pytest.raises(ChatError, match="in another way"):
        check(unmarked(MISTRAL), [SYSTEM, user("hi"), assistant("yes"), user("so")], [1])


def test_answers_of_several_tools_are_compared_together():
    """The first of them ends otherwise as long as the second is missing, but no request has ended there."""
    messages = [user("hi"), assistant("", tool_calls=[PARIS, QUERY]), tool("1"), tool("2"), assistant("so"), user("hm")]
    check(unmarked(QWEN3), messages, [1, 2, 3])


def test_what_was_compared_is_not_rendered_again(monkeypatch):
    rendered = []
    whole = ChatTemplate.render

    def counting(self, chat, *, prompt=False):
        rendered.append(len(chat.messages))
        return whole(self, chat, prompt=prompt)

    turns = [turn for number in range(6) for turn in (user(f"q{number}"), assistant(f"a{number}"))]
    beginnings = Beginnings()
    check(unmarked(CHATML), [*turns, user("end")], range(12), beginnings)
    monkeypatch.setattr(ChatTemplate, "render", counting)
    check(unmarked(CHATML), [*turns, user("end"), assistant("x"), user("new")], range(14), beginnings)
    assert rendered == [15, 13]  # the whole chat once, and the one request that was not known yet
    rendered.clear()
    check(unmarked(CHATML), [user("other"), *turns[1:], user("end")], [2], beginnings)
    assert rendered == [13, 3]


def test_the_work_of_comparing_has_a_bound(monkeypatch):
    monkeypatch.setattr(owners, "_MOST_RENDERED", 60)
    assert owners._within_bound(list(range(0, 10, 2))) == [0, 2, 4, 6, 8]
    found = owners._within_bound(list(range(0, 40, 2)))
    assert found == [0, 38]
