"""The site file: read without a shell as bash reads it, and refused by name when it is wrong."""

import subprocess
import sys

import pytest

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.launch.site import read_site
from tests.slurm.conftest import site_text


def write(tmp_path, text: str):
    path = tmp_path / "site.env"
    path.write_text(text)
    return path


def test_a_site_file_means_the_same_to_bash_and_to_us(tmp_path):
    path = write(tmp_path, site_text(tmp_path, SBATCH_EXTRA='"--constraint=a --reservation=b"  # two', ACCOUNT="me"))
    site = read_site(path)
    assert (site.account, site.sbatch_extra, site.max_restarts) == ("me", "--constraint=a --reservation=b", 3)
    script = f'source {path}; for name in {" ".join(site.variables())}; do echo "$name=${{!name}}"; done'
    shell = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    assert dict(line.split("=", 1) for line in shell.splitlines()) == site.variables()


def test_the_lines_for_a_job_bring_every_value_through_bash(tmp_path):
    site = read_site(write(tmp_path, site_text(tmp_path, SBATCH_EXTRA='"--comment=it\'s"')))
    script = site.assignments() + 'printf "%s" "$SBATCH_EXTRA"'
    assert subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout == "--comment=it's"


WRONG = {
    "unknown": (lambda text: text + "PARTITON=x\n", "unknown setting PARTITON", "did you mean"),
    "unlike-any": (lambda text: text + "ZZZZ=x\n", "unknown setting ZZZZ", "remove the line"),
    "missing": (lambda text: text.replace("MAX_RESTARTS=3", ""), "no MAX_RESTARTS", "copy the lines"),
    "command": (lambda text: text.replace("ACCOUNT=", "ACCOUNT=$(whoami)"), "ACCOUNT=$(whoami)", "write the value itself"),
    "spaces": (lambda text: text.replace("QOS=", "QOS = a"), "QOS = a", "write the value itself"),
    "quote": (lambda text: text.replace("QOS=", 'QOS="a'), 'QOS="a', "write the value itself"),
    "number": (lambda text: text.replace("MAX_RESTARTS=3", "MAX_RESTARTS=few"), "MAX_RESTARTS=few", "correct MAX_RESTARTS"),
    "negative": (lambda text: text.replace("MIN_FREE_GIB=0.01", "MIN_FREE_GIB=-1"), "MIN_FREE_GIB=-1", "correct MIN_FREE_GIB"),
    "zero": (lambda text: text.replace("EXPECTED_MFU=0.35", "EXPECTED_MFU=0"), "EXPECTED_MFU=0", "correct EXPECTED_MFU"),
    "two-softwares": (lambda text: text.replace("CONTAINER_IMAGE=", "CONTAINER_IMAGE=a.sqsh"), "CONTAINER_IMAGE=a.sqsh", "empty"),
    "no-software": (lambda text: text.replace(f"VENV={sys.prefix}", "VENV="), "VENV= and", "empty"),
    "venv": (lambda text: text.replace(f"VENV={sys.prefix}", "VENV=/nowhere"), "VENV=/nowhere", "correct VENV"),
    "work": (lambda text: text.replace("WORK_DIR=/", "WORK_DIR=/nowhere/"), "WORK_DIR=/nowhere", "correct WORK_DIR"),
    "relative": (lambda text: text.replace("WORK_DIR=/", "WORK_DIR="), "WORK_DIR=", "correct WORK_DIR"),
    "project": (
        lambda text: text.replace("PROJECT_DIR=/", "PROJECT_DIR=/nowhere/"),
        "PROJECT_DIR=/nowhere",
        "correct PROJECT_DIR",
    ),
}


@pytest.mark.parametrize(("change", "found", "remedy"), WRONG.values(), ids=WRONG)
def test_a_wrong_site_file_is_refused_by_name(change, found, remedy, tmp_path):
    good = site_text(tmp_path)
    assert change(good) != good
    with pytest.raises(ConfigError) as refusal:
        read_site(write(tmp_path, change(good)))
    assert found in refusal.value.found and remedy in refusal.value.remedy


def test_an_absent_site_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        read_site(tmp_path / "site.env")


def test_a_container_needs_no_virtual_environment(tmp_path):
    text = site_text(tmp_path, VENV="", CONTAINER_IMAGE="image.sqsh")
    assert read_site(write(tmp_path, text)).container_image == "image.sqsh"
