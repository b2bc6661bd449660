"""The whole workflow at a small size in one command: text, tokenizer, training, exports, cycled decoding and a report.

Every part is what a command in tools/ does; this package runs them in order, remembers which are finished, and compares the
results.
"""
