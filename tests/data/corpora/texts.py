"""Files of lines, plain and compressed, and the documents that an input holds."""

import bz2
import gzip
import json
import lzma
import pickle

from megatron_dmtd.data.corpora.inputs import BLOCK_BYTES
from megatron_dmtd.data.corpora.sources import open_inputs

LINES = [json.dumps({"text": f"line {i} é"}, ensure_ascii=False) for i in range(1, 60)]
CONTENT = ("\n".join(LINES[:30]) + "\n\n  \n" + "\r\n".join(LINES[30:])).encode()  # blank lines, \r, no line end at the end


def zstd(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": lambda data: bz2.compress(data, 1), ".xz": lzma.compress, ".zst": zstd}
COMPRESSED = [suffix for suffix in PACKERS if suffix]


def write(tmp_path, data, suffix="", name="a.jsonl"):
    path = tmp_path / (name + suffix)
    path.write_bytes(PACKERS[suffix](data))
    return path


def entries(path, *, block_bytes=BLOCK_BYTES, keys=None):
    (one,) = open_inputs([str(path)], keys=keys)
    # through pickle, as blocks travel to workers
    blocks = [pickle.loads(pickle.dumps(block)) for block in one.blocks(block_bytes)]
    return [entry for block in blocks for entry in block.entries()], blocks, one
