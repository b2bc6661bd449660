"""Every script of examples/slurm: shellcheck, and settings that exist."""

import os
import re
import shutil
import subprocess

import pytest

from tests.slurm.conftest import ROOT, SITE_FILE

FOLDER = ROOT / "examples" / "slurm"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch"), SITE_FILE])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    if shutil.which("shellcheck") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("shellcheck is not installed (apt-get install shellcheck)")
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(
        ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", str(path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_every_setting_of_the_site_is_used_and_explained():
    names = re.findall(r"^([A-Z_]+)=\S*(.*)$", SITE_FILE.read_text(), re.MULTILINE)
    assert len(names) == 22
    sources = [*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch"), *(ROOT / "megatron_dmtd/launch").glob("*.py")]
    users = "".join(path.read_text() for path in [*sources, ROOT / "tools/launch.py"])
    for name, explanation in names:
        assert "#" in explanation, name
        assert re.search(rf"\b({name}|site\.{name.lower()})\b", users), name


def test_every_script_is_in_the_runbook():
    text = (ROOT / "docs" / "slurm.md").read_text()
    assert not [path.name for path in SCRIPTS if path.name not in text and "train-qwen3-4b" not in path.name]
    assert "train-qwen3-4b-" in text
