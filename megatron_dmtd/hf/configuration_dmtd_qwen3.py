"""Configuration of Parallel DMTD decoders in Hugging Face's format.

The file travels with every exported model as remote code: it may import only transformers and its exported siblings.
"""

from __future__ import annotations

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .dmtd_cycles import VARIANTS

HISTORY_MODES = tuple(sorted({history for history, _ in VARIANTS.values()}))
BLOCK_ATTENTIONS = tuple(sorted({block for _, block in VARIANTS.values()}))

#: Defaults of every runtime of the family for fields that a config.json omits; those of transformers' Qwen3 differ.
FAMILY_DEFAULTS = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
ROPE_THETA = 1_000_000.0
#: Kinds of attention in `layer_types`.
FULL, SLIDING = "full_attention", "sliding_attention"


def refusal(*, found: str, required: str, remedy: str) -> ValueError:
    """The error for everything that these files refuse: what was found, what is required, what to do."""
    return ValueError(f"found: {found}\nrequired: {required}\nremedy: {remedy}")


class DMTDQwen3Config(Qwen3Config):
    """Shape of a decoder, as in Qwen3's configuration, and of its cycles.

    Args:
        mtp_horizon: Tokens per cycle, at least 1.
        num_parallel_layers: The first layers, which run once per cycle on `[head, MASK, ...]`.
        num_sequential_layers: The other layers, which run once per token on `Embed(token) + parallel hidden state`.
        mask_token_id: The id that stands for a token not yet known.
        dmtd_history_mode: What earlier cycles look like to the parallel layers: `"shadow"` (the default) or `"real"`.
        dmtd_block_attention: Attention among the slots of one cycle: `"causal"` (the default) or `"bidirectional"`.
        qk_norm: RMSNorm on each query and key head: true for Qwen3-like decoders, false for Llama-like ones.
        attention_output_bias: Bias of the attention's output projection. Left out: as `attention_bias`, which is that of queries,
            keys and values.
        kwargs: The fields of `Qwen3Config`. `num_hidden_layers` may be omitted: it is the sum of both kinds of layers. Other
            fields default to those of Qwen3-4B, as in every runtime of this family.

    Raises:
        ValueError: The fields contradict each other, or ask for something that these models do not have.
    """

    model_type = "dmtdqwen3"
    # transformers' tensor and pipeline plans have not been applied to the two-stream attention.
    base_model_tp_plan = {}  # noqa: RUF012 - the type that transformers expects
    base_model_pp_plan = {}  # noqa: RUF012

    def __init__(
        self,
        mtp_horizon: int = 4,
        num_parallel_layers: int = 28,
        num_sequential_layers: int = 8,
        mask_token_id: int = 151660,
        dmtd_history_mode: str | None = None,
        dmtd_block_attention: str | None = None,
        qk_norm: bool = True,
        attention_output_bias: bool | None = None,
        **kwargs,
    ) -> None:
        kwargs.setdefault("num_hidden_layers", num_parallel_layers + num_sequential_layers)
        if not any(kwargs.get(name) for name in ("rope_theta", "rope_parameters", "rope_scaling")):
            kwargs["rope_theta"] = ROPE_THETA
        self._refuse_other_methods(kwargs)
        super().__init__(**{**FAMILY_DEFAULTS, **kwargs})
        self.mtp_horizon = mtp_horizon
        self.num_parallel_layers = num_parallel_layers
        self.num_sequential_layers = num_sequential_layers
        self.mask_token_id = mask_token_id
        self.dmtd_history_mode = "shadow" if dmtd_history_mode is None else dmtd_history_mode
        self.dmtd_block_attention = "causal" if dmtd_block_attention is None else dmtd_block_attention
        self.qk_norm = qk_norm
        self.attention_output_bias = self.attention_bias if attention_output_bias is None else attention_output_bias
        self.check()

    @staticmethod
    def _refuse_other_methods(fields: dict) -> None:
        """Older DMTD models have no look-ahead block; the names of their layer groups tell them apart."""
        named = [name for name in ("num_encoding_layers", "num_thinking_layers", "num_decoding_layers") if fields.get(name)]
        if named:
            raise refusal(
                found=" and ".join(named),
                required="num_parallel_layers and num_sequential_layers: these models look ahead in every cycle",
                remedy="load the model with the code it was published with",
            )

    def layer_window(self, layer: int) -> int | None:
        """Keys that a query of a layer sees at most, itself included; None: all that the cycles show it."""
        kinds = getattr(self, "layer_types", None)  # transformers before 4.53 has none
        if kinds is None:
            return self.sliding_window if self.use_sliding_window and layer >= self.max_window_layers else None
        return self.sliding_window if kinds[layer] == SLIDING else None

    def check(self) -> None:
        """Accept the fields as they stand, or raise `ValueError`. The model calls it too, since fields can be assigned later."""
        self._check_cycles()
        self._check_decoder()

    def _check_cycles(self) -> None:
        if self.mtp_horizon < 1:
            raise refusal(
                found=f"mtp_horizon={self.mtp_horizon}", required="at least 1 token per cycle", remedy="set mtp_horizon"
            )
        parallel, sequential = self.num_parallel_layers, self.num_sequential_layers
        if parallel < 1 or sequential < 1 or parallel + sequential != self.num_hidden_layers:
            raise refusal(
                found=f"num_parallel_layers={parallel}, num_sequential_layers={sequential}, "
                f"num_hidden_layers={self.num_hidden_layers}",
                required="at least one layer of each kind, and a sum of num_hidden_layers",
                remedy="set the three fields to one split",
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise refusal(
                found=f"mask_token_id={self.mask_token_id}, vocab_size={self.vocab_size}",
                required="an id inside the vocabulary",
                remedy="set mask_token_id to an id that never occurs as text",
            )
        for name, known in (("dmtd_history_mode", HISTORY_MODES), ("dmtd_block_attention", BLOCK_ATTENTIONS)):
            if getattr(self, name) not in known:
                raise refusal(found=f"{name}={getattr(self, name)!r}", required=f"one of {known}", remedy=f"set {name}")

    def _check_decoder(self) -> None:
        if self.num_key_value_heads is None or self.num_attention_heads % self.num_key_value_heads:
            raise refusal(
                found=f"num_attention_heads={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads}",
                required="query heads in whole groups per key and value head",
                remedy="set num_key_value_heads to a divisor of num_attention_heads",
            )
        for kind in getattr(self, "layer_types", None) or ():
            is_windowed = kind == SLIDING
            if kind not in (FULL, SLIDING) or (is_windowed and not self.sliding_window):
                raise refusal(
                    found=f"{kind!r} in layer_types with sliding_window={self.sliding_window}",
                    required=f"{FULL!r}, or {SLIDING!r} with use_sliding_window=True and a sliding_window of 1 or more",
                    remedy="set the three fields to one choice",
                )
        if self.attention_dropout:
            raise refusal(found=f"attention_dropout={self.attention_dropout}", required="0.0", remedy="set attention_dropout=0.0")


__all__ = ["DMTDQwen3Config"]
