"""The command that prints masks, and the pictures in the documentation that it printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dmtd.cycle import VARIANTS, decoding_picture, history_picture, mask_picture
from tools.inspect_mask import main

ROOT = Path(__file__).parents[2]
CYCLES_MD = ROOT / "docs" / "cycles.md"


def test_it_prints_the_history_and_the_grid(capsys):
    assert main(["--variant", "causal-refresh", "--cycle-length", "2", "--documents", "4,3"]) == 0
    history = history_picture(4, variant="causal-refresh", cycle_length=2)
    grid = mask_picture([4, 3], variant="causal-refresh", cycle_length=2)
    assert capsys.readouterr().out == f"{history}\n\n{grid}\n"
    assert history == "[11] [10]"


def test_it_prints_the_forward_that_begins_a_cycle_in_decoding(capsys):
    assert main(["--variant", "causal-norefresh", "--cycle-length", "3", "--decode-cycle", "1"]) == 0
    assert capsys.readouterr().out == decoding_picture(1, variant="causal-norefresh", cycle_length=3) + "\n"


def test_a_window_hides_what_lies_before_it(capsys):
    assert main(["--variant", "causal-refresh", "--documents", "12", "--window", "6"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("[11] [1000]\n")
    assert printed.endswith(mask_picture([12], variant="causal-refresh", cycle_length=4, window=6) + "\n")
    assert main(["--variant", "causal-refresh", "--decode-cycle", "2", "--window", "6"]) == 0
    assert capsys.readouterr().out == decoding_picture(2, variant="causal-refresh", cycle_length=4, window=6) + "\n"


def test_it_draws_a_png_on_request(tmp_path, capsys):
    png = tmp_path / "mask.png"
    assert main(["--documents", "4", "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("[1000]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--documents", "8,x"], "found: --documents '8,x'"),
        (["--documents", "0"], "found: --documents '0'"),
        (["--documents", ""], "found: --documents ''"),
        (["--window", "-1"], "found: --window -1"),
        (["--cycle-length", "0"], "found: --cycle-length 0"),
        (["--variant", "vanilla", "--decode-cycle", "0"], "found: --decode-cycle with vanilla"),
        (["--decode-cycle", "0", "--png", "mask.png"], "found: --decode-cycle with --png"),
        (["--png", "no/such/folder/mask.png"], "remedy: create no/such/folder"),
    ],
)
def test_bad_requests_print_nothing_but_what_is_wrong(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_a_picture_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    assert main(["--documents", "4", "--png", str(tmp_path / "folder.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "folder.png: Is a directory" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_an_unknown_variant_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--variant", "sideways"])
    assert exit_info.value.code == 2
    assert "bidirectional-refresh" in capsys.readouterr().err


def test_the_command_runs_as_a_script_and_its_help_shows_examples():
    command = [sys.executable, "tools/inspect_mask.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert "--documents 8,5 --png mask.png" in done.stdout
    assert "each is completed to whole" in " ".join(done.stdout.split())


def console_blocks() -> list[tuple[list[str], str]]:
    """Arguments and printed text of each example of the command in docs/cycles.md."""
    pattern = r"```console\n\$ python tools/inspect_mask\.py ?([^\n]*)\n(.*?)```"
    return [(shlex.split(arguments), output) for arguments, output in re.findall(pattern, CYCLES_MD.read_text(), re.DOTALL)]


def test_the_pictures_in_the_documentation_are_what_the_command_prints_now(capsys):
    blocks = console_blocks()
    assert {arguments[arguments.index("--variant") + 1] for arguments, _ in blocks} == set(VARIANTS)
    for arguments, printed in blocks:
        assert main(arguments) == 0
        assert capsys.readouterr().out == printed, arguments


def test_the_documentation_shows_an_image_of_each_variant():
    images = re.findall(r"!\[[^\]]*\]\((images/[^)]+)\)", CYCLES_MD.read_text())
    assert {Path(image).stem for image in images} == set(VARIANTS)
    for image in images:
        assert (CYCLES_MD.parent / image).read_bytes().startswith(b"\x89PNG")


def test_it_ends_quietly_when_its_reader_leaves():
    """`inspect_mask.py | head -1`"""
    command = f"{shlex.quote(sys.executable)} tools/inspect_mask.py --documents 400 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0" and len(done.stdout.splitlines()) == 2 and done.stderr == ""
