"""Attention over the real and shadow streams, by interchangeable backends."""

from megatron_dmtd.attention.protocol import AttentionBackend, StreamLayout
from megatron_dmtd.attention.select import make_backend, select_backend

__all__ = ["AttentionBackend", "StreamLayout", "make_backend", "select_backend"]
