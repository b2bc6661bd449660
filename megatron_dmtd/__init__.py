"""Pretraining, continued training, conversion and decoding of Parallel DMTD language models."""

__version__ = "0.1.0"
