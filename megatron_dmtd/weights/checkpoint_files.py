"""Names inside a checkpoint's step directory, besides those of the `torch_dist` format. No torch."""

#: the whole configuration of the run
CONFIG_FILE = "config.yaml"
#: Megatron writes this file last
METADATA_FILE = "metadata.json"
#: the tokenizer of a model that was imported from one file, and has no other home
TOKENIZER_FOLDER = "tokenizer"
