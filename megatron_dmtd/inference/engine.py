"""Decode many requests at once with Parallel DMTD and vanilla models.

    engine = Engine("exported")
    for completion in engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=64):
        print(completion.token_ids, completion.finish_reason)

`generate` serves a list; `submit`, `step` and `cancel` serve requests that come and go. A request that cannot be served is
refused without affecting others. Nothing here imports Megatron.

The work is done elsewhere: settings in `config`, making the parts in `assembly`, checks of requests in `admission`, the step loop
in `steps`, the end of a request in `completion`, new weights in `updates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megatron_dmtd.errors import ConfigError, DataError, DMTDError
from megatron_dmtd.inference.admission import check_length_cap, check_params, checked_ids, checked_prompt, token_ids_of
from megatron_dmtd.inference.assembly import make_store, native_refusal, product_note, step_mode
from megatron_dmtd.inference.cache_ops.admission import check_decoder, edited_sequence, evicted, timeline_of
from megatron_dmtd.inference.cache_ops.pages import StorePages
from megatron_dmtd.inference.cache_ops.program import CacheState, Timeline
from megatron_dmtd.inference.cache_ops.tree import CacheTree
from megatron_dmtd.inference.completion import refused
from megatron_dmtd.inference.config import EngineConfig, checked_config
from megatron_dmtd.inference.detokenizer import Detokenizer, TokenDecoder
from megatron_dmtd.inference.devices import device_of, dtype_of, matrix_dtype_of
from megatron_dmtd.inference.kv.prefix import PrefixIndex
from megatron_dmtd.inference.loading import load_model
from megatron_dmtd.inference.loops import KVMode, Pieces, check_arguments, checked_chunk, request_loops, scheduled_with, shared
from megatron_dmtd.inference.requests import Completion, Event, Request
from megatron_dmtd.inference.runner import Runner, num_scratch_pages
from megatron_dmtd.inference.sampling_params import SamplingParams
from megatron_dmtd.inference.scheduler import Scheduler, Sequence
from megatron_dmtd.inference.stats import Stats
from megatron_dmtd.inference.steps import StepLoop
from megatron_dmtd.inference.text import load_tokenizer
from megatron_dmtd.inference.updates import Tensors, WeightUpdate, incomplete
from megatron_dmtd.inference.weights import ModelWeights


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
        num_loops: How often looped layers run, unless a request says otherwise (docs/loops.md). Default: as the model says.
        kv_mode: "per_loop" or "last_loop", what is cached of looped layers. Default: as the model says.
        prefill_chunk: Most tokens of a prompt computed at once, in place of the config's `chunk_tokens`; with "last_loop" a
            prompt is computed in pieces of exactly so many.

    Raises:
        ModelError: The directory's configuration is missing, or of a model that is not computed here.
        ConversionError: Its weights are damaged, or not exactly those of its configuration.
        ConfigError: Settings that contradict the model or each other.
        CapabilityError: The device is not there.
    """

    def __init__(
        self,
        model: str | Path | ModelWeights,
        config: EngineConfig = EngineConfig(),  # noqa: B008
        *,
        dtype: str = "float32",
        matrix_dtype: str | None = None,
        device: str | None = None,
        variant: str | None = None,
        num_loops: int | None = None,
        kv_mode: KVMode | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        config = checked_config(config)
        check_arguments(num_loops, kv_mode, prefill_chunk)
        if isinstance(model, ModelWeights):
            model = replace(model, schedule=scheduled_with(model.schedule, num_loops, kv_mode))
        else:
            model = load_model(
                model,
                dtype=dtype_of(dtype),
                matrix_dtype=matrix_dtype_of(matrix_dtype, dtype),
                device=device_of(device),
                variant=variant,
                num_loops=num_loops,
                kv_mode=kv_mode,
            )
        config.check_pages(model.method.cycle_length)
        self.model, self.config, self.method = model, config, model.method
        self.prefill_chunk = checked_chunk(prefill_chunk, config.chunk_tokens, model.schedule.decoder, model.method)
        """Most tokens of a prompt computed at once; exactly so many where numbers depend on them."""
        mode = step_mode(config, model.device)
        self.store, self.max_length = make_store(model, config, num_scratch_pages=num_scratch_pages(mode, config.max_batch))
        shares_places = shared(model.schedule.decoder) is not None
        # Where loops share places, reading a cycle again would write over what others read meanwhile, loop by loop.
        caches_prefixes = config.prefix_caching and (self.method.is_vanilla or not shares_places)
        self.prefix_index = PrefixIndex(self.store) if caches_prefixes else None
        self.tree = CacheTree(StorePages(self.store), drop_aware=config.drop_aware_eviction) if config.prefix_caching else None
        self.kernel_note = native_refusal(model, config)
        """Why native kernels are not used; empty if they are."""
        self.product_note = product_note(model, config, self.kernel_note)
        """Why products in bfloat16 are slow here; empty if there are none, or if they are not."""
        self.runner = Runner(
            model,
            self.store,
            num_slots=config.max_batch,
            max_length=self.max_length,
            native=not self.kernel_note,
            bf16_products=config.bf16_products,
            mode=mode,
        )
        self.scheduler = Scheduler(
            self.store,
            num_slots=config.max_batch,
            chunk_tokens=self.prefill_chunk,
            align_heads=config.align_heads,
            prefix_index=self.prefix_index,
            tree=self.tree,
        )
        self._loop = StepLoop(self.scheduler, self.runner)
        self._undelivered: list[Event] = []
        self._next_id = 0
        self._incomplete: DMTDError | None = None
        """Why the weights are incomplete after a failed update; None if they are complete."""

    @property
    def stats(self) -> Stats:
        """Counts since the engine was made."""
        return self._loop.stats

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `CheckpointError` if it has none."""
        return load_tokenizer(self.model.directory)

    @cached_property
    def token_decoder(self) -> TokenDecoder:
        """From ids to text. Raises as `tokenizer`."""
        return TokenDecoder(self.tokenizer)

    # Requests that come and go.

    def submit(
        self,
        prompt_ids: Ids[int],
        *,
        max_new_tokens: int,
        params: SamplingParams = SamplingParams(),  # noqa: B008
        cache: object = None,
    ) -> int:
        """Queue a prompt. Returns its id.

        Args:
            prompt_ids: Token ids.
            max_new_tokens: Length cap of the output.
            params: How tokens are chosen.
            cache: A list of cache operations in JSON form (docs/cache_operations.md), or None.

        Raises:
            DataError: The prompt is empty, too long, or has ids outside the vocabulary, or a cache operation is wrong.
            ConfigError: A parameter is impossible.
        """
        decoder = self.model.schedule.decoder
        check_params(params, decoder.vocab_size)
        loops = request_loops(decoder, params.num_loops)
        check_length_cap(max_new_tokens, params)
        prompt = self.check_prompt(prompt_ids, max_new_tokens) if cache is None else self._checked_ids(prompt_ids)
        length = None if shared(decoder) is None else self.prefill_chunk
        pieces = Pieces(prompt_length=len(prompt), loops=loops, length=length)
        sequences = [
            Sequence(tokens=list(prompt), reuses_prefix=params.prompt_logprobs is None or sample > 0, pieces=pieces)
            for sample in range(params.n)
        ]
        if cache is not None:
            self._add_operations(sequences, max_new_tokens, cache)
        stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.model.stop_token_ids)))
        texts = self.token_decoder if params.stop or params.detokenize else None
        request_id = self._take_id()
        requests = [
            Request(
                request_id=request_id,
                sample=sample,
                prompt_length=len(prompt),
                max_new_tokens=max_new_tokens,
                params=params,
                sequence=sequence,
                stop_ids=stop_ids,
                text=Detokenizer(texts, prompt, params.stop) if texts is not None else None,
            )
            for sample, sequence in enumerate(sequences)
        ]
        for request in requests:
            self._loop.add(request)
        return request_id

    def _checked_ids(self, prompt_ids: object) -> list[int]:
        return checked_ids(prompt_ids, self.model.schedule.decoder.vocab_size)

    def _add_operations(self, sequences: Ids[Sequence], max_new_tokens: int, cache: object) -> None:
        """Give the samples of a request their cache operations."""
        pieces, schedule = sequences[0].pieces, self.model.schedule
        check_decoder(schedule)
        timeline = timeline_of(cache, pieces.prompt_length, max_new_tokens, schedule, prefix_key=pieces.prefix_key)
        for sequence in sequences:
            sequence.edited = edited_sequence(
                timeline,
                sequence.tokens,
                max_new_tokens,
                store=self.store,
                tree=self.tree if pieces.length is None else None,
                max_length=self.max_length,
                computes_all=not sequence.reuses_prefix or pieces.length is not None,
            )

    def check_prompt(self, prompt_ids: Ids[int], max_new_tokens: int) -> list[int]:
        """The prompt as a list. Raises `DataError` if it is no list of ids, empty, or too long, or has unknown ids."""
        return checked_prompt(
            prompt_ids, max_new_tokens, vocab_size=self.model.schedule.decoder.vocab_size, max_length=self.max_length
        )

    def cancel(self, request_id: int) -> list[Completion]:
        """Stop every unfinished sample of a request, and free its pages. Unknown and finished ids give an empty list."""
        return self._loop.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        return bool(self._undelivered) or not self.scheduler.is_idle

    def step(self) -> list[Event]:
        """One step of all requests that are due. Returns their new tokens."""
        kept, self._undelivered = self._undelivered, []
        return kept + self._step()

    # Weights that change.

    @property
    def weights_version(self) -> int:
        """Version of the current weights: 0 for the initial ones, then what `update_weights` returns."""
        return self._loop.weights_version

    def update_weights(
        self,
        tensors: Tensors,
        *,
        running: Literal["recompute", "keep"] = "recompute",
        version: int | None = None,
        staging: bool = True,
    ) -> int:
        """Take new weights between two steps, in place of the old ones. Cached prefixes of the old ones are forgotten.

        Args:
            tensors: Every tensor of the model once under Hugging Face's name, as `weights.streams` and `training.live` give
                them, in any order; or a mapping of them. Types are converted to the engine's.
            running: What happens to requests that have begun. "recompute": their tokens so far are kept and their K and V are
                computed again, so that they continue as in a fresh engine. "keep": they continue with the K and V, and the
                current cycle, that the old weights have computed; no other request will use those.
            version: Number of the new weights. Default: one more than before.
            staging: Copy a stream, and write nothing before all of it is known to be right; a second model's memory meanwhile.
                False: write each tensor as it comes.

        Returns:
            The new version.

        Raises:
            ConfigError: An argument is impossible.
            CheckpointError: The tensors are not those of this model. The old ones stay in force; only without staging, a stream
                that ends early or turns out to be wrong leaves an engine that refuses to decode until it has complete weights.
        """
        if running not in ("recompute", "keep"):
            raise ConfigError(found=f"running={running!r}", required="'recompute' or 'keep'", remedy="change running")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise ConfigError(found=f"version={version!r}", required="an integer, or None", remedy="change version")
        update = WeightUpdate(self.model, staging=staging)
        try:
            update.take(tensors)
        except BaseException as error:
            if update.has_begun:
                self._incomplete = incomplete(error)
            raise
        self._incomplete = None
        self.scheduler.change_weights(recompute=running == "recompute")
        self._loop.weights_version = self.weights_version + 1 if version is None else version
        return self.weights_version

    def check_integrity(self) -> None:
        """Check every group of pages, and that nothing is held without a reason."""
        self._loop.check_integrity()

    # Requests served to their end.

    def generate(
        self,
        prompts: Iterable[Ids[int]],
        *,
        max_new_tokens: int,
        params: SamplingParams | Ids[SamplingParams] = SamplingParams(),  # noqa: B008
        cache: Iterable[object] | None = None,
    ) -> list[Completion]:
        """Serve a list of prompts, each a list of token ids.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: Length cap of each output.
            params: For all of them, or one for each.
            cache: Cache operations of each prompt, see `submit`; None for some prompts, or for all.

        Returns:
            Completions in the order of the prompts, n for each. A prompt that cannot be served has one, with
            `finish_reason` "refused" and the error as `refusal`; the others are not affected.
        """
        texts = list(prompts)
        all_params = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
        if len(all_params) != len(texts):
            raise ConfigError(
                found=f"{len(all_params)} sets of parameters for {len(texts)} prompts",
                required="one for all, or one for each",
                remedy="pass as many as there are prompts",
            )
        programs = [None] * len(texts) if cache is None else list(cache) if isinstance(cache, Iterable) else [cache]
        if len(programs) != len(texts):
            raise ConfigError(
                found=f"cache operations for {len(programs)} prompts, and {len(texts)} prompts",
                required="for each prompt a list of operations or None",
                remedy="pass as many as there are prompts",
            )
        done: dict[tuple[int, int], Completion] = {}
        order: list[tuple[int, int]] = []
        for prompt, own, program in zip(texts, all_params, programs):
            try:
                request_id = self.submit(prompt, max_new_tokens=max_new_tokens, params=own, cache=program)
                num_samples = own.n
            except DMTDError as refusal:
                request_id, num_samples = self._take_id(), 1
                done[request_id, 0] = refused(request_id, _shown(prompt), refusal)
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
        cache: object = None,
    ) -> Iterator[Event]:
        """The tokens of one request as they come. Leaving the loop early cancels it. Raises as `submit`."""
        return self._serve({self.submit(prompt_ids, max_new_tokens=max_new_tokens, params=params, cache=cache)})

    def score(self, token_ids: Ids[int], *, cache: object = None, num_loops: int | None = None) -> list[float]:
        """Log probability of each token of a text but its first: entry i is that of token i + 1, predicted at position i.

        Args:
            token_ids: The text.
            cache: Cache operations, see `submit`; the tokens after one are predicted from what it leaves.
            num_loops: See `SamplingParams`.

        Raises:
            DataError: The text is empty, too long, or has ids outside the vocabulary, or a cache operation is wrong.
        """
        params = SamplingParams(prompt_logprobs=0, num_loops=num_loops)
        (event,) = self.stream(token_ids, max_new_tokens=0, params=params, cache=cache)
        assert event.completion is not None
        return [choice.logprob for choice in event.completion.prompt_logprobs if choice.logprob is not None]

    # What cache operations do.

    def cache_state(self, token_ids: Ids[int], *, cache: object = None) -> CacheState:
        """What is active after a text and the operations up to its end; with cycles, those whose cycle head is reached.

        Computes nothing. Raises as `submit`.
        """
        tokens = self._checked_ids(token_ids)
        return self._timeline(tokens, cache).state(len(tokens))

    def _timeline(self, tokens: Ids[int], cache: object) -> Timeline:
        (loops,) = request_loops(self.model.schedule.decoder, None)
        return timeline_of([] if cache is None else cache, len(tokens), 0, self.model.schedule, prefix_key=loops)

    def evict(self, token_ids: Ids[int], raw_indices: Iterable[int], *, cache: object = None) -> int:
        """Forget the K and V of some raw tokens of a text that was served with these operations; their path stays. For tests.

        Returns:
            How many of them were cached.

        Raises:
            DataError: As `submit`, or an index is not one of the text.
        """
        tokens = self._checked_ids(token_ids)
        timeline = self._timeline(tokens, cache)
        return evicted(self.tree, timeline, tokens, raw_indices)

    def _serve(self, request_ids: set[int]) -> Iterator[Event]:
        """Events of some requests until they are finished; those of others are kept for the next `step`."""
        try:
            while self._loop.is_serving(request_ids):
                events = self._step()
                # Before anything is yielded: whoever leaves the loop here must not take the others' events along.
                self._undelivered += [event for event in events if event.request_id not in request_ids]
                yield from (event for event in events if event.request_id in request_ids)
        finally:
            for request_id in request_ids:
                self.cancel(request_id)

    def _step(self) -> list[Event]:
        if self._incomplete is not None:
            raise self._incomplete
        return self._loop.step()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _shown(prompt: object) -> tuple[int, ...]:
    """The ids of a refused prompt, as far as it has any."""
    try:
        return tuple(token_ids_of(prompt))
    except DataError:
        return ()
