"""The decoder, built from Megatron-Core's parts. Submodules import Megatron: call `platform.prepare_megatron()` first."""
