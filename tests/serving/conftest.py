"""A server on a real socket, with OpenAI's own client before it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from megatron_dmtd.inference import Engine, EngineConfig
from megatron_dmtd.serving.app import ServerConfig, make_app
from megatron_dmtd.serving.server import Server
from megatron_dmtd.serving.worker import Worker
from tests.tools.text_model import save_text_model

#: the tiny model says the same byte again and again without it
VARIED = {"repetition_penalty": 5.0}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Served:
    worker: Worker
    server: Server
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0)

    def until_idle(self, seconds: float = 20.0) -> None:
        """Returns when nothing is decoded or waits, and every page is where it belongs."""
        end = time.monotonic() + seconds
        while self.worker.num_running or self.worker.num_waiting:
            assert time.monotonic() < end, (self.worker.num_running, self.worker.num_waiting)
            time.sleep(0.01)
        self.worker.engine.check_integrity()


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    max_waiting: int = 64,
    api_key: str | None = None,
    max_body_bytes: int | None = None,
    grace_s: float = 30,
    dtype: str = "float32",
    **options,
) -> Iterator[Served]:
    engine = Engine(folder, EngineConfig(**{"max_batch": 4, "cache_tokens": 2048, **options}), device="cpu", dtype=dtype)
    config = ServerConfig(model_name="tiny", api_key=api_key, defaults={"temperature": 0.0}, max_body_bytes=max_body_bytes)
    worker = Worker(engine, max_waiting=max_waiting)
    server = Server(make_app(worker, config), worker, grace_s=grace_s)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Served(worker, server, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(folder) -> Iterator[Served]:
    with serving(folder) as served:
        yield served
        served.until_idle()
