"""What all rooms need from the operating system, written once: atomic writes, locks, digests, JSON files, disk errors.

It knows nothing about models, corpora or runs. For problems that the user has to fix, the caller passes the message
(`errors.Refusal`).
"""
