"""From documents to batches: sources, tokenising, token files, packing and resumable loading."""
