"""What a node says about itself: real values of this machine, and nvidia-smi's failures by what a stand-in program answers."""

import pytest
import torch

from megatron_dmtd.launch import health
from megatron_dmtd.platform.device import Platform


def test_this_machine_multiplies_rightly_and_has_versions_and_space(tmp_path):
    gflops, is_right = health.multiply(Platform(device=torch.device("cpu"), backend="gloo"))
    assert is_right and gflops > 0.1
    assert health.versions()["torch"] == torch.__version__
    assert health.free_gib(str(tmp_path)) > 0


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'Unable to determine the device handle' >&2; exit 9", "Unable to determine the device handle"),
        ("sleep 5", "does not answer"),
    ],
    ids=["broken-driver", "hangs"],
)
def test_an_nvidia_smi_that_fails_is_a_fault_of_the_node(script, error, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(health, "_NVIDIA_SMI_S", 0.5)
    gpus, errors = health.read_gpus()
    assert gpus == () and error in errors[0]


def test_an_nvidia_smi_that_answers_is_read(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 570.1, 30, 0, 0, Not Active'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpus, errors = health.read_gpus()
    assert errors == () and [gpu.name for gpu in gpus] == ["NVIDIA H200"]


def test_a_node_without_nvidia_smi_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert health.read_gpus() == ((), ())
