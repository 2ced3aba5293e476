"""A cluster of a node or several: the real munged, slurmctld and slurmd, as root, without systemd.

All that they keep is in one folder, they listen on the loopback interface, and end with the test.
"""

import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.system.native import slurm_plugin
from phosd.errors import Internal
from tests.support.harness import T, wait_until

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 100.0
_CGROUPS = Path("/sys/fs/cgroup")
_CONF = """\
ClusterName=phos
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/{proctrack}
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
KillWait={kill_wait}
MinJobAge=3600
ReturnToService=2
MpiDefault=none
PropagateResourceLimits=NONE
PlugStackConfig={folder}/plugstack.conf
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
"""Credentials expire soon, as a requeued job waits for that of its run before. More processors than
there are, as it is the GPUs that jobs wait for.
"""
_NODE = """\
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} \
CPUs=16 RealMemory=1000 Gres=gpu:{gpus}
"""
_ADDRESS = "192.0.2.1/32"
"""An address of a network for documentation."""
_DEVICES = ("/dev/zero", "/dev/null", "/dev/full", "/dev/random")
"""What stands for GPUs. The programs' are software, of which there is no such file."""
_CGROUP_CONF = f"""\
CgroupPlugin=cgroup/v1
CgroupMountpoint={_CGROUPS}
"""


def missing() -> str:
    """What is not installed here; empty if all is."""
    programs = [name for name in ("munged", "slurmctld", "slurmd") if not shutil.which(name)]
    if programs:
        return f"{', '.join(programs)}: `make setup-slurm` installs them"
    try:
        slurm_plugin()
    except Internal as error:
        return f"{error}, with libslurm-dev: `make setup-slurm build`"
    return ""


@dataclass(frozen=True)
class Release:
    """A Slurm: where its daemons and commands are, and phosd's plugin for it."""

    plugin: Path
    programs: Path | None = None
    """The folder of programs that are not the system's, with their own plugins beside."""

    @property
    def path(self) -> str:
        """The ``PATH`` that has its programs."""
        folders = [str(self.programs)] if self.programs else []
        return os.pathsep.join([*folders, os.environ["PATH"]])

    @property
    def settings(self) -> str:
        """What it needs in ``slurm.conf``. Newer ones hold a job that was requeued five times."""
        plugins = f"PluginDir={self.programs.parent / 'plugins'}\n" if self.programs else ""
        return plugins + ("MaxBatchRequeue=1000\n" if self.version >= (24, 11) else "")

    @property
    def version(self) -> tuple[int, ...]:
        """Its release, as ``(24, 11)``."""
        program = shutil.which("slurmctld", path=self.path)
        assert program is not None
        told = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
        return tuple(map(int, told.split()[1].split(".")[:2]))


def unpacked() -> Release | None:
    """The one that `make setup-slurm` has unpacked, if it has."""
    programs = REPOSITORY / "build/slurm/bin"
    plugin = REPOSITORY / "phosd/native/tests/phos_slurm.so"
    return Release(plugin, programs) if programs.exists() and plugin.exists() else None


@dataclass
class Cluster:
    """The running cluster."""

    folder: Path
    nodes: Sequence[str]
    release: Release
    kill_wait: int = 60
    grace: int = 60
    proctrack: str = "cgroup"
    _daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def node(self) -> str:
        """Its first node, or its only one."""
        return self.nodes[0]

    @property
    def gpus(self) -> int:
        """How many of a node its jobs may ask for."""
        return len(_DEVICES)

    @property
    def environment(self) -> dict[str, str]:
        conf = str(self.folder / "slurm.conf")
        return os.environ | {"SLURM_CONF": conf, "PATH": self.release.path}

    def ask(self, *words: str, **variables: str) -> str:
        """Run a Slurm command, which must succeed, and return what it prints."""
        done = self.try_to(*words, **variables)
        assert done.returncode == 0, f"{words}: {done.stderr}{self.logs()}"
        return done.stdout.strip()

    def try_to(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            words,
            env=self.environment | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def submit(self, script: str, *options: str, **variables: str) -> str:
        """Submit a batch script with its output in ``JOB.out``; the number of the job."""
        name = self.folder / f"{secrets.token_hex(4)}.sh"
        name.write_text(f"#!/bin/sh\n{script}\n")
        line = ["sbatch", "--parsable", "--requeue", "--open-mode=append", "--gres=gpu:1"]
        return self.ask(*line, f"--output={self.folder}/%A.out", *options, str(name), **variables)

    def output(self, job: str) -> str:
        """What a job has printed, in all of its runs."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What the controller tells of a job."""
        line = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in line.split() if "=" in part)

    def wait_for(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states, and return what is told of it."""

        def reached() -> dict[str, str] | None:
            found = self.job(job)
            return found if found["JobState"] in states else None

        return self.wait(reached, f"job {job} to be {' or '.join(states)}", job)

    def wait_for_run(self, job: str, number: int) -> None:
        """Wait until a job runs that was requeued so many times."""

        def runs() -> bool:
            found = self.job(job)
            return (found["JobState"], found["Restarts"]) == ("RUNNING", str(number))

        self.wait(runs, f"run {number} of job {job}", job)

    def wait(self, condition: Callable[[], T | None], what: str, *jobs: str) -> T:
        """Wait as long as Slurm may take; then show what jobs and daemons have said."""
        try:
            return wait_until(condition, what, PATIENCE, every=0.1)
        except AssertionError as error:
            told = [f"-- job {job}: {self.job(job)}\n{self.output(job)}" for job in jobs]
            raise AssertionError("\n".join([str(error), *told, self.logs()])) from error

    def accounted(self, job: str) -> list[dict[str, str]]:
        """The rows of the accounting that a job has, one for each run that has ended."""
        path = self.folder / "jobcomp"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]
        return [row for row in rows if row["JobId"] == job]

    def logs(self) -> str:
        texts = [(name, self.folder / f"{name}.log") for name in ("slurmctld", "slurmd")]
        found = [(name, path.read_text()[-3000:]) for name, path in texts if path.exists()]
        return "\n".join(f"-- {name}\n{text}" for name, text in found)

    def start(self, name: str, *words: str, called: str = "") -> None:
        """Start one of the daemons, which is ``called`` by another name if there are several."""
        out = (self.folder / f"{name}.out").open("ab")
        self._daemons[called or name] = subprocess.Popen(
            [name, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        out.close()

    def start_controller(self) -> None:
        self.start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def start_node(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(mode=0o755, exist_ok=True)
        words = ["-D", "-N", node, "-f", str(self.folder / "slurm.conf")]
        if (programs := self.release.programs) is not None:
            words += ["-d", str(programs / "slurmstepd")]
        self.start("slurmd", *words, called=node)

    def stop(self, name: str) -> None:
        """End one of the daemons."""
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def stop_all(self) -> None:
        for name in reversed([*self._daemons]):
            self.stop(name)

    def idle(self) -> bool:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name} has ended: {self.logs()}"
        done = self.try_to("sinfo", "--noheader", "--format=%T", "--partition=low")
        return done.stdout.strip() == "idle"


@contextmanager
def cluster(
    place: Path,
    release: Release | None = None,
    *,
    nodes: int = 1,
    kill_wait: int = 60,
    grace: int = 60,
    proctrack: str = "cgroup",
) -> Iterator[Cluster]:
    """Run a cluster until the end of the block."""
    folder = place / "slurm"
    for part in ("munge", "state", "spool"):
        (folder / part).mkdir(mode=0o755, parents=True)
    # Its cgroups have this name, beside those of other clusters on this machine.
    found = Cluster(
        folder,
        [f"phos{secrets.token_hex(3)}" for _ in range(nodes)],
        release or Release(slurm_plugin()),
        kill_wait,
        grace,
        proctrack,
    )
    _configure(found)
    munge = folder / "munge"
    with ExitStack() as stack:
        stack.enter_context(_addressed())
        for node in found.nodes:
            stack.callback(_clear_cgroups, node)
        stack.callback(found.stop_all)
        stack.callback(_end_jobs, found)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        given = [f"--{option}={munge / file}" for option, file in files.items()]
        found.start("munged", "--foreground", "--force", f"--log-file={munge / 'log'}", *given)
        wait_until(lambda: (munge / "socket").exists(), "munged")
        found.start_controller()
        for node in found.nodes:
            found.start_node(node)
        found.wait(found.idle, "the nodes to be idle")
        yield found


@contextmanager
def _addressed() -> Iterator[None]:
    """Add an address beside that of the loopback interface: without one Slurm resolves none."""
    try:
        socket.getaddrinfo("127.0.0.1", 1, socket.AF_INET, flags=socket.AI_ADDRCONFIG)
    except socket.gaierror:
        subprocess.run(["ip", "address", "add", _ADDRESS, "dev", "lo"], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "address", "delete", _ADDRESS, "dev", "lo"], check=True)
    else:
        yield


def _configure(found: Cluster) -> None:
    folder = found.folder
    (folder / "munge/key").write_bytes(secrets.token_bytes(128))
    (folder / "munge/key").chmod(0o600)
    controller, *daemons = _free_ports(1 + len(found.nodes))
    host = socket.gethostname()
    nodes = [
        _NODE.format(node=name, host=host, port=port, gpus=found.gpus)
        for name, port in zip(found.nodes, daemons, strict=True)
    ]
    (folder / "slurm.conf").write_text(
        _CONF.format(
            folder=folder,
            host=host,
            controller=controller,
            kill_wait=found.kill_wait,
            grace=found.grace,
            proctrack=found.proctrack,
        )
        + "".join(nodes)
        + found.release.settings
    )
    (folder / "cgroup.conf").write_text(_CGROUP_CONF)
    devices = "".join(f"Name=gpu File={device}\n" for device in _DEVICES)
    (folder / "gres.conf").write_text(devices)
    (folder / "plugstack.conf").write_text(f"required {found.release.plugin}\n")


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _end_jobs(found: Cluster) -> None:
    """End what still runs in the cluster's cgroups, frozen or not: its daemons are not asked."""
    for freezer in itertools.chain(*map(_freezers, found.nodes)):
        (freezer / "freezer.state").write_text("THAWED")
        for pid in map(int, (freezer / "cgroup.procs").read_text().split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _clear_cgroups(node: str) -> None:
    for freezer in _freezers(node):

        def empty(freezer: Path = freezer) -> bool:
            return not (freezer / "cgroup.procs").read_text()

        wait_until(empty, f"the processes in {freezer} to end")
        freezer.rmdir()


def _freezers(node: str) -> list[Path]:
    """The cgroups of a node's jobs, lowest first."""
    top = _CGROUPS / "freezer" / f"slurm_{node}"
    found = [path for path in top.rglob("*") if path.is_dir()] if top.exists() else []
    return [*sorted(found, key=lambda path: -len(path.parts)), *([top] if top.exists() else [])]


PHOS = f"{sys.executable} -m phosd.cli.main"
