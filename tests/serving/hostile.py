"""Requests made to take a server's time, nearly all within the limit of a body. As a program it sends them again and again."""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx

MIB = 2**20


def bodies() -> dict[str, tuple[str, bytes]]:
    """By name: the route, and the body."""

    def filled(head: str, item: str, tail: str, joint: str = ",") -> bytes:
        count = (MIB - len(head) - len(tail) - 100) // (len(item) + len(joint))
        return f"{head}{joint.join([item] * count)}{tail}".encode()

    numbered = ",".join(f'"a{number}":1' for number in range(90_000))
    chat, text = "/v1/chat/completions", "/v1/completions"
    bias = json.dumps({str(number % 256): 1 for number in range(1024)})
    return {
        "a million ids": (text, filled('{"prompt":[', "1", "]}")),
        "ids of which the last is none": (text, filled('{"prompt":[', "1", ',"x"]}')),
        "half a million lists": (text, filled('{"prompt":[', "[1]", "]}")),
        "empty lists": (text, filled('{"prompt":[', "[]", "]}")),
        "texts": (text, filled('{"prompt":[', '"a"', "]}")),
        "one long text": (text, filled('{"prompt":"', "a", '"}', "")),
        "one long text of spaces": (text, filled('{"prompt":"', " ", '"}', "")),
        "unknown fields": (text, f"{{{numbered}}}".encode()),
        "unknown fields of a part": (
            chat,
            f'{{"messages":[{{"role":"user","content":[{{"type":"text",{numbered}}}]}}]}}'.encode(),
        ),
        "messages that are none": (chat, filled('{"messages":[', "{}", "]}")),
        "empty messages": (chat, filled('{"messages":[', '{"role":"user","content":""}', "]}")),
        "many messages": (chat, json.dumps({"messages": [{"role": "user", "content": "a"}] * 4096}).encode()),
        "parts": (chat, filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}")),
        "wrong parts": (chat, filled('{"messages":[{"role":"user","content":[', '{"type":"text"}', "]}]}")),
        "nested lists": (text, filled('{"prompt":', "[", "}", "")),
        "digits": (text, filled('{"n":', "9", "}", "")),
        "escapes": (text, filled('{"prompt":"', "\\ud83d\\ude42", '"}', "")),
        "halves": (text, filled('{"prompt":"', "\\ud83d", '"}', "")),
        "stop strings": (text, filled('{"prompt":"a","stop":[', '"ab"', "]}")),
        "stop ids": (text, filled('{"prompt":"a","stop_token_ids":[', "1", "]}")),
        "account": (text, filled('{"prompt":"a","max_tokens":1,"metadata":[', "{}", "]}")),
        "too large": (text, b'{"prompt":"' + b"a" * (3 * MIB) + b'"}'),
        "bias": (text, f'{{"prompt":"a","max_tokens":50,"logit_bias":{bias}}}'.encode()),
        "likely tokens": (text, json.dumps({"prompt": ["a" * 400] * 8, "max_tokens": 20, "echo": True, "logprobs": 20}).encode()),
        "tools": (text, filled('{"prompt":"a","tools":[', "{}", "]}")),
        "a hundred outputs": (text, json.dumps({"prompt": "a", "n": 64, "max_tokens": 50}).encode()),
    }


def storm(url: str, seconds: float, num_clients: int) -> dict[str, set[int]]:
    """Send all of them from several clients. Returns the statuses that each got."""
    end, found = time.monotonic() + seconds, {name: set() for name in bodies()}

    def send(first: int) -> None:
        own = list(bodies().items())
        own = own[first % len(own) :] + own[: first % len(own)]
        with httpx.Client(base_url=url, timeout=60, headers={"Content-Type": "application/json"}) as client:
            while time.monotonic() < end:
                for name, (route, body) in own:
                    if time.monotonic() < end:
                        found[name].add(client.post(route, content=body).status_code)

    threads = [threading.Thread(target=send, args=(number * 5,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


if __name__ == "__main__":
    print(json.dumps({name: sorted(found) for name, found in storm(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])).items()}))
