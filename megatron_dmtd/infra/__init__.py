"""What every room needs of the operating system, written once: atomic writes, locks, digests, JSON files, refusing disks.

It knows nothing of models, corpora or runs. Where something is the user's to mend, the caller passes the words
(`errors.Refusal`).
"""
