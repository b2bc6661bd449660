"""The arithmetic of a layer: in torch, and in compiled C."""
