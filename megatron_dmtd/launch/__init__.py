"""Launching under Slurm: settings of a site, batch scripts, preflight, and when a job may restart.

Slurm runs the plain scripts of examples/slurm; this room reads and checks them, and answers the questions that bash cannot.
"""
