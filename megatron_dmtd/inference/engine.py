"""Decode many requests at once with Parallel DMTD and vanilla models.

    engine = Engine("exported")
    for completion in engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=64):
        print(completion.token_ids, completion.finish_reason)

`generate` serves a list; `submit`, `step` and `cancel` serve requests that come and go. A request that cannot be served is
refused by itself, and harms no other. Nothing here imports Megatron.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_dmtd.cycle import complete_length
from megatron_dmtd.errors import CapabilityError, ConfigError, DataError, DMTDError
from megatron_dmtd.inference.graphs import require_cuda
from megatron_dmtd.inference.kv.prefix import PrefixIndex
from megatron_dmtd.inference.kv.store import KeyValuePool, Pools, PoolShape
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.native_ops import NativeOps
from megatron_dmtd.inference.planner import StepPlan, plan_step
from megatron_dmtd.inference.requests import Completion, Event, FinishReason, Request
from megatron_dmtd.inference.runner import Runner, StepMode, num_scratch_pages
from megatron_dmtd.inference.sampler import Choice, SamplingParams, choose, described
from megatron_dmtd.inference.scheduler import Scheduled, Scheduler, Sequence
from megatron_dmtd.inference.text import StopStrings, load_tokenizer
from megatron_dmtd.inference.weights import ModelWeights, load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine decodes, whatever the model."""

    max_batch: int = 8
    """Sequences decoded at once; more wait."""
    max_length: int | None = None
    """Tokens of a prompt and its output at most. Default: what the model was made for, or what the pools hold if that is less."""
    cache_tokens: int | None = None
    """Tokens that each pool holds. Default: `max_batch` sequences of full length, as far as `cache_bytes` goes."""
    cache_bytes: int = 2 * 2**30
    """Memory of both pools together, if `cache_tokens` is not given."""
    page_size: int = 16
    """Tokens per page; whole cycles."""
    chunk_tokens: int = 512
    """Tokens of prompts taken per step at most, all requests together."""
    align_heads: bool = True
    """Let cycle heads of all requests meet in one step, so that parallel layers run once per cycle for all of them."""
    prefix_caching: bool = True
    """Keep pages of finished requests for later ones with the same beginning."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """"native": compiled C for steps of few rows (fp32 on a CPU); "torch": torch alone; "auto": native where it can be."""
    cuda_graphs: Literal["auto", "on", "off", "shapes"] = "auto"
    """Decode from CUDA graphs, one for each of a few shapes of a step; "auto": on CUDA. "shapes": the same shapes without graphs,
    on any device, to look into them.
    """

    def check(self) -> None:
        """Accept the values, or raise `ConfigError`."""
        for name in ("max_batch", "chunk_tokens", "page_size", "cache_bytes", "max_length", "cache_tokens"):
            value = getattr(self, name)
            may_be_none = name in ("max_length", "cache_tokens")
            if not (value is None and may_be_none) and not (isinstance(value, int) and value >= 1):
                required = "an integer of at least 1" + (", or None" if may_be_none else "")
                raise ConfigError(found=f"{name}={value!r}", required=required, remedy=f"change {name}")
        if self.kernels not in ("auto", "native", "torch"):
            raise ConfigError(found=f"kernels={self.kernels!r}", required="auto, native or torch", remedy="change kernels")
        if self.cuda_graphs not in ("auto", "on", "off", "shapes"):
            found = f"cuda_graphs={self.cuda_graphs!r}"
            raise ConfigError(found=found, required="auto, on, off or shapes", remedy="change cuda_graphs")

    def check_pages(self, cycle_length: int) -> None:
        """Accept pages for a model of such cycles, or raise `ConfigError`."""
        if complete_length(self.page_size, cycle_length) != self.page_size:
            raise ConfigError(
                found=f"page_size={self.page_size} with cycles of {cycle_length} tokens",
                required="pages of whole cycles",
                remedy="choose a multiple of the cycle length",
            )


@dataclass(slots=True)
class Stats:
    """Counts since the engine was made."""

    num_steps: int = 0
    num_parallel_passes: int = 0
    """Steps that read the parallel layers' weights."""
    num_prompt_tokens: int = 0
    """Tokens taken in pieces of more than one."""
    num_new_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """A model ready to decode.

    Args:
        model: A model directory (an export of ours, or a Qwen3 or Llama model), or weights already in memory.
        config: See `EngineConfig`.
        dtype: "float32" (default), "bfloat16" or "float64"; of weights, activations and caches.
        matrix_dtype: "bfloat16" keeps matrices and embeddings so under `dtype="float32"`: half the memory and traffic, and for
            a model stored in bfloat16 the very same numbers. Default: `dtype`.
        device: Default: the accelerator if there is one, else the CPU.
        variant: "vanilla" to decode a DMTD model's weights as an ordinary decoder.

    Raises:
        CheckpointError: The directory is no model that the engine decodes.
        ConfigError: Settings that contradict the model or each other.
        CapabilityError: The device is not there.
    """

    def __init__(
        self,
        model: str | Path | ModelWeights,
        config: EngineConfig = EngineConfig(),
        *,
        dtype: str = "float32",
        matrix_dtype: str | None = None,
        device: str | None = None,
        variant: str | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            found = f"a config of type {type(config).__name__}"
            raise ConfigError(found=found, required="EngineConfig", remedy="write for example EngineConfig(max_batch=8)")
        config.check()
        if not isinstance(model, ModelWeights):
            types = _dtype(dtype), _matrix_dtype(matrix_dtype, dtype)
            model = load_model(model, dtype=types[0], matrix_dtype=types[1], device=_device(device), variant=variant)
        config.check_pages(model.method.cycle_length)
        self.model, self.config, self.method = model, config, model.method
        mode = _step_mode(config, model.device)
        self.pools, self.max_length = _make_pools(model, config, num_scratch_pages=num_scratch_pages(mode, config.max_batch))
        self.prefix_index = PrefixIndex(self.pools, self.method) if config.prefix_caching else None
        self.kernel_note = _native_refusal(model, config)
        """Why native kernels are not used; empty if they are."""
        self.runner = Runner(
            model,
            self.pools,
            num_slots=config.max_batch,
            max_length=self.max_length,
            native=not self.kernel_note,
            mode=mode,
        )
        self.scheduler = Scheduler(
            self.method,
            self.pools,
            num_slots=config.max_batch,
            chunk_tokens=config.chunk_tokens,
            align_heads=config.align_heads,
            prefix_index=self.prefix_index,
        )
        self.stats = Stats()
        self._requests: dict[int, Request] = {}
        self._undelivered: list[Event] = []
        self._next_id = 0

    # Requests.

    def submit(self, prompt_ids: Ids[int], *, max_new_tokens: int, params: SamplingParams = SamplingParams()) -> int:  # noqa: B008
        """Queue a prompt. Returns its id.

        Raises:
            DataError: The prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: A parameter is impossible.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError(
                found=f"params of type {type(params).__name__}",
                required="SamplingParams",
                remedy="write for example params=SamplingParams(temperature=0.8)",
            )
        if not isinstance(max_new_tokens, numbers.Integral) or max_new_tokens < (params.prompt_logprobs is None):
            required = "an integer of at least 1, or 0 for the log probabilities of a prompt"
            raise ConfigError(found=f"max_new_tokens={max_new_tokens!r}", required=required, remedy="change max_new_tokens")
        prompt = self.check_prompt(prompt_ids, max_new_tokens)
        params.check(self.model.shape.vocab_size)
        stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.model.stop_token_ids)))
        tokenizer = self.tokenizer if params.stop else None
        request_id = self._take_id()
        for sample in range(params.n):
            request = Request(
                request_id=request_id,
                sample=sample,
                prompt_length=len(prompt),
                max_new_tokens=max_new_tokens,
                params=params,
                sequence=Sequence(tokens=list(prompt), reuses_prefix=params.prompt_logprobs is None or sample > 0),
                stop_ids=stop_ids,
                stop_strings=StopStrings(tokenizer, params.stop) if tokenizer is not None else None,
            )
            self._requests[id(request.sequence)] = request
            self.scheduler.add(request.sequence)
        return request_id

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `CheckpointError` if it has none."""
        return load_tokenizer(self.model.directory)

    def check_prompt(self, prompt_ids: Ids[int], max_new_tokens: int) -> list[int]:
        """The prompt as a list. Raises `DataError` if it is no list of ids, empty, or too long, or has unknown ids."""
        prompt = _integers(prompt_ids)
        if not prompt:
            raise DataError(found="an empty prompt", required="at least one token", remedy="start with a token, such as bos")
        vocab_size = self.model.shape.vocab_size
        outside = sorted({token for token in prompt if not 0 <= token < vocab_size})
        if outside:
            raise DataError(
                found=f"token ids {outside[:5]} in a prompt",
                required=f"ids from 0 to {vocab_size - 1}",
                remedy="tokenize with the model's own tokenizer",
            )
        total = len(prompt) + max_new_tokens
        if total > self.max_length:
            raise DataError(
                found=f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens}",
                required=f"at most {self.max_length} tokens together",
                remedy="shorten them, or raise max_length or cache_tokens of the engine",
            )
        return prompt

    def cancel(self, request_id: int) -> list[Completion]:
        """Stop every unfinished sample of a request, and free what it holds. Unknown and finished ids give an empty list."""
        found = [request for request in self._requests.values() if request.request_id == request_id]
        return [self._finish(request, "cancelled") for request in found]

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to give."""
        return bool(self._undelivered) or not self.scheduler.is_idle

    def step(self) -> list[Event]:
        """One step of all requests that are due. Returns their new tokens."""
        kept, self._undelivered = self._undelivered, []
        return kept + self._compute_step()

    def generate(
        self,
        prompts: Iterable[Ids[int]],
        *,
        max_new_tokens: int,
        params: SamplingParams | Ids[SamplingParams] = SamplingParams(),  # noqa: B008
    ) -> list[Completion]:
        """Serve a list of prompts, each a list of token ids.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: Length cap of each output.
            params: For all of them, or one for each.

        Returns:
            Completions in the order of the prompts, n for each. A prompt that cannot be served has one, with
            `finish_reason` "refused" and the error as `refusal`; the others are not concerned.
        """
        texts = list(prompts)
        all_params = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
        if len(all_params) != len(texts):
            raise ConfigError(
                found=f"{len(all_params)} sets of parameters for {len(texts)} prompts",
                required="one for all, or one for each",
                remedy="pass as many as there are prompts",
            )
        done: dict[tuple[int, int], Completion] = {}
        order: list[tuple[int, int]] = []
        for prompt, own in zip(texts, all_params):
            try:
                request_id, num_samples = self.submit(prompt, max_new_tokens=max_new_tokens, params=own), own.n
            except DMTDError as refusal:
                request_id, num_samples = self._take_id(), 1
                done[request_id, 0] = _refused(request_id, _shown(prompt), refusal)
            order.extend((request_id, sample) for sample in range(num_samples))
        for event in self._serve({request_id for request_id, _ in order}):
            if event.completion is not None:
                done[event.request_id, event.sample] = event.completion
        return [done[key] for key in order]

    def stream(
        self,
        prompt_ids: Ids[int],
        *,
        max_new_tokens: int,
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> Iterator[Event]:
        """The tokens of one request as they come. Leaving the loop early cancels it. Raises as `submit`."""
        return self._serve({self.submit(prompt_ids, max_new_tokens=max_new_tokens, params=params)})

    def check_integrity(self) -> None:
        """Both pools' laws, and that nothing is held without a reason."""
        self.pools.check_integrity(self.scheduler.owned())
        assert len(self._requests) == len(self.scheduler.waiting) + len(self.scheduler.running)

    # Steps.

    def _serve(self, request_ids: set[int]) -> Iterator[Event]:
        """Events of some requests until they are finished; those of others are kept for the next `step`."""
        try:
            while any(request.request_id in request_ids for request in self._requests.values()):
                for event in self._compute_step():
                    if event.request_id in request_ids:
                        yield event
                    else:
                        self._undelivered.append(event)
        finally:
            for request_id in request_ids:
                self.cancel(request_id)

    def _compute_step(self) -> list[Event]:
        step = self.scheduler.schedule()
        if not step:
            return []
        plan = plan_step(self.method, [scheduled.chunk for scheduled in step])
        for scheduled in step:
            self.runner.set_pages(scheduled.sequence.slot, scheduled.sequence.tables)
        complete = [(row, self._requests[id(part.sequence)]) for row, part in zip(plan.last_rows, step) if part.is_complete]
        last_rows = [row for row, request in complete if request.max_new_tokens]
        if scored := self._scored_rows(step, plan.last_rows):
            logits_FV = self._score(plan, scored, last_rows)
        else:
            logits_FV = self.runner.run(plan, last_rows)
        self._count(step, bool(len(plan.parallel)))
        self.scheduler.finish_step(step)
        advancing = [request for _, request in complete if request.max_new_tokens]
        events = [self._advance(request, choice) for request, choice in zip(advancing, self._choose(logits_FV, advancing))]
        ended = [request for _, request in complete if not request.max_new_tokens]
        return events + [Event(one.request_id, one.sample, None, self._finish(one, "length")) for one in ended]

    def _scored_rows(self, step: list[Scheduled], last_rows: Ids[int]) -> list[tuple[Request, int, range]]:
        """Of prompts whose log probabilities are asked for: the first position that the step takes, and its rows from there."""
        found = []
        for last_row, part in zip(last_rows, step):
            request, chunk = self._requests[id(part.sequence)], part.chunk
            first_row = last_row - (chunk.stop - chunk.start - 1)
            num_rows = min(chunk.stop, request.num_scored) - chunk.start
            if num_rows > 0:
                found.append((request, chunk.start, range(first_row, first_row + num_rows)))
        return found

    def _score(self, plan: StepPlan, scored: list[tuple[Request, int, range]], last_rows: list[int]) -> torch.Tensor:
        """Notes how likely tokens of prompts are. Returns the logits of `last_rows`."""
        rows = sorted({*last_rows, *(row for _, _, own in scored for row in own)})
        place, logits_FV = {row: index for index, row in enumerate(rows)}, self.runner.run(plan, rows)
        for request, start, own in scored:
            logits_KV = logits_FV[place[own[0]] : place[own[0]] + len(own)]
            targets = request.sequence.tokens[start + 1 : start + 1 + len(own)]
            assert request.params.prompt_logprobs is not None, "rows are scored where that is asked for"
            del request.prompt_logprobs[start:]  # of before a preemption
            request.prompt_logprobs += described(logits_KV, targets, num_top=request.params.prompt_logprobs)
        return logits_FV[[place[row] for row in last_rows]]

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _choose(self, logits_FV: torch.Tensor, requests: list[Request]) -> list[Choice]:
        if requests and all(request.params.is_plain_greedy for request in requests):
            return [Choice(token_id) for token_id in logits_FV.argmax(dim=-1).tolist()]
        return [
            choose(logits_V, request.params, request.sequence.tokens, request.prompt_length, sample=request.sample)
            for logits_V, request in zip(logits_FV, requests)
        ]

    def _advance(self, request: Request, choice: Choice) -> Event:
        """Append a token, and finish the request if it ends with it."""
        request.sequence.tokens.append(choice.token_id)
        self.stats.num_new_tokens += 1
        if request.params.logprobs is not None:
            request.logprobs.append(choice)
        reason: FinishReason | None = None
        if choice.token_id in request.stop_ids or (request.stop_strings and request.stop_strings.ends(request.output)):
            reason = "stop"
        elif request.num_output == request.max_new_tokens:
            reason = "length"
        completion = self._finish(request, reason) if reason else None
        return Event(request.request_id, request.sample, choice, completion)

    def _finish(self, request: Request, reason: FinishReason) -> Completion:
        self.stats.num_preemptions += request.sequence.num_preemptions
        self.scheduler.remove(request.sequence)
        del self._requests[id(request.sequence)]
        output = tuple(request.output)
        return Completion(
            request_id=request.request_id,
            sample=request.sample,
            prompt_ids=tuple(request.sequence.tokens[: request.prompt_length]),
            token_ids=output,
            finish_reason=reason,
            text=request.stop_strings.text(output) if request.stop_strings else None,
            logprobs=tuple(request.logprobs),
            prompt_logprobs=tuple(request.prompt_logprobs),
        )

    def _count(self, step: list[Scheduled], ran_parallel: bool) -> None:
        self.stats.num_steps += 1
        self.stats.num_parallel_passes += ran_parallel
        sizes = [scheduled.chunk.stop - scheduled.chunk.start for scheduled in step]
        self.stats.num_prompt_tokens += sum(size for size in sizes if size > 1)


def _integers(prompt_ids: object) -> list[int]:
    """A prompt's ids. Raises `DataError` for a text, a number, or ids that are no integers: none of them is guessed at."""
    remedy = "tokenize the text, and pass a list of such lists"
    if isinstance(prompt_ids, str | bytes) or not isinstance(prompt_ids, Iterable):
        raise DataError(found=f"a prompt of type {type(prompt_ids).__name__}", required="a list of token ids", remedy=remedy)
    tokens = list(prompt_ids)
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise DataError(found=f"a prompt of {tokens[:5]!r}", required="a list of token ids, integers", remedy=remedy) from error


def _shown(prompt: object) -> tuple[int, ...]:
    """The ids of a refused prompt, as far as it has any."""
    try:
        return tuple(_integers(prompt))
    except DataError:
        return ()


def _refused(request_id: int, prompt: tuple[int, ...], refusal: DMTDError) -> Completion:
    return Completion(request_id=request_id, sample=0, prompt_ids=prompt, token_ids=(), finish_reason="refused", refusal=refusal)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(found=f"dtype {name!r}", required=f"one of {sorted(DTYPES)}", remedy="change dtype")
    return DTYPES[name]


def _matrix_dtype(name: str | None, dtype: str) -> torch.dtype | None:
    if name is None or name == dtype:
        return None
    if (name, dtype) != ("bfloat16", "float32"):
        raise ConfigError(
            found=f"matrix_dtype {name!r} with dtype {dtype!r}",
            required="bfloat16 with float32, or the same type",
            remedy="leave matrix_dtype out",
        )
    return torch.bfloat16


def _device(name: str | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    count = torch.accelerator.device_count() if accelerator else 0
    is_here = device is not None and accelerator is not None and device.type == accelerator.type and (device.index or 0) < count
    if device is None or not (is_here or device.type == "cpu"):
        raise CapabilityError(
            found=f"device {name!r}, and {f'{count} of {accelerator.type}' if accelerator else 'no accelerator'} here",
            required="a device of this machine",
            remedy="use device='cpu'",
        )
    return device


def _step_mode(config: EngineConfig, device: torch.device) -> StepMode:
    """Raises `CapabilityError` if graphs are asked for where there are none."""
    if config.cuda_graphs == "on":
        require_cuda(device)
    if config.cuda_graphs == "shapes":
        return "static"
    return "graphs" if device.type == "cuda" and config.cuda_graphs != "off" else "dynamic"


def _native_refusal(model: ModelWeights, config: EngineConfig) -> str:
    """Why the native kernels cannot be used, or are not wanted; empty if they are used."""
    if config.kernels == "torch":
        return "kernels='torch'"
    try:
        NativeOps.check(model.shape, dtype=model.dtype, device=model.device, page_size=config.page_size)
        load_kernels()
    except CapabilityError as error:
        if config.kernels == "native":
            raise
        return error.found
    return ""


def _make_pools(model: ModelWeights, config: EngineConfig, *, num_scratch_pages: int) -> tuple[Pools, int]:
    """The pools, and the length that a request may have."""
    shape, method = model.shape, model.method
    wanted = shape.max_position_embeddings if config.max_length is None else config.max_length
    if not 2 <= wanted <= shape.max_position_embeddings:
        raise ConfigError(
            found=f"max_length={wanted}",
            required=f"from 2 to the model's max_position_embeddings, {shape.max_position_embeddings}",
            remedy="change max_length",
        )
    layers = {"P": shape.num_parallel_layers, "S": shape.num_layers - shape.num_parallel_layers}
    template = PoolShape(
        num_layers=1,
        num_pages=0,
        num_key_value_heads=shape.num_key_value_heads,
        page_size=config.page_size,
        head_dim=shape.head_dim,
    )
    num_pages = _num_pages(config, wanted, template.page_bytes(model.dtype) * shape.num_layers)
    # Blocks of the last cycle may reach past the last token.
    max_length = min(wanted, method.cycle_start(num_pages * config.page_size))
    if config.max_length is not None and max_length < config.max_length:
        raise ConfigError(
            found=f"pools of {num_pages * config.page_size} tokens for max_length={config.max_length}",
            required="room for one request of max_length tokens",
            remedy="raise cache_tokens or cache_bytes, or lower max_length",
        )
    pools = [
        KeyValuePool(
            dataclasses.replace(template, num_layers=count, num_pages=num_pages if count else 0),
            name=name,
            dtype=model.dtype,
            device=model.device,
            num_scratch_pages=num_scratch_pages,
        )
        for name, count in layers.items()
    ]
    return Pools(*pools), max_length


def _num_pages(config: EngineConfig, max_length: int, page_bytes: int) -> int:
    if config.cache_tokens is not None:
        num_pages = config.cache_tokens // config.page_size
    else:
        pages_per_sequence = -(-max_length // config.page_size) + 1
        num_pages = min(config.max_batch * pages_per_sequence, config.cache_bytes // page_bytes)
    if num_pages < 1:
        raise ConfigError(
            found=f"pools of {num_pages} pages of {config.page_size} tokens ({page_bytes} bytes each)",
            required="at least one page",
            remedy="raise cache_tokens or cache_bytes",
        )
    return num_pages
