"""Hugging Face's names of a decoder's tensors.

Two spellings exist: Llama's, which Qwen, Mistral and the published DMTD checkpoints have too, and Dory's, for normalized
decoders, in which attention and feed-forward part of a layer are numbered apart: layer i has the sublayers 2i and 2i + 1.
"""

from __future__ import annotations

from megatron_dmtd.architecture import DecoderSpec, TensorShape, decoder_tensors, tensors

HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"

_WHOLE = {
    f"{tensors.EMBEDDING}.weight": TABLE,
    f"{tensors.FINAL_NORM}.weight": "model.norm.weight",
    f"{tensors.HEAD}.weight": HEAD,
    f"{tensors.INJECTION}.weight": "model.injection.weight",
}
_PARTS = {
    tensors.ATTENTION_NORM: "input_layernorm",
    tensors.QUERY: "self_attn.q_proj",
    tensors.KEY: "self_attn.k_proj",
    tensors.VALUE: "self_attn.v_proj",
    tensors.QUERY_NORM: "self_attn.q_norm",
    tensors.KEY_NORM: "self_attn.k_norm",
    tensors.OUTPUT: "self_attn.o_proj",
    tensors.MLP_NORM: "post_attention_layernorm",
    tensors.GATE: "mlp.gate_proj",
    tensors.UP: "mlp.up_proj",
    tensors.DOWN: "mlp.down_proj",
}

_DORY_WHOLE = {
    f"{tensors.EMBEDDING}.weight": "backbone.embeddings.weight",
    f"{tensors.HEAD}.weight": HEAD,
    f"{tensors.LOGIT_SCALE}.weight": "lm_head.logit_scale",
}
#: of sublayer 2i
_DORY_ATTENTION = {
    tensors.QUERY: "mixer.q_proj.weight",
    tensors.KEY: "mixer.k_proj.weight",
    tensors.VALUE: "mixer.v_proj.weight",
    tensors.ATTENTION_GATE: "mixer.g_proj.weight",
    tensors.OUTPUT: "mixer.o_proj.weight",
    tensors.QUERY_SCALE: "mixer.sqk",
    tensors.ATTENTION_GATE_SCALE: "mixer.s_gate",
    tensors.ATTENTION_STEP: "attn_alpha",
}
#: of sublayer 2i + 1
_DORY_MLP = {
    tensors.GATE: "mixer.gate_proj.weight",
    tensors.UP: "mixer.up_proj.weight",
    tensors.DOWN: "mixer.down_proj.weight",
    tensors.GATE_SCALE: "mixer.suv_gate",
    tensors.UP_SCALE: "mixer.suv_up",
    tensors.MLP_STEP: "mlp_alpha",
}


def is_spelled_as_dory(decoder: DecoderSpec) -> bool:
    """Whether a decoder's tensors have Dory's names."""
    return decoder.layers[0].attention_step is not None


def hf_name(name: str, decoder: DecoderSpec) -> str:
    """Hugging Face's name of a tensor, from the one that `architecture.tensors` gives it."""
    whole = _DORY_WHOLE if is_spelled_as_dory(decoder) else _WHOLE
    if name in whole:
        return whole[name]
    _, layer, part = name.split(".", 2)
    part, kind = part.rsplit(".", 1)
    if not is_spelled_as_dory(decoder):
        return f"model.layers.{layer}.{_PARTS[part]}.{kind}"
    sublayer = 2 * int(layer) + (part in _DORY_MLP)
    return f"backbone.layers.{sublayer}.{_DORY_MLP.get(part) or _DORY_ATTENTION[part]}"


def hf_tensors(decoder: DecoderSpec) -> dict[str, TensorShape]:
    """Name and shape of every tensor of a decoder, in the order of its layers."""
    return {hf_name(name, decoder): shape for name, shape in decoder_tensors(decoder).items()}
