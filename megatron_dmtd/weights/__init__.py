"""Weights between formats: safetensors files, distributed checkpoints, Megatron's names, and live streams between them."""
