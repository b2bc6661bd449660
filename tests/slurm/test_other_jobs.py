"""Everything but training on a real Slurm: placement of ranks, ports, arrays, refusals, dependencies."""

import json
import re
from pathlib import Path

import httpx
import numpy as np
import pytest

from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.tokenizer import train_bpe
from tests.slurm.conftest import ROOT, SMALL
from tests.support.slurm import wait_until
from tests.tools.text_model import save_text_model
from tools.preprocess import main as preprocess

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

#: what a training job does before its trainer, and then what each rank got
_RANKS_JOB = """#!/bin/bash
# Prints what each rank got.
#SBATCH --job-name=ranks
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:05:00

# shellcheck source=site.env
source "${SITE_FILE:-examples/slurm/site.env}"

OPTIONS=(
)

source "$PROJECT_DIR/examples/slurm/environment.sh"
export MASTER_PORT="$(free_port)"
"${ON_RANKS[@]}" --output="$LOG_DIR/rank-%4t.log" bash "$PROJECT_DIR/examples/slurm/rank.sh" bash -c '
    echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $(hostname) $MASTER_PORT $OMP_NUM_THREADS $CUDA_VISIBLE_DEVICES"
    touch "present-$SLURM_JOB_ID"
    for try in {1..600}; do
        if (($(ls | grep -c present-) == 2)); then exit; fi # both jobs are here at once
        sleep 0.2
    done
    exit 1'
"""


def submit_ranks_job(workplace, *sbatch: str) -> str:
    path = workplace.folder / "ranks.sbatch"
    path.write_text(_RANKS_JOB)
    return workplace.launch(str(path), *(f"--sbatch={option}" for option in sbatch))


def rank_lines(workplace, job_id: str) -> list[list[str]]:
    return [path.read_text().split() for path in sorted(workplace.log_dir(job_id).glob("rank-*.log"))]


def test_ranks_follow_the_nodes_and_jobs_on_the_same_hosts_meet_at_other_ports(workplace):
    common = ("--nodelist=node[1,3]", "--cpus-per-task=3", "--gpus-per-node=2", "--mem=1G")
    jobs = [submit_ranks_job(workplace, *common) for _ in range(2)]
    records = [workplace.finish(job_id) for job_id in jobs]
    assert [record["JobState"] for record in records] == ["COMPLETED", "COMPLETED"]
    lines = [rank_lines(workplace, job_id) for job_id in jobs]
    for ranks in lines:
        placed = [[rank, local, size, local_size, host] for rank, local, size, local_size, host, *_ in ranks]
        assert placed == [
            ["0", "0", "4", "2", "node1"],
            ["1", "1", "4", "2", "node1"],
            ["2", "0", "4", "2", "node3"],
            ["3", "1", "4", "2", "node3"],
        ]
        assert {threads for *_, threads, _ in ranks} == {"3"}
        assert {len(gpus.split(",")) for *_, gpus in ranks} == {2}, "every rank of a node sees all its GPUs"
    ports = [{line[5] for line in ranks} for ranks in lines]
    assert [len(one) for one in ports] == [1, 1] and ports[0] != ports[1]
    assert all(15000 <= int(port) < 31000 for (port,) in ports)


def text_files(folder: Path, *, count: int) -> None:
    for index in range(count):
        words = [f"word{(index * 31 + line * 7) % 97}" for line in range(200)]
        lines = [json.dumps({"text": " ".join(words[start : start + 20])}) for start in range(0, 200, 5)]
        (folder / f"part{index}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def texts(workplace):
    """Four files of documents and a tokenizer, in the work folder."""
    folder = workplace.folder / "raw"
    folder.mkdir()
    text_files(folder, count=4)
    train_bpe(["word1 word2 word33"] * 5, vocab_size=300, output_dir=workplace.folder / "tokenizer")
    return ["--input", f"{folder}/*.jsonl", "--tokenizer", str(workplace.folder / "tokenizer")]


def test_an_array_writes_the_bytes_of_one_process(workplace, texts):
    """Four tasks of one file each: their token files, one after the other, are that of a single process."""
    options = ["--output", "data/corpus", "--no-progress"]
    small = [f"--sbatch={option}" for option in ("--array=0-3", "--cpus-per-task=1", "--mem=1G")]
    job_id = workplace.launch("preprocess.sbatch", *small, "--replace-options", "--", *texts, *options)
    for task in range(4):
        record = workplace.finish(f"{job_id}_{task}")
        assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0")
    single = str(workplace.folder / "single")
    assert preprocess([*texts, "--output", single, "--no-progress", "--workers", "1"]) == 0
    shards = [str(workplace.folder / f"data/corpus-{task:05d}-of-00004") for task in range(4)]
    joined = b"".join(Path(shard + ".bin").read_bytes() for shard in shards)
    assert joined == Path(single + ".bin").read_bytes() and len(joined) > 1000
    lengths = np.concatenate([TokenFile(shard).document_lengths_U for shard in shards])
    assert lengths.tolist() == TokenFile(single).document_lengths_U.tolist() and len(lengths) == 160


def test_a_server_answers_at_the_address_that_the_job_gives_until_it_is_cancelled(workplace):
    model = save_text_model(workplace.folder / "model")
    small = ["--sbatch=--cpus-per-task=1", "--sbatch=--mem=2G", "--replace-options", "--", str(model), "--device", "cpu"]
    job_id = workplace.launch("serve.sbatch", *small)

    def answer() -> dict | None:
        try:
            address = (workplace.log_dir(job_id) / "address").read_text().strip()
            port = address.removesuffix("/v1").split(":")[-1]  # the nodes are namespaces of this host
            return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "ab", "max_tokens": 5}).json()
        except (OSError, ValueError, httpx.TransportError):
            return None

    wait_until(lambda: answer() is not None, what="an answer", timeout_s=90)
    assert answer()["usage"]["completion_tokens"] == 5
    workplace.cluster.call("scancel", job_id)
    assert workplace.finish(job_id)["JobState"] == "CANCELLED"
    assert answer() is None


REFUSED = {
    "partition": ("CPU_PARTITION=main", "CPU_PARTITION=mian", "Slurm: sbatch: error: invalid partition specified: mian"),
    "setting": ("MAX_RESTARTS=3", "MAX_RESTART=3", "unknown setting MAX_RESTART"),
    "folder": ("WORK_DIR=", "WORK_DIR=/nowhere", "WORK_DIR=/nowhere"),
    "option": (
        "SBATCH_EXTRA=",
        "SBATCH_EXTRA=--constraint=h100",
        "Invalid feature specification",
    ),
}


@pytest.mark.parametrize(("old", "new", "found"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_site_file_is_refused_before_submission(old, new, found, workplace):
    site = workplace.folder / "site.env"
    text = site.read_text()
    site.write_text(re.sub(f"^{re.escape(old)}", new, text, flags=re.MULTILINE))
    assert site.read_text() != text
    error = workplace.launch("train-cpu.sbatch", "--sbatch=--cpus-per-task=1", "--", *SMALL, check=False)
    assert found in error and "remedy: " in error
    assert workplace.cluster.call("squeue", "-h").stdout == ""
    assert not (workplace.folder / "slurm-logs").exists()


def test_a_job_whose_predecessor_fails_is_cancelled(workplace):
    """The chain of pipeline.sh: it does not wait for ever."""
    failing = workplace.launch(
        "convert.sbatch", "--sbatch=--cpus-per-task=1", "--sbatch=--mem=1G", "--replace-options", "--", "inspect", "data"
    )
    waiting = workplace.launch(
        "convert.sbatch", "--sbatch=--cpus-per-task=1", "--sbatch=--mem=1G", "--dependency", f"afterok:{failing}"
    )
    assert workplace.finish(failing)["ExitCode"] == "2:0"
    record = workplace.finish(waiting)
    assert record["JobState"] == "CANCELLED" and record["StartTime"] in ("Unknown", record["EndTime"])


@pytest.mark.slow
def test_the_pipeline_goes_from_texts_to_an_evaluated_model(workplace, texts):
    """pipeline.sh with this cluster's sizes: five jobs in order, and the report at the end."""
    scripts = workplace.folder / "scripts"
    scripts.mkdir()
    for name in ("preprocess", "convert", "evaluate", "train-cpu"):
        text = (ROOT / f"examples/slurm/{name}.sbatch").read_text()
        text = re.sub(r"--cpus-per-task=\d+", "--cpus-per-task=1", re.sub(r"--mem=\w+", "--mem=2G", text))
        (scripts / f"{name}.sbatch").write_text(text)
    _fill_in(scripts, workplace, texts)
    result = workplace.cluster.call(
        "bash",
        str(ROOT / "examples/slurm/pipeline.sh"),
        timeout_s=200,
        SITE=str(workplace.folder / "site.env"),
        SCRIPTS=str(scripts),
        PYTHON=f"{_venv(workplace)}/bin/python",
        SHARDS="2",
        TRAIN="train-cpu.sbatch",
        RUN="run",
        EXPORT="exported",
        DTYPE="float32",
    )
    jobs = dict(re.findall(r"^(\S+): job (\d+)", result.stdout, re.MULTILINE))
    last = jobs["evaluate.sbatch"]
    record = workplace.finish(last, timeout_s=400)
    assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0")
    assert (workplace.folder / "exported/model.safetensors").is_file()
    assert "loss" in (workplace.folder / "run/evaluation/results.json").read_text()
    assert len(workplace.losses("run")) == 6


def _venv(workplace) -> str:
    (line,) = [line for line in (workplace.folder / "site.env").read_text().splitlines() if line.startswith("VENV=")]
    return line.removeprefix("VENV=").split()[0]


def _fill_in(scripts: Path, workplace, texts: list[str]) -> None:
    """Sizes, names and a start model of this test, in place of Qwen3-4B's."""
    from tests.support.hf_models import random_hf_directory, small_model

    model = small_model(vocab_size=304, max_position_embeddings=2048)
    random_hf_directory(workplace.folder / "published", model)
    words = {
        "preprocess": [*texts, "--heldout-fraction", "0.2", "--mask-token-id", "300", "--no-progress"],
        "convert": ["import", "published", "start"],
        "evaluate": ["exported"],
        "train-cpu": _training(model),
    }
    for name, options in words.items():
        path = scripts / f"{name}.sbatch"
        block = "OPTIONS=(\n" + "".join(f"    '{word}'\n" for word in options) + ")\n"
        path.write_text(re.sub(r"^OPTIONS=\(\n.*?^\)\n", lambda _, block=block: block, path.read_text(), flags=re.M | re.S))


def _training(model) -> list[str]:
    import dataclasses

    settings = {f"model.{name}": value for name, value in dataclasses.asdict(model).items()} | {
        "cycle.num_parallel_layers": model.num_layers // 2,
        "cycle.mask_token_id": 300,
        "data.tokenizer": "tokenizer",
        "data.seq_length": 64,
        "data.pad_token_id": 0,
        "training.steps": 6,
        "training.eval_batches": 1,
        "optimizer.warmup_steps": 1,
        "checkpoint.init_from": "start",
        "logging.interval": 1,
        "parallel.pipeline": 2,
    }
    return [
        word
        for name, value in settings.items()
        for word in (f"--{name}", str(value).lower() if value in (True, False) and isinstance(value, bool) else str(value))
    ]
