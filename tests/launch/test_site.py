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
    image = "nvcr.io#nvidia/pytorch:25.10-py3  # enroot's usual spelling"
    mounts = "'/a b:/a b','/c$d:/é'"
    changes = {"SBATCH_EXTRA": "\"--constraint=a --comment='b c'\"  # two", "CONTAINER_IMAGE": image, "CONTAINER_MOUNTS": mounts}
    path = write(tmp_path, site_text(tmp_path, VENV="", ACCOUNT="me", MIN_FREE_GIB="1234567.25", **changes))
    site = read_site(path)
    assert (site.account, site.sbatch_extra, site.max_restarts) == ("me", "--constraint=a --comment='b c'", 3)
    assert (site.container_image, site.container_mounts) == ("nvcr.io#nvidia/pytorch:25.10-py3", "/a b:/a b,/c$d:/é")
    script = f'source {path}; for name in {" ".join(site.variables())}; do echo "$name=${{!name}}"; done'
    shell = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    assert dict(line.split("=", 1) for line in shell.splitlines()) == site.variables()


def test_settings_that_are_written_are_read_again(tmp_path):
    hard = 'it\'s "a" \\ $HOME `x` #y ~ é *'
    first = read_site(write(tmp_path, site_text(tmp_path, ACCOUNT="'it'\\''s \"a\" \\ $HOME `x` #y ~ é *'")))
    assert first.account == hard
    assert read_site(write(tmp_path, first.assignments())) == first
    script = first.assignments() + 'printf "%s" "$ACCOUNT"'
    assert subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout == hard


def test_a_site_file_may_leave_out_newer_settings(tmp_path):
    text = "".join(f"{line}\n" for line in site_text(tmp_path).splitlines() if not line.startswith(("SETUP_FILE", "RENDEZVOUS")))
    site = read_site(write(tmp_path, text))
    assert (site.setup_file, site.rendezvous) == ("", "hostname")


def test_a_setup_file_alone_may_bring_the_software(tmp_path):
    (tmp_path / "modules.sh").write_text("module load python\n")
    site = read_site(write(tmp_path, site_text(tmp_path, VENV="", SETUP_FILE=tmp_path / "modules.sh")))
    assert (site.venv, site.setup_file) == ("", f"{tmp_path}/modules.sh")


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
    "no-software": (lambda text: text.replace(f"VENV={sys.prefix}", "VENV="), "VENV= and", "set VENV"),
    "setup": (lambda text: text.replace("SETUP_FILE=", "SETUP_FILE=/nowhere"), "SETUP_FILE=/nowhere", "correct SETUP_FILE"),
    "rendezvous": (lambda text: text.replace("RENDEZVOUS=hostname", "RENDEZVOUS=dns"), "RENDEZVOUS=dns", "correct RENDEZVOUS"),
    "underscore": (lambda text: text.replace("MAX_RESTARTS=3", "MAX_RESTARTS=1_0"), "MAX_RESTARTS=1_0", "correct MAX_RESTARTS"),
    "octal": (lambda text: text.replace("MAX_RESTARTS=3", "MAX_RESTARTS=010"), "MAX_RESTARTS=010", "correct MAX_RESTARTS"),
    "extra": (lambda text: text.replace("SBATCH_EXTRA=", "SBATCH_EXTRA='\"a'"), "a quote", "correct SBATCH_EXTRA"),
    "windows": (lambda text: text.replace("\n", "\r\n"), "line ends of Windows", "save it without"),
    "mark": (lambda text: "\ufeff" + text, "byte order mark", "save it without"),
    "home": (lambda text: text.replace("ACCOUNT=", "ACCOUNT=~"), "~ outside quotes: ACCOUNT=~", "single quotes"),
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


@pytest.mark.parametrize(("name", "folder"), [("WORK_DIR", "50%"), ("WORK_DIR", "a\\b"), ("PROJECT_DIR", "a:b")])
def test_a_path_that_would_mean_something_else_is_refused(name, folder, tmp_path):
    path = tmp_path / folder
    (path / "tools").mkdir(parents=True)
    (path / "tools/train.py").touch()
    text = site_text(tmp_path, **{name: f"'{path}'"}) if name != "WORK_DIR" else site_text(f"'{path}'")
    with pytest.raises(ConfigError) as refusal:
        read_site(write(tmp_path, text))
    assert f"{name}={path} with " in refusal.value.found and "symbolic link" in refusal.value.remedy


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "site.env"
    path.write_bytes(b"ACCOUNT=\xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_site(path)
