"""The GPU or CPU that Megatron runs on."""

from megatron_dmtd.platform.device import Platform, current_platform, prepare_megatron

__all__ = ["Platform", "current_platform", "prepare_megatron"]
