"""Offline: documents from files and data sets, tokenised into token files. Training imports only the tokenizer and the checks."""
