"""Hugging Face's names of a decoder's tensors: Llama's, which Qwen, Mistral and the published DMTD checkpoints have too."""

from __future__ import annotations

from megatron_dmtd.architecture import DecoderSpec, TensorShape, decoder_tensors, tensors

HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"

_WHOLE = {
    f"{tensors.EMBEDDING}.weight": TABLE,
    f"{tensors.FINAL_NORM}.weight": "model.norm.weight",
    f"{tensors.HEAD}.weight": HEAD,
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


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor, from the one that `architecture.tensors` gives it."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, layer, part = name.split(".", 2)
    part, kind = part.rsplit(".", 1)
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def hf_tensors(decoder: DecoderSpec) -> dict[str, TensorShape]:
    """Name and shape of every tensor of a decoder, in the order of its layers."""
    return {hf_name(name): shape for name, shape in decoder_tensors(decoder).items()}
