"""What a site file says reaches real jobs: odd values, CPU cores, a setup file, a container, and how ranks find each other."""

import subprocess
import sys

import pytest

from megatron_dmtd.launch.job import read_job
from megatron_dmtd.launch.site import read_site
from tests.slurm.conftest import ROOT, Workplace, site_text
from tests.slurm.test_other_jobs import rank_lines

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

SCRIPTS = sorted((ROOT / "examples/slurm").glob("*.sbatch"))
ODD = """'it'\\''s "odd" \\ $HOME `x` #y é %x'"""
_RANKS_JOB = """#!/bin/bash
# Prints what each rank got.
#SBATCH --job-name=ranks
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
{directives}#SBATCH --time=00:05:00

# shellcheck source=site.env
source "${{SITE_FILE:-examples/slurm/site.env}}"

OPTIONS=(
    "$ACCOUNT"
)

source "$PROJECT_DIR/examples/slurm/environment.sh"
"${{ON_RANKS[@]}}" --output="$LOG_DIR/rank-%4t.log" bash "$PROJECT_DIR/examples/slurm/rank.sh" \\
    bash -c 'printf "%s\\n" "$OMP_NUM_THREADS ${{SLURM_CPUS_PER_TASK:-none}} ${{FROM_SETUP:-none}}" "$@"' bash "${{OPTIONS[@]}}"
"""


def write_site(workplace: Workplace, **changes: object) -> None:
    (workplace.folder / "site.env").write_text(site_text(workplace.folder, **changes))


@pytest.fixture
def odd_workplace(cluster, tmp_path):
    """A work folder with spaces and more in its name."""
    cluster.revive()
    folder = tmp_path / "it's an é folder #1"
    folder.mkdir()
    quoted = "'" + str(folder).replace("'", "'\\''") + "'"
    (folder / "site.env").write_text(site_text(quoted, SBATCH_EXTRA='"--comment=\\"a # b\\""', CONTAINER_MOUNTS=ODD))
    return Workplace(cluster=cluster, folder=folder)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_takes_every_script_with_odd_values(path, odd_workplace):
    site = read_site(odd_workplace.folder / "site.env")
    # four nodes are all that the tests' cluster has
    job = read_job(path, site, sbatch=["--nodes=4"] if "16" in path.stem else [], options=["a b", "it's"])
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=job.text, env=odd_workplace.cluster.environment, capture_output=True, encoding="utf-8"
    )
    assert answer.returncode == 0 and "to start at" in answer.stderr, answer.stderr


def ranks_script(workplace, *directives: str) -> str:
    path = workplace.folder / "ranks.sbatch"
    path.write_text(_RANKS_JOB.format(directives="".join(f"#SBATCH {line}\n" for line in directives)))
    return str(path)


def submit_plainly(workplace, script: str, *options: str) -> str:
    output = f"--output={workplace.folder}/slurm-logs/%x-%j.out"
    (workplace.folder / "slurm-logs").mkdir(exist_ok=True)
    command = ["sbatch", "--parsable", "--partition=main", output, *options, script]
    return workplace.cluster.call(*command, cwd=ROOT, SITE_FILE=str(workplace.folder / "site.env")).stdout.strip()


def test_a_job_runs_in_a_folder_with_an_odd_name(odd_workplace):
    job_id = odd_workplace.launch(ranks_script(odd_workplace), "--", "a b", "it's #1")
    record = odd_workplace.finish(job_id, timeout_s=60)
    assert record["JobState"] == "COMPLETED", odd_workplace.console(job_id)
    text = odd_workplace.cluster.call("scontrol", "show", "job", job_id).stdout
    assert f"WorkDir={odd_workplace.folder}\n" in text and "Comment=a # b" in text
    logs = sorted(odd_workplace.log_dir(job_id).glob("rank-*.log"))
    assert [path.read_text().splitlines()[1:] for path in logs] == [["", "a b", "it's #1"]] * 4


def test_ranks_on_gpu_nodes_get_the_same_cpu_cores_from_sbatch_as_from_the_launcher(workplace):
    write_site(workplace, CPUS_PER_RANK=3, ACCOUNT="''")
    script = ranks_script(workplace, "--gpus-per-node=2", "--exclusive")
    for job_id in (workplace.launch(script), submit_plainly(workplace, script)):
        assert workplace.finish(job_id, timeout_s=60)["JobState"] == "COMPLETED", workplace.console(job_id)
        assert {tuple(words[:2]) for words in rank_lines(workplace, job_id)} == {("3", "3")}
    # not exclusive: one core for each rank is all that it asked for
    job_id = submit_plainly(workplace, ranks_script(workplace, "--gpus-per-node=2"))
    assert workplace.finish(job_id, timeout_s=60)["ExitCode"] == "2:0"
    assert "found: 2 CPU cores on node1 for 2 ranks\nrequired: 3 for each (CPUS_PER_RANK)" in workplace.console(job_id)


def test_a_setup_file_prepares_every_rank_and_ends_the_job_where_it_fails(workplace):
    setup = workplace.folder / "modules.sh"
    setup.write_text('echo "$UNSET_BY_ANYBODY"\nfalse || true\nexport FROM_SETUP=here\n')
    write_site(workplace, SETUP_FILE=setup, ACCOUNT="''")
    job_id = workplace.launch(ranks_script(workplace))
    assert workplace.finish(job_id, timeout_s=60)["JobState"] == "COMPLETED", workplace.console(job_id)
    assert [words[2] for words in rank_lines(workplace, job_id)] == ["here"] * 4
    setup.write_text("export FROM_SETUP=here\nmodule load nothing 2>/dev/null\ntrue\n")
    job_id = workplace.launch(ranks_script(workplace))
    assert workplace.finish(job_id, timeout_s=60)["ExitCode"] == "2:0"
    assert f"found: {setup}, line 2: module load nothing 2> /dev/null: status 127" in workplace.console(job_id)


_SRUN = """#!/bin/bash
# srun with pyxis, as far as jobs see it: notes the container of each step, and runs the step without one.
words=()
name= image=
for word; do
    case "$word" in
        --container-name=*) name="${{word#*=}}" ;;
        --container-image=*) image="${{word#*=}}" ;;
        --container-*) ;;
        *) words+=("$word") ;;
    esac
done
if [[ -n "$image" ]]; then echo "$name $image" >> {folder}/containers; fi
exec {srun} "${{words[@]}}"
"""


def test_all_steps_of_an_attempt_share_one_container(workplace, monkeypatch):
    """pyxis starts a container under a name once on a node; later steps with this name enter it."""
    srun = workplace.cluster.call("which", "srun").stdout.strip()
    programs = workplace.folder / "programs"
    programs.mkdir()
    (programs / "srun").write_text(_SRUN.format(folder=workplace.folder, srun=srun))
    (programs / "srun").chmod(0o755)
    monkeypatch.setitem(
        workplace.cluster.environment, "PATH", f"{programs}:{sys.prefix}/bin:{workplace.cluster.environment['PATH']}"
    )
    write_site(workplace, VENV="", CONTAINER_IMAGE="nvcr.io#nvidia/pytorch:25.10-py3", CONTAINER_MOUNTS="/:/")
    job_id = workplace.train("run", steps=4)
    record = workplace.finish(job_id)
    assert record["JobState"] == "COMPLETED", workplace.console(job_id)
    steps = (workplace.folder / "containers").read_text().splitlines()
    assert steps == [f"dmtd-{job_id}-0 nvcr.io#nvidia/pytorch:25.10-py3"] * 3  # counting, preflight, training


@pytest.fixture
def nameless(workplace):
    """Nodes that know no name but their own, as pods of Kubernetes without DNS for them."""
    nodes = workplace.cluster.nodes
    for node in nodes:
        hosts = workplace.folder / f"hosts-{node}"
        hosts.write_text(f"127.0.0.1 localhost {node}\n")
        workplace.cluster.run_on(node, "mount", "--bind", str(hosts), "/etc/hosts")
    yield workplace
    for node in nodes:
        workplace.cluster.run_on(node, "umount", "/etc/hosts")


def test_nodes_that_do_not_know_each_other_are_named_at_once(nameless):
    job_id = nameless.train("run", steps=4)
    record = nameless.finish(job_id, timeout_s=60)
    console = nameless.console(job_id)
    assert (record["ExitCode"], record["Restarts"]) == ("2:0", "0"), console
    assert "node2: does not know the name node1\n" in console and "remedy: set RENDEZVOUS=address" in console
    assert "] preflight" not in console and "Traceback" not in console


def test_nodes_without_names_meet_by_address(nameless):
    write_site(nameless, RENDEZVOUS="address", NETWORK_INTERFACE="lo")
    job_id = nameless.train("run", steps=4)
    record = nameless.finish(job_id)
    assert record["JobState"] == "COMPLETED", nameless.console(job_id)
    assert "rendezvous at 127.0.0.1:" in nameless.console(job_id) and list(nameless.losses("run")) == [1, 2, 3, 4]


def test_one_node_without_its_interface_is_excluded_and_replaced(workplace):
    """`lo` is everywhere; a name that one node alone lacks is made by hiding its devices."""
    empty = workplace.folder / "empty"
    empty.mkdir()
    write_site(workplace, NETWORK_INTERFACE="lo")
    workplace.cluster.run_on("node2", "mount", "--bind", str(empty), "/sys/class/net")
    try:
        job_id = workplace.train("run", steps=4)
        record = workplace.finish(job_id)
    finally:
        workplace.cluster.run_on("node2", "umount", "/sys/class/net")
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("COMPLETED", "1", "node2")
    assert "node2: no network interface lo (NETWORK_INTERFACE)" in workplace.console(job_id)
