from pathlib import Path

import pytest

from megatron_dmtd.data.batches.manifest import Manifest, dump_manifest, manifest_path, read_manifest
from megatron_dmtd.errors import DataError

MANIFEST = Manifest(
    num_documents=2,
    num_tokens=9,
    skipped_counts={"not UTF-8": 1},
    skipped=["é.py"],
    dtype="uint16",
    max_token_id=8,
    vocab_size=300,
    eos_token_id=0,
    pad_token_id=1,
    mask_token_id=2,
    tokenizer_sha256="ab",
    source="a folder",
    split="train",
    heldout_fraction=0.1,
    shard="1/2",
    order="blocks",
    source_sha256="01",
    block_bytes=5,
    first_source=3,
    loss="assistant",
    bin_sha256="cd",
    sources=[{"name": "a", "num_bytes": 3, "sha256": "ef"}],
)


def test_a_manifest_survives_the_round_trip(tmp_path):
    prefix = str(tmp_path / "v1.5")
    manifest_path(prefix).write_text(dump_manifest(MANIFEST), encoding="utf-8")
    assert Path(prefix + ".json").is_file()
    assert read_manifest(prefix) == MANIFEST


def test_corpora_of_other_tools_have_no_manifest(tmp_path):
    assert read_manifest(str(tmp_path / "corpus")) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"num_documents": 2}', '"text"'])
def test_a_damaged_manifest_is_refused_by_name(tmp_path, text):
    prefix = str(tmp_path / "corpus")
    manifest_path(prefix).write_text(text)
    with pytest.raises(DataError, match=r"corpus\.json"):
        read_manifest(prefix)
