"""A real Slurm cluster on this host, in one folder: munged, slurmctld and several slurmd, each "node" in namespaces of its own.

A node's processes live in a PID namespace whose first process is its slurmd: killing that one is the death of the whole node.
Everything runs below one process that dies with the test session, however that ends, and writes to files only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "unshare",
    "nsenter",
    "setpriv",
    "shellcheck",
)
_START_S = 60.0
_STOP_S = 20.0
_GPUS = 8

_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
ReturnToService=2
KillWait=5
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=10
PropagateResourceLimitsExcept=MEMLOCK
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
#: `urgent` takes nodes from the three below `main`, each by other means
_PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=urgent Nodes=ALL OverSubscribe=NO State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=requeued Nodes=ALL OverSubscribe=NO State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=warned Nodes=ALL OverSubscribe=NO State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=stopped Nodes=ALL OverSubscribe=NO State=UP PriorityTier=1 PreemptMode=CANCEL
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=64 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 "
    "ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:{gpus} State=UNKNOWN\n"
)
#: in its namespaces: the name of the host is the node's, and all nodes' names are this host's
_NODE_START = 'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && exec slurmd -D -N "$1" -f "$2/slurm.conf"'


def missing_programs() -> list[str]:
    """What the cluster needs and this machine lacks."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return missing + ([] if os.geteuid() == 0 else ["root"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str, explain: Callable[[], str] = lambda: "") -> None:
    """Poll `condition`; after `timeout_s` fail by name."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen in {timeout_s:g} s\n{explain()}")
        time.sleep(0.2)


class Cluster:
    """One controller and `num_nodes` nodes named node1, node2, ..."""

    def __init__(self, folder: Path, *, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"node{index + 1}" for index in range(num_nodes)]
        self._ports = _free_ports(num_nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
            del self.environment[name]

    # --- life ---------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring all daemons up and wait until every node is idle."""
        self._write_files()
        run = self.folder / "run"
        self._spawn("munged", [
            "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key", f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log", f"--seed-file={run}/munge.seed",
        ])  # fmt: skip
        wait_until((run / "munge.socket").exists, timeout_s=_START_S, what="munged's socket", explain=self._logs)
        self._spawn("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf")])
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes(self.nodes)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, also after `kill_node`."""
        namespaces = [
            "unshare",
            "--uts",
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._spawn(name, [*namespaces, "sh", "-c", _NODE_START, "sh", name, str(self.folder)])

    def kill_node(self, name: str) -> None:
        """kill -9 to a node's slurmd: as the first of its PID namespace, it takes all that runs on the node with it."""
        os.kill(self._slurmd(name), signal.SIGKILL)
        self._daemons.pop(name).wait(_STOP_S)

    def _slurmd(self, name: str) -> int:
        """The first process of the node's PID namespace, by its number outside."""
        outer = self._daemons[name].pid
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        assert len(children) == 1, f"{name}: slurmd is not the only child of its unshare: {children}"
        return int(children[0])

    def run_on(self, name: str, *command: str) -> None:
        """Run a command inside a node: its mounts, its processes."""
        target = str(self._slurmd(name))
        inside = ["nsenter", "--target", target, "--mount", "--uts", "--pid"]
        self.call(*inside, *command)

    def revive(self) -> None:
        """No jobs, and all nodes idle again, whatever a test did."""
        self.call("scancel", "--user=root")
        wait_until(
            lambda: not self.call("squeue", "-h").stdout.strip(), timeout_s=_START_S, what="an empty queue", explain=self._logs
        )
        for name in self.nodes:
            if name not in self._daemons:
                self.start_node(name)
        self.wait_for_nodes(self.nodes)

    def wait_for_nodes(self, names: Sequence[str]) -> None:
        """Until these nodes are idle."""
        wait_until(
            lambda: all(self.node_states().get(name) == "idle" for name in names),
            timeout_s=_START_S,
            what=f"{', '.join(names)} idle",
            explain=self._logs,
        )

    def stop(self) -> None:
        """End every job and daemon; bounded, and sure."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait(_STOP_S)
        self._daemons.clear()

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        # setpriv: the kernel kills the daemon when the session's process ends, even by kill -9
        guarded = ["setpriv", "--pdeathsig", "KILL", *command]
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment, start_new_session=True
            )

    def _write_files(self) -> None:
        for name in ("run", "state", "log", "gpu", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        # munged and slurmctld refuse folders that others may write to; pytest's are 0700 and ours
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for index in range(_GPUS):
            os.mknod(self.folder / "gpu" / f"nvidia{index}", 0o020666, os.makedev(1, 3))
        host = socket.gethostname().split(".")[0]
        nodes = "".join(_NODE.format(name=name, port=port, gpus=_GPUS) for name, port in zip(self.nodes, self._ports[1:]))
        conf = _CONF.format(host=host, port=self._ports[0], folder=self.folder)
        (self.folder / "slurm.conf").write_text(conf + nodes + _PARTITIONS)
        gpus = f"NodeName=node[1-{len(self.nodes)}] Name=gpu File={self.folder}/gpu/nvidia[0-{_GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(gpus)
        names = "".join(f"127.0.0.1 {name}\n" for name in self.nodes)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {host}\n{names}")

    def _logs(self) -> str:
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]))
        return "\n".join(parts)

    # --- use ----------------------------------------------------------------------------------------------------------------

    def call(
        self, *command: str, check: bool = True, cwd: Path | None = None, timeout_s: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command, or one that calls some."""
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=self.environment | environment,
            timeout=timeout_s,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
        )
        assert not check or result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def node_states(self) -> dict[str, str]:
        """State of each node in sinfo's words; empty while the controller does not answer."""
        result = self.call("sinfo", "-hN", "-o", "%N %T", check=False)
        return dict(line.split() for line in result.stdout.splitlines() if len(line.split()) == 2)

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.call("scontrol", "--oneliner", "show", "job", job_id).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def nodes_of(self, job_id: str) -> list[str]:
        """The nodes of a job, in order."""
        return self.call("scontrol", "show", "hostnames", self.job(job_id)["NodeList"]).stdout.split()

    def wait_for_job(self, job_id: str, *, timeout_s: float, logs: Sequence[Path] = ()) -> dict[str, str]:
        """The job's record once it has ended for good."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY")

        def explain() -> str:
            texts = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists()]
            return f"{self.job(job_id)}\n{self._logs()}\n" + "\n".join(texts)

        wait_until(
            lambda: self.job(job_id)["JobState"] in ended, timeout_s=timeout_s, what=f"the end of job {job_id}", explain=explain
        )
        return self.job(job_id)


@contextlib.contextmanager
def running_cluster(folder: Path, *, num_nodes: int) -> Iterator[Cluster]:
    """A cluster for the time of a block."""
    cluster = Cluster(folder, num_nodes=num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
