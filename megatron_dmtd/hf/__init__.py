"""Parallel DMTD decoders for Hugging Face transformers. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_dmtd.hf.configuration_dmtd_qwen3 import DMTDQwen3Config
from megatron_dmtd.hf.dmtd_cache import DMTDCache
from megatron_dmtd.hf.modeling_dmtd_qwen3 import DMTDQwen3ForCausalLM, DMTDQwen3Model, DMTDQwen3PreTrainedModel

AutoConfig.register(DMTDQwen3Config.model_type, DMTDQwen3Config)
AutoModel.register(DMTDQwen3Config, DMTDQwen3Model)
AutoModelForCausalLM.register(DMTDQwen3Config, DMTDQwen3ForCausalLM)

__all__ = ["DMTDCache", "DMTDQwen3Config", "DMTDQwen3ForCausalLM", "DMTDQwen3Model", "DMTDQwen3PreTrainedModel"]
