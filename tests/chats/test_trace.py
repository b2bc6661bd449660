"""Loops that leave marks: which part of a text a template has written for which message."""

import pytest
from jinja2 import Environment

from megatron_dmtd.chats.trace import marking, spans_of, traced

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}, {"role": "user", "content": "a"}]


def parts(source: str, messages=MESSAGES) -> list[str | None]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    marked = traced(environment, source).render(messages=messages, **marking(messages))
    text, spans = spans_of(marked, len(messages))
    assert text == environment.from_string(source).render(messages=messages)
    return [None if span is None else text[slice(*span)] for span in spans]


def test_a_message_is_what_its_turn_of_the_loop_writes():
    assert parts("<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}; {% endfor %}>") == [
        "[user]a; ", "[assistant]bc; ", "[user]a; ",
    ]  # fmt: skip


def test_white_space_control_stays_what_it_was():
    assert parts("x\n {%- for m in messages -%} \n {{ m.content }} {%- endfor -%} \n y") == ["a", "bc", "a"]
    assert parts("x\n {% for m in messages %} \n {{ m.content }} {% endfor %} \n y")[1] == " \n bc "


def test_other_loops_and_loops_that_write_nothing_leave_the_turns_alone():
    source = (
        "{% for m in messages[::-1] %}{% set x = m.role %}{% endfor %}{% for t in [1, 2] %}{{ t }}{% endfor %}"
        "{% for m in messages %}{% for c in m.content %}({{ c }}){% endfor %}{% endfor %}"
    )
    assert parts(source) == ["(a)", "(b)(c)", "(a)"]


def test_turns_of_sliced_filtered_and_grouped_messages_are_found():
    assert parts("{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}") == [None, "bc", "a"]
    assert parts("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}") == ["a", None, "a"]
    assert parts("{% for m in messages | selectattr('role', 'equalto', 'assistant') %}{{ m.content }}{% endfor %}")[1] == "bc"


def test_equal_messages_are_told_apart_and_one_that_is_written_twice_has_no_place():
    assert parts("{% for m in messages %}{{ loop.index0 }}{{ m.content }}{% endfor %}") == ["0a", "1bc", "2a"]
    assert parts("{% for m in messages %}{{ m.content }}{% endfor %}{{ '|' }}{% for m in messages[:1] %}!{% endfor %}") == [
        None, "bc", "a",
    ]  # fmt: skip


def test_a_loop_may_look_ahead_and_contain_macros():
    source = (
        "{% macro write(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages %}{{ write(m) }}"
        "{% if not loop.last and loop.nextitem.role == 'user' %}-{% endif %}{% if loop.last %}!{% endif %}{% endfor %}"
    )
    assert parts(source) == ["<a>", "<bc>-", "<a>!"]


@pytest.mark.parametrize("word", ["break", "continue"])
def test_a_turn_that_its_loop_leaves_early_has_no_place(word):
    found = parts("{% for m in messages %}{{ m.content }}{% if loop.index0 == 1 %}{% " + word + " %}{% endif %};{% endfor %}")
    assert found == ["a;", None, None if word == "break" else "a;"]
