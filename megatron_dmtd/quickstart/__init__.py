"""The whole main job in one command, small: text, tokenizer, two trainings, exports, cycled decoding and a report.

Every step is what the commands in tools/ do; this room orders them, remembers which are finished, and compares the results.
"""
