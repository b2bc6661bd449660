"""Histories of agents for tests."""

import random
from typing import Any

Message = dict[str, Any]
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")


def call(number: int, name: str = "look") -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": f'{{"at": {number}}}'}}


def history(parallel: list[int], *, size: int = 10) -> list[Message]:
    """A system message, a task, and one exchange per entry, with so many calls at once; then the last answer."""
    messages: list[Message] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    number = 0
    for count in parallel:
        calls = [call(number + nth) for nth in range(count)]
        messages.append({"role": "assistant", "content": f"step {number}", "tool_calls": calls})
        for one in calls:
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": f"{one['id']} " + "x" * size})
        number += count
    messages.append({"role": "assistant", "content": "done"})
    return messages


def random_history(seed: int) -> list[Message]:
    """Exchanges of one to three calls with answers of all lengths; at times the user says something in between."""
    rng = random.Random(seed)
    messages = history([])[:-1]
    number = 0
    for _ in range(rng.randrange(1, 12)):
        calls = [call(number + nth) for nth in range(rng.choice((1, 1, 1, 2, 3)))]
        messages.append({"role": "assistant", "content": rng.choice(WORDS), "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": one["id"], "content": rng.choice(WORDS) * rng.randrange(1, 30)} for one in calls
        ]
        number += len(calls)
        if rng.random() < 0.2:
            messages.append({"role": "user", "content": rng.choice(WORDS)})
    return messages


def letters(message: Message) -> int:
    """A count for tests: one token per character, two for calls."""
    return len(message["content"] or "") + 2 * len(message.get("tool_calls", ()))
