#!/usr/bin/env python3
"""Serve a model over HTTP, with OpenAI's API.

    python tools/serve.py exported --port 8000
    python tools/serve.py exported --host 0.0.0.0 --api-key-file key.txt --max-batch 32 --max-length 4096
    python tools/serve.py dory --hf-overrides '{"n_recurrent_loops": 2, "recurrent_kv_cache_mode": "last_loop"}'
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def main():", "max_tokens": 64}'

Routes: /v1/completions, /v1/chat/completions (both also streamed), /v1/models, /health, /metrics (Prometheus), /docs. All
requests share one engine: they are decoded in one batch, and their cycle heads share one pass over the parallel layers. A request
that cannot be served is refused without affecting the others. SIGTERM and Ctrl-C let running requests finish, for at most --grace
seconds. If the engine fails, the server exits with status 1, for a supervisor to restart it.
"""

from __future__ import annotations

import argparse
import math
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dmtd.errors import ConfigError, DMTDError, Refusal
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.inference.config import require_directory
from megatron_dmtd.inference.loop_options import add_loop_options, loop_arguments
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.infra.json_files import read_object

#: a model's own sampling defaults
_GENERATION_FILE = "generation_config.json"
_NO_SETTINGS = Refusal(ConfigError, required="a JSON object", remedy="export or download the model again, or remove the file")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: None of these fields depends on the size of a vocabulary.
_LARGEST_VOCABULARY = 2**31


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="export, or Qwen3 or Llama directory, with its tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 means all (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one (default: %(default)s)")
    parser.add_argument("--model-name", help="name of the model in requests and answers (default: the directory's name)")
    parser.add_argument("--api-key-file", type=Path, help="file with the key that clients must send as a bearer token")
    parser.add_argument("--vanilla", action="store_true", help="decode a DMTD model's weights as an ordinary decoder")
    add_loop_options(parser)
    parser.add_argument("--max-batch", type=int, default=8, help="sequences to decode at once (default: %(default)s)")
    parser.add_argument(
        "--max-waiting", type=int, default=256, help="sequences that may wait; more get status 429 (default: %(default)s)"
    )
    parser.add_argument(
        "--max-body-mib",
        type=float,
        help="largest body of a request; larger ones get status 413 (default: 1, or 16 bytes per token of --max-length)",
    )
    parser.add_argument("--max-length", type=int, help="maximum tokens of a prompt plus its output (default: the model's own)")
    parser.add_argument("--cache-gib", type=float, default=2.0, help="memory for keys and values, in GiB (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--matrix-dtype", choices=("float32", "bfloat16"), help="bfloat16: matrices take half the memory; arithmetic stays fp32"
    )
    parser.add_argument(
        "--bf16-products",
        action="store_true",
        help="multiply prompts and batches in bfloat16; for --matrix-dtype bfloat16 on CPUs with avx512_bf16 or AMX",
    )
    parser.add_argument("--device", help="for example cpu or cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--grace",
        type=int,
        default=30,
        metavar="SECONDS",
        help="time for running requests to finish at shutdown (default: %(default)s)",
    )
    parser.add_argument("--access-log", action="store_true", help="log every request")
    return parser.parse_args(argv)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises `ConfigError` if that fails, before anything is loaded."""
    if not 0 <= port <= 65535:
        raise ConfigError(found=f"--port {port}", required="from 0 (any) to 65535", remedy="change --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ConfigError(
            found=f"--host {host} --port {port}: {error}",
            required="an address of this machine, and a free port",
            remedy="change them",
        ) from error
    return found


def api_key(path: Path | None) -> str | None:
    """The key in a file. Raises `ConfigError` if the file holds none."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(found=f"--api-key-file {path}: {error}", required="a readable file", remedy="correct it") from error
    if not key or not key.isascii() or len(key.split()) != 1:
        raise ConfigError(found=f"--api-key-file {path}", required="one word of ASCII in it: the key", remedy="write one")
    return key


def check_numbers(options: argparse.Namespace) -> None:
    """Accept the numbers of the command line, or raise `ConfigError` before anything is loaded."""
    for name, is_fine, required in (
        ("max_waiting", options.max_waiting >= 0, "at least 0"),
        ("grace", options.grace >= 0, "at least 0"),
        ("cache_gib", 0 < options.cache_gib < math.inf, "a finite number above 0"),
        ("max_body_mib", options.max_body_mib is None or 0 < options.max_body_mib < math.inf, "a finite number above 0"),
    ):
        if not is_fine:
            option = "--" + name.replace("_", "-")
            raise ConfigError(found=f"{option} {getattr(options, name)}", required=required, remedy=f"change {option}")


def sampling_defaults(directory: Path) -> dict[str, float]:
    """Sampling defaults for requests that give none: the model's own, or else OpenAI's temperature of 1."""
    path = directory / _GENERATION_FILE
    fields = read_object(path, _NO_SETTINGS) if path.is_file() else {}
    found = {name: fields[name] for name in _SAMPLING_FIELDS if fields.get(name) is not None}
    if fields.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    defaults = {"temperature": 1.0} | found
    try:
        SamplingParams(**defaults).check(_LARGEST_VOCABULARY)
    except ConfigError as error:
        raise ConfigError(found=f"{path}: {error.found}", required=error.required, remedy="correct the file") from error
    return defaults


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings. Raises `ConfigError` if they are not possible."""
    config = EngineConfig(
        max_batch=options.max_batch,
        max_length=options.max_length,
        cache_bytes=int(options.cache_gib * 2**30),
        bf16_products=options.bf16_products,
    )
    config.check()
    return config


def check_inputs(argv: Sequence[str], *, come_later: bool) -> None:
    """Refuse options that are not possible and, unless they `come_later`, inputs that are not there. Raises `DMTDError`."""
    options = arguments(argv)
    engine_config(options)
    loop_arguments(options)
    if not come_later:
        api_key(options.api_key_file)
        require_directory(options.model)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop."""
    check_numbers(options)
    key, listening = api_key(options.api_key_file), bound_socket(options.host, options.port)
    settings_of_engine, loops = engine_config(options), loop_arguments(options)
    require_directory(options.model)
    # torch and transformers take seconds, which help and refusals need not wait for
    from megatron_dmtd.inference import Engine
    from megatron_dmtd.inference.text import load_tokenizer
    from megatron_dmtd.serving.app import ServerConfig, make_app
    from megatron_dmtd.serving.server import Server
    from megatron_dmtd.serving.worker import Worker

    tokenizer, defaults = load_tokenizer(options.model), sampling_defaults(options.model)
    engine = Engine(
        options.model,
        settings_of_engine,
        dtype=options.dtype,
        matrix_dtype=options.matrix_dtype,
        device=options.device,
        variant="vanilla" if options.vanilla else None,
        **loops,
    )
    engine.tokenizer = tokenizer  # read once, and before the weights
    name = options.model_name or options.model.resolve().name
    max_body_bytes = None if options.max_body_mib is None else int(options.max_body_mib * 2**20)
    config = ServerConfig(model_name=name, api_key=key, defaults=defaults, max_body_bytes=max_body_bytes)

    def end() -> None:
        server.should_exit = True

    worker = Worker(engine, max_waiting=options.max_waiting, on_fault=end)
    server = Server(make_app(worker, config), worker, grace_s=options.grace, access_log=options.access_log)
    listening.listen()  # whoever reads the address may connect at once
    host, port = listening.getsockname()[:2]
    if engine.product_note:
        print(f"note: {engine.product_note}", file=sys.stderr, flush=True)
    kernels = f", torch kernels: {engine.kernel_note}" if engine.kernel_note else ""
    print(
        f"serving {name} ({engine.method.variant}) at http://{f'[{host}]' if ':' in host else host}:{port}/v1\n"
        f"{options.max_batch} sequences at once, {engine.max_length} tokens each at most, on {engine.model.device}{kernels}; "
        f"defaults: {', '.join(f'{name} {value}' for name, value in config.defaults.items())}",
        flush=True,
    )
    server.run(sockets=[listening])
    return 1 if worker.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped on request, 1 engine failure, 2 refused (the message says what to change)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn lets requests finish, then raises the signal again
    try:
        return run(arguments(argv))
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
