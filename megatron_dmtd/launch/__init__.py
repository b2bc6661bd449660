"""Launching under Slurm: site settings, batch scripts, preflight checks, and the limit on restarts.

Slurm runs the plain scripts of examples/slurm. This room reads and checks them, and does what bash cannot do.
"""
