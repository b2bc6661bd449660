from pathlib import Path

import pytest

from megatron_dmtd.errors import CheckpointError, Refusal
from megatron_dmtd.infra.json_files import parse_object, read_object

REFUSAL = Refusal(CheckpointError, required="a model directory", remedy="name one")


def test_an_object_is_read_as_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('{"name": "ä", "n": [1]}'.encode())
    assert read_object(tmp_path / "a.json", REFUSAL) == {"name": "ä", "n": [1]} == parse_object('{"name": "ä", "n": [1]}')


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "it is not a JSON object"),
        (b"null", "it is not a JSON object"),
        (b'{"a": "\xff"}', "can't decode byte"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (None, "No such file"),
    ],
)
def test_anything_else_is_refused_in_the_callers_words(tmp_path: Path, content: bytes | None, found: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=found) as caught:
        read_object(path, REFUSAL)
    assert caught.value.found.startswith(f"{path} cannot be read: ")
    assert (caught.value.required, caught.value.remedy) == ("a model directory", "name one")
