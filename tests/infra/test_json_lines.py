import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.errors import ConfigError, Refusal
from megatron_dmtd.infra.json_lines import append, ends_torn, read_lines, to_line
from tests.support.disks import small_disk

REFUSAL = Refusal(ConfigError, required="one object a line", remedy="move the file away")


def test_numbers_that_json_lacks_are_written_as_strings() -> None:
    line = to_line({"step": 1, "loss": float("nan"), "norm": float("-inf"), "lr": 0.5, "name": "x"})
    assert line == '{"step": 1, "loss": "nan", "norm": "-inf", "lr": 0.5, "name": "x"}\n'


def test_lines_are_read_back_without_a_torn_last_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with open(path, "ab", buffering=0) as file:
        for step in (1, 2):
            append(file, to_line({"step": step}))
        assert not ends_torn(path)
        file.write(b'{"step": 3')
    assert ends_torn(path)
    assert read_lines(path, lambda values: values["step"], REFUSAL) == [1, 2]


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"other": 1}', '{"step": "x"}', '{"step": null}'])
def test_a_line_that_is_none_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n' + line + "\n")

    def parse(values: dict[str, Any]) -> int:
        return int(values["step"])

    with pytest.raises(ConfigError) as caught:
        read_lines(tmp_path / "log.jsonl", parse, REFUSAL)
    assert caught.value.found == f"{tmp_path / 'log.jsonl'}, line 2: {line!r}"


def test_a_line_that_a_disk_takes_in_part_is_taken_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=8k") as disk, open(disk / "log.jsonl", "ab", buffering=0) as file:
        append(file, to_line({"step": 1}))
        with pytest.raises(OSError, match="No space left on device"):
            append(file, to_line({"step": 2, "text": "x" * 20_000}))
        append(file, to_line({"step": 2}))
        assert [json.loads(line)["step"] for line in (disk / "log.jsonl").read_text().splitlines()] == [1, 2]
