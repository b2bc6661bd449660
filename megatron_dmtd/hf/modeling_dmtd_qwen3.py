"""Parallel DMTD decoders in plain torch: the training forward pass and cycled decoding behind Hugging Face's interface.

This slow and simple implementation travels with every exported model as remote code. It imports torch, transformers and its
exported siblings, and does not depend on Megatron. Weight names are exactly those of transformers' Qwen3.

Source: megatron_dmtd's docs/method.md, sections 1 to 5, for `DMTDQwen3Model._prompt` (any number of tokens at once), and
docs/method.md, sections 6 to 10, for `_step` (one token).

Shape legend: B rows, W columns of the caller's ids, R selected entries of them or rows at a cycle head, N slots of a row (of one
stream, or of both), C cycle length, X hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .configuration_dmtd_qwen3 import DMTDQwen3Config, refusal
from .dmtd_cache import DMTDCache
from .dmtd_cycles import cycle_start, is_cycle_head, phase, shadow_ids
from .dmtd_layers import DMTDQwen3DecoderLayer, DMTDQwen3RMSNorm, KeyValueExchange, Pass, RotaryAngles
from .dmtd_slots import Columns, CompleteLayout, Slots, Visibility, complete_layout, read_columns

logger = logging.get_logger(__name__)
#: Output field of the cache: transformers renamed `past_key_values` to `cache` in 5.x.
CACHE_FIELD = "cache" if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
#: Arguments that transformers' loops pass along and that have no effect here.
IGNORED_ARGUMENTS = {
    "cache_position",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "num_items_in_batch",
    "tokenizer",  # which `generate` takes for `stop_strings`
}
#: `generate` options that need a cache that can be rolled back, has a fixed size, or accepts a prompt in chunks.
REFUSED_GENERATION = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "prefill_chunk_size",
    "inputs_embeds",
)


class DMTDQwen3PreTrainedModel(PreTrainedModel):
    """What transformers needs to know about these models."""

    config: DMTDQwen3Config
    config_class = DMTDQwen3Config
    base_model_prefix = "model"
    _no_split_modules = ["DMTDQwen3DecoderLayer"]  # noqa: RUF012 - the type that transformers expects
    _supports_sdpa = True
    supports_gradient_checkpointing = True


class DMTDQwen3Model(DMTDQwen3PreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: DMTDQwen3Config) -> None:
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DMTDQwen3DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = DMTDQwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._angles = RotaryAngles(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DMTDCache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: DMTDCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, W, X]` after the final norm; zeros at padding. Arguments as `DMTDQwen3ForCausalLM.forward`."""
        check_arguments(input_ids, inputs_embeds, kwargs)
        assert input_ids is not None
        if self._is_checkpointing():
            use_cache = refuse_cache(cache, past_key_values, use_cache)
        cache = choose_cache(cache, past_key_values, use_cache, self.config)
        if cache is None or not cache.lengths:
            columns = read_columns(input_ids, attention_mask, position_ids)
            if cache is not None:
                check_prompt(columns)
            hidden_BWX = self._prompt(input_ids, columns, cache)
        else:
            check_continuation(cache, input_ids, attention_mask, position_ids)
            hidden_BWX = torch.cat([self._step(ids_B, cache) for ids_B in input_ids.unbind(dim=1)], dim=1)
        fields: dict[str, Any] = {CACHE_FIELD: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_BWX), **fields)

    def _is_checkpointing(self) -> bool:
        """Whether the layers of this call are computed again in the backward pass."""
        is_enabled = any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)
        return is_enabled and self.training and torch.is_grad_enabled()

    # Any number of tokens at once: docs/method.md, sections 1 to 5.

    def _prompt(self, input_ids_BW: torch.Tensor, columns: Columns, cache: DMTDCache | None) -> torch.Tensor:
        """Hidden states `[B, W, X]` by the training rules; an empty `cache` is filled in passing."""
        if cache is not None:
            cache.lengths, cache.num_columns = columns.lengths(), input_ids_BW.shape[1]
        layout = complete_layout(input_ids_BW, columns, self.config)
        parallel_BNX = self._parallel_prompt(layout, cache)
        if cache is not None:
            self._keep_current_cycle(layout, parallel_BNX, cache)
        hidden_BWX = self.embed_tokens(input_ids_BW) + layout.take_columns(parallel_BNX)
        row_R, column_R = columns.is_token_BW.nonzero(as_tuple=True)

        def exchange(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if cache is not None:
                position_R, capacity = columns.position_BW[row_R, column_R], max(cache.lengths)
                token_R = row_R.to(key.device), column_R.to(key.device)
                tokens_k, tokens_v = key[token_R], value[token_R]
                cache.write(layer, tokens_k, tokens_v, row=row_R, position=position_R, capacity=capacity)
            return key, value

        hidden_BWX = self._sequential(hidden_BWX, columns.slots(), columns.slots(), exchange)
        return hidden_BWX.masked_fill(~columns.is_token_BW.to(hidden_BWX.device)[:, :, None], 0.0)

    def _parallel_prompt(self, layout: CompleteLayout, cache: DMTDCache | None) -> torch.Tensor:
        """Shadow hidden states `[B, N, X]` after the last parallel layer.

        With history "real" both streams go through each layer together. Only later cycles read a real slot, so documents of one
        cycle have none.
        """
        num_slots = layout.tokens_BN.shape[1]
        ids_BN, slots = self._shadow_ids(layout.tokens_BN, layout.position_BN), layout.slots(is_real=False)
        num_real = 0
        if self.config.dmtd_history_mode == "real" and bool((layout.position_BN >= self.config.mtp_horizon).any()):
            num_real = num_slots
            ids_BN = torch.cat([layout.tokens_BN, ids_BN], dim=1)
            slots = layout.slots(is_real=True).followed_by(slots)
        persistent = slice(0, num_real if self.config.dmtd_history_mode == "real" else num_slots)
        row_B1 = torch.arange(len(ids_BN), device=ids_BN.device)[:, None]
        position_1N = torch.arange(num_slots, device=ids_BN.device)[None]

        def exchange(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if cache is not None and persistent.stop:
                kept_k, kept_v = key[:, persistent], value[:, persistent]
                cache.write(layer, kept_k, kept_v, row=row_B1, position=position_1N, capacity=num_slots)
            return key, value

        return self._parallel(self.embed_tokens(ids_BN), slots, slots, exchange, num_real=num_real)

    def _keep_current_cycle(self, layout: CompleteLayout, parallel_BNX: torch.Tensor, cache: DMTDCache) -> None:
        """Save the shadow hidden states and the tokens of each row's last cycle (docs/method.md, section 6.2)."""
        cycle_length = self.config.mtp_horizon
        start_B = torch.tensor([cycle_start(length - 1, cycle_length) for length in cache.lengths])
        slot_BC = (start_B[:, None] + torch.arange(cycle_length)).to(parallel_BNX.device)
        row_B1 = torch.arange(len(slot_BC), device=slot_BC.device)[:, None]
        cache.shadow_hidden_BCX = parallel_BNX[row_B1, slot_BC]
        cache.cycle_ids_BC = layout.tokens_BN[row_B1, slot_BC]

    # One token: docs/method.md, sections 6 to 10.

    def _step(self, ids_B: torch.Tensor, cache: DMTDCache) -> torch.Tensor:
        """Hidden states `[B, 1, X]` of one more token per row."""
        heads = [row for row, length in enumerate(cache.lengths) if is_cycle_head(length, self.config.mtp_horizon)]
        if heads:
            self._parallel_step(ids_B, torch.tensor(heads, device=ids_B.device), cache)
        assert cache.shadow_hidden_BCX is not None and cache.cycle_ids_BC is not None
        row_B = torch.arange(len(ids_B), device=ids_B.device)
        position_B = torch.tensor(cache.lengths, device=ids_B.device)
        phase_B = phase(position_B, self.config.mtp_horizon)
        cache.cycle_ids_BC[row_B, phase_B] = ids_B
        cache.lengths = [length + 1 for length in cache.lengths]
        cache.num_columns += 1
        num_keys = max(cache.lengths)
        hidden_BX = self.embed_tokens(ids_B) + cache.shadow_hidden_BCX[row_B, phase_B]

        def exchange(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cache.write(layer, key, value, row=row_B[:, None], position=position_B[:, None], capacity=num_keys)
            return cache.read(layer, row_R=row_B, length=num_keys)

        query = Slots.of(torch.zeros_like(position_B)[:, None], position_B[:, None], is_real=True)
        keys = stored_slots(len(ids_B), num_keys, is_real=True, device=ids_B.device)
        return self._sequential(hidden_BX[:, None], query, keys, exchange)

    def _parallel_step(self, ids_B: torch.Tensor, row_R: torch.Tensor, cache: DMTDCache) -> None:
        """Compute the shadow block of the rows that are at a cycle head, and save its hidden states.

        With history "real" the cycle that has just ended goes through the same pass as real tokens, ahead of the block: its K and
        V are added to the cache, the block's are not (docs/method.md, section 7.3). With history "shadow" the block's are added
        (docs/method.md, section 8.2).
        """
        assert cache.shadow_hidden_BCX is not None and cache.cycle_ids_BC is not None
        cycle_length, is_real = self.config.mtp_horizon, self.config.dmtd_history_mode == "real"
        start_R1 = torch.tensor(cache.lengths, device=ids_B.device)[row_R][:, None]
        position_RN = start_R1 + torch.arange(cycle_length, device=ids_B.device)
        document_RN = torch.zeros_like(position_RN)
        block = Slots.of(document_RN, position_RN, is_real=False)
        ids_RN = self._shadow_ids(ids_B[row_R][:, None], position_RN)
        slots, written_RN, num_real = block, position_RN, 0
        if is_real:
            written_RN, num_real = position_RN - cycle_length, cycle_length
            slots = Slots.of(document_RN, written_RN, is_real=True).followed_by(block)
            ids_RN = torch.cat([cache.cycle_ids_BC[row_R], ids_RN], dim=1)
        num_stored = int(written_RN.max()) + 1

        def exchange(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept_k, kept_v = key[:, :cycle_length], value[:, :cycle_length]
            cache.write(layer, kept_k, kept_v, row=row_R[:, None], position=written_RN, capacity=num_stored)
            stored_k, stored_v = cache.read(layer, row_R=row_R, length=num_stored)
            return torch.cat([stored_k, key[:, cycle_length:]], dim=1), torch.cat([stored_v, value[:, cycle_length:]], dim=1)

        keys = stored_slots(len(row_R), num_stored, is_real=is_real, device=ids_B.device)
        keys = keys.followed_by(block) if is_real else keys
        block_RCX = self._parallel(self.embed_tokens(ids_RN), slots, keys, exchange, num_real=num_real)
        cache.shadow_hidden_BCX[row_R] = block_RCX

    # Both.

    def _shadow_ids(self, tokens_BN: torch.Tensor, position_BN: torch.Tensor) -> torch.Tensor:
        cycle_length, mask_token_id = self.config.mtp_horizon, self.config.mask_token_id
        return shadow_ids(tokens_BN, position_BN, cycle_length=cycle_length, mask_token_id=mask_token_id)

    def _pass(self, hidden: torch.Tensor, queries: Slots, keys: Slots, exchange: KeyValueExchange) -> Pass:
        cos_BND, sin_BND = self._angles(queries.position_BN, hidden.dtype)
        visibility = Visibility(queries, keys, self.config)
        return Pass(cos_BND=cos_BND, sin_BND=sin_BND, visibility=visibility, exchange=exchange)

    def _parallel(
        self, hidden_BNX: torch.Tensor, queries: Slots, keys: Slots, exchange: KeyValueExchange, *, num_real: int
    ) -> torch.Tensor:
        """The parallel layers. The first `num_real` slots end at the last layer's K and V; the hidden states of the others are
        returned, on the device of the input.
        """
        run, device = self._pass(hidden_BNX, queries, keys, exchange), hidden_BNX.device
        *earlier, last = self.layers[: self.config.num_parallel_layers]
        for layer in earlier:
            hidden_BNX = layer(hidden_BNX, run)
        return last(hidden_BNX, run, num_key_only=num_real).to(device)

    def _sequential(self, hidden_BNX: torch.Tensor, queries: Slots, keys: Slots, exchange: KeyValueExchange) -> torch.Tensor:
        run = self._pass(hidden_BNX, queries, keys, exchange)
        for layer in self.layers[self.config.num_parallel_layers :]:
            hidden_BNX = layer(hidden_BNX, run)
        return hidden_BNX


def stored_slots(num_rows: int, num_stored: int, *, is_real: bool, device: torch.device) -> Slots:
    """Entries `[num_rows, num_stored]` of a cache as key slots: entry j holds position j.

    Rows differ in length, and those shorter than the longest have entries not yet written. These all lie after the positions that
    the row's queries may see, so the visibility rule hides them without special treatment.
    """
    position_RN = torch.arange(num_stored, device=device).expand(num_rows, -1)
    return Slots.of(torch.zeros_like(position_RN), position_RN, is_real=is_real)


class DMTDQwen3ForCausalLM(DMTDQwen3PreTrainedModel, GenerationMixin):
    """The decoder and its head."""

    # transformers 5 reads the mapping; 4 reads its keys.
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the type that transformers expects

    def __init__(self, config: DMTDQwen3Config) -> None:
        super().__init__(config)
        self.model = DMTDQwen3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DMTDCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: DMTDCache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """Next-token logits, as in training, or for one or more further tokens of cycled decoding.

        Args:
            input_ids: Token ids `[B, W]`.
            attention_mask: `[B, W]`, 0 at padding, which is never seen; positions count from each row's first token.
            position_ids: `[B, W]`; each 0 starts a document of a packed row. Without them, each row is one document.
            past_key_values: Older name of `cache`.
            inputs_embeds: Refused: the shadow stream needs ids.
            labels: `[B, W]`, -100 where there is no target; shifted here, as everywhere in transformers. First tokens of
                documents and padding are never targets.
            use_cache: Return a cache that further calls continue. Default: only if one is passed.
            logits_to_keep: Compute logits only for this many of the last columns (or for these columns); 0 means all.
            cache: A `DMTDCache`, empty or returned by an earlier call.
            kwargs: `num_items_in_batch` for the loss, and `return_dict`.

        Returns:
            `loss`, `logits` `[B, W, V]` (padding columns hold no prediction) and the cache.

        Raises:
            ValueError: The call asks for something that these models cannot do; the message says what to do instead.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise refusal(found="labels and logits_to_keep", required="logits of every column for a loss", remedy="leave one out")
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            inputs_embeds=inputs_embeds,
            cache=cache,
            **kwargs,
        )
        hidden_BWX = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep.to(hidden_BWX.device)
        logits_BWV = self.lm_head(hidden_BWX[:, kept])
        loss = None
        if labels is not None:
            assert input_ids is not None
            targets_BW = real_targets(labels, read_columns(input_ids, attention_mask, position_ids))
            items = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits_BWV, targets_BW, vocab_size=self.vocab_size, num_items_in_batch=items)
        result = CausalLMOutputWithPast(loss=loss, logits=logits_BWV, **{CACHE_FIELD: getattr(output, CACHE_FIELD)})
        return result if kwargs.get("return_dict") is not False else result.to_tuple()

    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        """Transformers' `generate`, in cycles: greedy, sampling and beam search, with every logits processor and stopping
        criterion.

        Raises:
            ValueError: An option would need a cache that can be rolled back, has a fixed size, or accepts a prompt in chunks.
        """
        config = generation_config or self.generation_config
        for name in REFUSED_GENERATION:
            value = kwargs[name] if name in kwargs else getattr(config, name, None)
            if value is not None:
                raise refusal(
                    found=f"generate({name}=...)",
                    required="whole prompts of token ids, then one token after the other, with this model's own cache",
                    remedy=f"leave out {name}",
                )
        return super().generate(inputs, generation_config, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: `generate` leaves it to `forward` to create the cache, since no other kind works."""
        return False


def check_arguments(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, others: dict) -> None:
    """Refuse arguments that the forward pass cannot handle, by name."""
    if inputs_embeds is not None:
        raise refusal(
            found="inputs_embeds", required="input_ids: MASK ids stand between the cycle heads", remedy="pass input_ids"
        )
    if input_ids is None or input_ids.dim() != 2:
        shape = None if input_ids is None else tuple(input_ids.shape)
        raise refusal(found=f"input_ids of shape {shape}", required="ids [rows, columns]", remedy="pass input_ids")
    for name in ("output_attentions", "output_hidden_states"):
        if others.get(name):
            raise refusal(
                found=f"{name}=True", required="False: slots of two streams are not columns", remedy=f"leave out {name}"
            )
    unknown = sorted(name for name, value in others.items() if name not in IGNORED_ARGUMENTS and value is not None)
    if unknown:
        raise refusal(found=f"arguments {unknown}", required="arguments of forward", remedy="leave them out")


def choose_cache(
    cache: DMTDCache | None, past_key_values: DMTDCache | None, use_cache: bool | None, config: DMTDQwen3Config
) -> DMTDCache | None:
    """The cache that a call fills or continues, if any."""
    if cache is not None and past_key_values is not None:
        raise refusal(found="cache and past_key_values", required="one cache", remedy="leave out past_key_values, the older name")
    cache = cache if cache is not None else past_key_values
    if cache is None:
        return DMTDCache(config) if use_cache else None
    if not isinstance(cache, DMTDCache):
        raise refusal(
            found=f"a cache of type {type(cache).__name__}",
            required="a DMTDCache: parallel and sequential layers keep different tokens",
            remedy="leave the cache out with use_cache=True; the output holds one",
        )
    if use_cache is False:
        raise refusal(found="a cache and use_cache=False", required="one or the other", remedy="leave out the cache")
    return cache


def refuse_cache(cache: DMTDCache | None, past_key_values: DMTDCache | None, use_cache: bool | None) -> bool | None:
    """`use_cache` of a pass with gradient checkpointing: as in transformers' models, a new cache is left out with a warning."""
    if cache is not None or past_key_values is not None:
        raise refusal(
            found="a cache in a training pass with gradient checkpointing",
            required="no cache: the backward pass would write it again and lose the gradients through it",
            remedy="leave out the cache, call gradient_checkpointing_disable(), or decode under torch.no_grad() or in eval()",
        )
    if use_cache:
        logger.warning_once("`use_cache=True` has no effect in training with gradient checkpointing: no cache is returned.")
        return False
    return use_cache


def check_prompt(columns: Columns) -> None:
    """Refuse prompts that cannot fill a cache: packed rows, empty rows, padding on the right."""
    if int(columns.document_BW.max()) > 0:
        raise refusal(
            found="a row of several documents (position_ids restart at 0) and a cache",
            required="one document per row to decode",
            remedy="give each document its own row, or leave out use_cache",
        )
    if not bool(columns.is_token_BW[:, -1].all()):
        raise refusal(
            found="padding in the last column of a prompt",
            required="prompts that end in the last column: padding goes on the left",
            remedy="set padding_side='left' on the tokenizer",
        )


def check_continuation(
    cache: DMTDCache, input_ids_BW: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> None:
    """Refuse columns that do not follow what the cache holds."""
    rows, columns = input_ids_BW.shape
    if rows != len(cache.lengths):
        raise refusal(found=f"{rows} rows", required=f"the cache's {len(cache.lengths)}", remedy="start a new cache")
    if attention_mask is not None and not bool((attention_mask[:, -columns:] != 0).all()):
        raise refusal(
            found="padding after the first call with a cache", required="tokens only", remedy="put padding left of the prompt"
        )
    expected = torch.tensor(cache.lengths)[:, None] + torch.arange(columns)
    if position_ids is not None and not torch.equal(position_ids.cpu().expand(rows, -1), expected):
        raise refusal(
            found=f"position_ids {position_ids.tolist()}",
            required=f"positions that follow the cache's: {expected.tolist()}",
            remedy="leave out position_ids",
        )


def real_targets(labels_BW: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Labels, without those that no token of the same document precedes."""
    follows_BW = columns.is_token_BW & (columns.position_BW > 0)
    return labels_BW.masked_fill(~follows_BW.to(labels_BW.device), -100)


__all__ = ["DMTDQwen3ForCausalLM", "DMTDQwen3Model", "DMTDQwen3PreTrainedModel"]
