"""Kernels in C, compiled when an engine is made."""
