"""A host for phosd's OCI image: what the image puts on a host, and what runs there, is apart from
this machine. It has this machine's file system, but for the folders that the image writes, and a
system bus of its own.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import cgroups, procfs
from phosd.engine.system.from_image import CGROUP
from tests.support import harness
from tests.support.harness import PROGRAMS, Target, children, wait_until

_EMPTY = (
    "/usr/lib/phos",
    "/usr/share/dbus-1/system-services",  # so there is no polkit, and users may do what is theirs
    "/var/lib/phos",
)
_COPIED = ("/usr/share/dbus-1/system.d", "/usr/share/polkit-1/actions")
_FOLDERS = (*_EMPTY, *_COPIED)
_HERE = Path(__file__).parent
_BEGIN = """\
mount -t tmpfs tmpfs /run && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mkdir /run/dbus
for each in {folders}; do mount --bind "{place}$each" "$each" || exit; done
dbus-daemon --system --fork --nopidfile && touch {place}/up
exec {python} {here}/reaper.py sleep infinity
"""
RIGHTS = ("--pid=host", "--security-opt=seccomp=unconfined", "--cap-add=ALL")
"""What docs/operate/image.md has podman give the container."""
FEWEST = (
    *RIGHTS[:-1],
    "--cap-drop=ALL",
    "--cap-add=SYS_PTRACE,SYS_ADMIN,SYS_CHROOT,DAC_OVERRIDE,CHOWN",
)
"""What it says is enough to suspend and resume."""


@dataclass
class Host:
    """``first`` is the pid of its first process, as this machine knows it."""

    place: Path
    process: "subprocess.Popen[bytes]"
    first: int
    image: str = ""

    def run(self, *words: str | Path, uid: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host, perhaps as another user."""
        enter = ["nsenter", f"--target={self.first}", "--mount", "--pid", "--ipc", "--uts", "--"]
        other = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        with (self.place / "said").open("w+b") as said:  # a pipe would last as long as a container
            done = subprocess.run(
                [*enter, *other, *words],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(self._programs(uid)),
                    "PHOS_GPU": "soft",
                    "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",  # among what it prints
                },
                timeout=harness.PATIENCE * 3,
            )
            said.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, said.read().decode())

    def phos(self, *words: str, uid: int = 0) -> list[dict[str, object]]:
        """Run the ``phos`` that the image has put there, which must succeed; its lines."""
        done = self.run("/usr/lib/phos/bin/phos", "--json", *words, uid=uid)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{self.log()}"
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def podman(self, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run podman, with a storage of the host's own."""
        folders = {"root": "storage", "runroot": "running", "tmpdir": "libpod"}
        given = [f"--{option}={self.place / folder}" for option, folder in folders.items()]
        given += ["--runtime=runc", "--storage-driver=overlay", "--cgroup-manager=cgroupfs"]
        return self.run("podman", *given, *words)

    def load(self, image: Path) -> None:
        """Load an OCI archive."""
        told = self.podman("load", "--quiet", "--input", image)
        assert told.returncode == 0, told.stdout
        self.image = told.stdout.split()[-1]

    def start_phosd(self, rights: Sequence[str] = RIGHTS) -> None:
        """Start the container, in place of one that has ended, and wait until phosd serves."""
        done = self.run_image(*rights, detach=True)
        assert done.returncode == 0, done.stdout
        wait_until(self._serves, "phosd in the container to serve", harness.PATIENCE * 2)

    def run_image(self, *options: str, detach: bool = False) -> "subprocess.CompletedProcess[str]":
        """Run the image with these podman options, and no network."""
        kept = ["--detach", "--replace", "--name=phosd"] if detach else ["--rm"]
        given = ["--network=none", "--read-only", "--ulimit=host", "--env=PHOS_GPU=soft"]
        return self.podman("run", *kept, *given, *options, self.image)

    def _serves(self) -> bool:
        running = self.podman("inspect", "--format={{.State.Running}}", "phosd")
        assert running.stdout.strip() == "true", f"phosd's container has ended: {self.log()}"
        return "serves org.phos" in self.log()

    def log(self) -> str:
        """What phosd has said in its container."""
        return self.podman("logs", "phosd").stdout

    def start(self, program: str, uid: int) -> "Hosted":
        """Start a target program of a user by the host's ``phos run``; its Python is the image's,
        which this user can reach.
        """
        folder = self._programs(uid)
        if not folder.exists():
            shutil.copytree(PROGRAMS, folder, ignore=shutil.ignore_patterns("__pycache__"))
            harness.compile_kernels(folder)
            for path in (folder, *folder.rglob("*")):
                os.chown(path, uid, uid)
        variables = [f"PYTHONPATH=/usr/lib/phos/python:{folder}", f"PHOS_TEST_CACHE={folder}"]
        python = ["/usr/lib/phos/runtime/bin/python3", "-B", str(folder / f"{program}.py"), "0"]
        words = ["run", "--gpu=soft", "--detach"]
        started = next(
            each
            for each in self.phos(*words, "--", "env", *variables, *python, uid=uid)
            if "pid" in each
        )
        log = self._here(str(started["stdout"]))
        errors = self._here(str(started["stderr"]))
        pid = int(str(started["pid"]))
        return Hosted(program, log, errors, self.process, inside=pid)

    def _programs(self, uid: int) -> Path:
        return self.place / f"programs-{uid}"

    def _here(self, path: str) -> Path:
        """Where this machine has the host's file."""
        own = path.startswith(_FOLDERS)
        return self.place / path[1:] if own else Path(path)


@dataclass
class Hosted(Target):
    """A target program on the host; ``process`` is the host's first one."""

    inside: int = 0
    """Its pid on the host."""

    @property
    def pid(self) -> int:
        """Its pid on this machine; 0 if it has ended."""
        for pid in children(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                if procfs.own_id(pid) == self.inside:
                    return pid
        return 0

    def kill(self) -> None:
        if pid := self.pid:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not self.pid, f"pid {self.inside} of the host to be free")


@contextmanager
def host(place: Path) -> Iterator[Host]:
    """A host, until the end of the context, with all that runs on it."""
    made = [Path(folder) for folder in _FOLDERS if not Path(folder).exists()]
    for folder in made:
        folder.mkdir(parents=True)
    for name in _EMPTY:
        (place / name[1:]).mkdir(parents=True)
    for name in _COPIED:
        shutil.copytree(name, place / name[1:])
    place.chmod(0o755)
    script = _BEGIN.format(
        folders=" ".join(_FOLDERS), place=place, python=sys.executable, here=_HERE
    )
    apart = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child"]
    words = [*apart, "--mount-proc", "--ipc", "--uts", "sh", "-c", script]
    with (place / "host.log").open("wb") as log, harness.running(words, stderr=log) as process:
        try:
            up, said = place / "up", place / "host.log"
            wait_until(lambda: up.exists() or said.read_text(), "the host")
            assert up.exists(), said.read_text()
            yield Host(place, process, children(process.pid)[0])  # type: ignore[arg-type]
        finally:
            process.kill()
            process.wait()
            for hierarchy in cgroups.memberships(os.getpid()):
                left = cgroups.folder(hierarchy, f"/{CGROUP}")
                if left is not None and left.exists():
                    wait_until(lambda: not (left / "cgroup.procs").read_text(), "phosd to end")  # noqa: B023
                    left.rmdir()
            for folder in made:
                folder.rmdir()
