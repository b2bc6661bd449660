"""Batch scripts with a site's settings filled in."""

import dataclasses
import subprocess

import pytest

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.launch.job import read_job
from megatron_dmtd.launch.site import read_site
from tests.slurm.conftest import ROOT, site_text

SCRIPTS = sorted((ROOT / "examples/slurm").glob("*.sbatch"))


@pytest.fixture
def site(tmp_path):
    path = tmp_path / "site.env"
    path.write_text(site_text(tmp_path, ACCOUNT="me", GPU_PARTITION="big", CPU_PARTITION="small", CPUS_PER_RANK=12))
    return read_site(path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_becomes_plain_bash_with_every_directive_before_the_first_command(path, site):
    job = read_job(path, site)
    subprocess.run(["bash", "-n"], input=job.text, text=True, check=True)
    lines = job.text.splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines[:first_command] if line.startswith("#SBATCH")]
    assert directives == [line for line in lines if line.startswith("#SBATCH")]
    assert "#SBATCH --account=me" in directives and "#SBATCH --open-mode=append" in directives
    assert f"#SBATCH --partition={'big' if job.uses_gpus else 'small'}" in directives
    assert f"WORK_DIR={site.work_dir}" in lines and "SITE_FILE" not in job.text
    assert job.is_training == path.stem.startswith("train")


def test_the_three_sizes_differ_in_their_nodes_only(site):
    jobs = [read_job(ROOT / f"examples/slurm/train-qwen3-4b-{size}.sbatch", site) for size in ("1-node", "4-nodes", "16-nodes")]
    assert [(job.num_nodes, job.num_ranks) for job in jobs] == [(1, 8), (4, 32), (16, 128)]
    assert len({job.options for job in jobs}) == 1
    assert len({tuple(sorted((job.directives | {"nodes": ""}).items())) for job in jobs}) == 1
    assert jobs[0].options[:2] == ("--config", f"{ROOT}/examples/qwen3-4b/bidirectional-refresh.yaml")


def test_options_are_added_or_replaced_and_reach_bash_whole(site):
    path = ROOT / "examples/slurm/convert.sbatch"
    words = ("export", "a b", "it's", "$HOME")
    for replaces, expected in ((False, ("import", "Qwen3-4B-Base", "checkpoints/qwen3-4b", *words)), (True, words)):
        job = read_job(path, site, options=words, replaces=replaces)
        assert job.options == expected
        start, end = job.text.index("OPTIONS=("), job.text.index("# shellcheck source=environment.sh")
        script = job.text[start:end] + 'printf "%s\\n" "${OPTIONS[@]}"'
        assert tuple(subprocess.run(["bash", "-euc", script], capture_output=True, text=True).stdout.splitlines()) == expected


def test_later_sbatch_options_win(site):
    job = read_job(ROOT / "examples/slurm/train-cpu.sbatch", site, sbatch=["--nodes=4", "--time=1-02:03"])
    assert (job.num_nodes, job.num_ranks, job.time_limit_s) == (4, 4, 93780)
    assert job.text.count("#SBATCH --nodes=") == 1


@pytest.mark.parametrize(
    ("array", "tasks"), [("0-15", 16), ("3", 1), ("0-6:2", 4), ("0-9%2", 10), ("1,4-5", 3)], ids=lambda value: str(value)
)
def test_tasks_of_an_array_are_counted(array, tasks, site):
    assert read_job(ROOT / "examples/slurm/preprocess.sbatch", site, sbatch=[f"--array={array}"]).num_tasks == tasks


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 1800), ("30:10", 1810), ("02:00:05", 7205), ("2-0", 172800), ("1-1:1:1", 90061)]
)
def test_time_limits_are_read_as_slurm_reads_them(text, seconds, site):
    assert read_job(ROOT / "examples/slurm/convert.sbatch", site, sbatch=[f"--time={text}"]).time_limit_s == seconds


WRONG = {
    "no-site": (lambda text: text.replace("SITE_FILE", "OTHER"), "sources the site file", []),
    "no-options": (lambda text: text.replace("OPTIONS=(", "WORDS=("), "OPTIONS", []),
    "foreign-variable": (
        lambda text: text.replace("import Qwen3", "import $HOME Qwen3"),
        "a variable or command outside double quotes: import $HOME",
        [],
    ),
    "no-time": (lambda text: text.replace("#SBATCH --time=02:00:00\n", ""), "without --time", []),
    "range-of-nodes": (lambda text: text, "--nodes=2-4", ["--nodes=2-4"]),
    "endless": (lambda text: text, "--time=infinite", ["--time=infinite"]),
    "array": (lambda text: text, "--array=a", ["--array=a"]),
    "quoted-variable": (lambda text: text.replace("import Qwen3", 'import "$HOME" Qwen3'), "the variable $HOME", []),
    "pattern": (lambda text: text.replace("import Qwen3", "import *.gguf Qwen3"), "* outside quotes", []),
    "late-directive": (lambda text: text + "#SBATCH --nodes=2\n", "below the first command", []),
    "open-quote": (lambda text: text.replace("--nodes=1", '--nodes=1 --comment="a'), 'a quote "', []),
    "name": (lambda text: text, "--job-name=a/b", ["--job-name=a/b"]),
    "line": (lambda text: text, "the control character '\\x07'", ["--comment=a\x07"]),
    "short-option": (lambda text: text, "sbatch option -N2", ["-N2"]),
}


@pytest.mark.parametrize(("change", "found", "sbatch"), WRONG.values(), ids=WRONG)
def test_what_is_not_such_a_script_is_refused(change, found, sbatch, site, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(change((ROOT / "examples/slurm/convert.sbatch").read_text()))
    with pytest.raises(ConfigError) as refusal:
        read_job(path, site, sbatch=sbatch)
    assert found in refusal.value.found


def test_directives_with_spaces_and_remarks_keep_their_values(site, tmp_path):
    path = tmp_path / "job.sbatch"
    text = (ROOT / "examples/slurm/convert.sbatch").read_text()
    path.write_text(text.replace("#SBATCH --nodes=1", '#SBATCH --nodes=1 --comment="a b # c"  # remark'))
    job = read_job(path, site)
    assert (job.num_nodes, job.directives["comment"]) == (1, "a b # c")
    assert '#SBATCH --comment="a b # c"\n' in job.text


def test_words_of_options_are_those_of_bash(site, tmp_path):
    path = tmp_path / "job.sbatch"
    text = (ROOT / "examples/slurm/convert.sbatch").read_text()
    block = """import "$WORK_DIR/a#b" a#b '$WORK_DIR' c\\ d  # remark\n    # remark's end\n    "it's \\"e\\""\n"""
    path.write_text(text.replace("import Qwen3-4B-Base checkpoints/qwen3-4b\n", block))
    job = read_job(path, site)
    assert job.options == ("import", f"{site.work_dir}/a#b", "a#b", "$WORK_DIR", "c d", 'it\'s "e"')
    script = job.text[job.text.index("VENV=") : job.text.index("# shellcheck source=environment.sh")]
    shell = subprocess.run(
        ["bash", "-euc", script + 'printf "%s\\n" "${OPTIONS[@]}"'], capture_output=True, text=True, check=True
    )
    assert tuple(shell.stdout.splitlines()) == job.options


def test_cpu_cores_of_a_gpu_job_are_the_scripts_own_or_the_sites(site):
    train, evaluate = (ROOT / f"examples/slurm/{name}.sbatch" for name in ("train-qwen3-4b-1-node", "evaluate"))
    assert read_job(train, site).directives["cpus-per-task"] == "12"
    assert read_job(train, site, sbatch=["--cpus-per-task=5"]).directives["cpus-per-task"] == "5"
    assert read_job(evaluate, dataclasses.replace(site, cpus_per_rank=7)).directives["cpus-per-task"] == "12"


def test_an_option_that_is_no_text_is_refused(site):
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_job(ROOT / "examples/slurm/convert.sbatch", site, options=["a\udce9"])


def test_an_absent_script_is_refused(site, tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        read_job(tmp_path / "none.sbatch", site)
