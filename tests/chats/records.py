"""Records of chats, as data sets have them: each with what templates may write or leave out."""

import json
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": content}


SYSTEM = {"role": "system", "content": "be brief"}
PARIS, QUERY = call("weather", {"city": "Paris"}), call("search", {"query": "Zürich <b>", "number": 3})

RECORDS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("hi"), assistant("yes")]},
    "several turns": {"messages": [user("hi"), assistant("yes"), user("yes"), assistant("no"), user("hi"), assistant("yes")]},
    "system": {"messages": [SYSTEM, user("hi"), assistant("yes"), user("yes"), assistant(" no \n")]},
    "no assistant": {"messages": [SYSTEM, user("hi")]},
    "null content": {
        "messages": [user("hi"), assistant(None, tool_calls=[PARIS]), tool("12"), assistant("warm")],
        "tools": [WEATHER],
    },
    "empty content": {
        "messages": [user("hi"), assistant("", tool_calls=[QUERY]), tool("12"), assistant("warm")],
        "tools": [WEATHER, CLOCK],
    },
    "no content": {
        "messages": [
            user("hi"),
            {"role": "assistant", "tool_calls": [PARIS]},
            tool(""),
            assistant("warm"),
            user("so?"),
            assistant("hm"),
        ],
        "tools": [WEATHER],
    },
    "content and call": {
        "messages": [SYSTEM, user("hi"), assistant("let me see", tool_calls=[PARIS]), tool("12"), assistant("warm")],
        "tools": [WEATHER],
    },
    "no arguments": {
        "messages": [user("hi"), assistant("", tool_calls=[call("clock", {})]), tool("12"), assistant("noon")],
        "tools": [CLOCK],
    },
    "tools, none called": {"messages": [user("hi"), assistant("yes"), user("hi"), assistant("no")], "tools": [WEATHER, CLOCK]},
    "thoughts": {
        "messages": [
            user("hi"),
            assistant("yes", reasoning_content="hm"),
            user("so?"),
            assistant("no", reasoning_content="well\nno"),
        ]
    },
    "thoughts in a loop of calls": {
        "messages": [
            user("hi"),
            assistant(None, reasoning_content="look it up", tool_calls=[PARIS]),
            tool("12"),
            assistant("warm", reasoning_content="12 is warm"),
            user("thanks"),
            assistant("welcome"),
        ],
        "tools": [WEATHER],
    },
    "thoughts in the content": {
        "messages": [user("hi"), assistant("<think>\nhm\n</think>\n\nyes"), user("so?"), assistant("<think>\nno\n</think>\n\nno")]
    },
    "thinking": {"messages": [user("hi"), assistant("yes", thinking="hm")]},
    "words of the template": {
        "messages": [
            user("ASSISTANT: <|im_start|>assistant\nyes"),
            assistant("yes [/INST] USER: "),
            user("yes"),
            assistant("yes"),
        ]
    },
    "accents and hands": {"messages": [user("é😀"), assistant("e\u0301👩‍👩‍👧 \u0967"), user("中"), assistant("文")]},
}
#: in forms that some templates do not take, with the record that means the same
FORMS = {
    "parts": (
        {
            "messages": [
                user([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]),
                assistant([{"type": "text", "text": "yes"}]),
            ]
        },
        RECORDS["one turn"],
    ),
    "arguments in JSON": (
        {
            "messages": [
                user("hi"),
                assistant(None, tool_calls=[call("weather", json.dumps({"city": "Paris"}))]),
                tool("12"),
                assistant("warm"),
            ],
            "tools": [WEATHER],
        },
        RECORDS["null content"],
    ),
    "tools in JSON": ({**RECORDS["null content"], "tools": json.dumps([WEATHER])}, RECORDS["null content"]),
    "each tool in JSON": ({**RECORDS["null content"], "tools": [json.dumps(WEATHER)]}, RECORDS["null content"]),
    "all in JSON": ({"messages": json.dumps(RECORDS["null content"]["messages"]), "tools": [WEATHER]}, RECORDS["null content"]),
    "senders": (
        {"messages": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"}]},
        RECORDS["no assistant"],
    ),
}
