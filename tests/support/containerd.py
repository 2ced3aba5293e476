"""Programs in containerd's containers, which ``ctr`` makes from an image of empty folders."""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from phosd.engine.criu.run.program import Criu
from phosd.engine.system import procfs
from tests.support import containers, harness
from tests.support.containers import Contained
from tests.support.harness import alive, wait_until

_IMAGE = "localhost/folders:test"
_LOG = "/dev/shm/log"
_CONFIG = """\
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{place}/ctr.sock"
[ttrpc]
address = "{place}/ttrpc.sock"
"""


@dataclass(frozen=True)
class Ctr:
    """A container of a containerd in ``place``."""

    place: Path
    name: str

    @property
    def words(self) -> list[str]:
        return ["ctr", f"--address={self.place / 'ctr.sock'}"]

    def do(self, *words: str) -> str:
        """Run ``ctr``; what it has printed."""
        done = subprocess.run([*self.words, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + (self.place / "phosd.log").read_text()
        return done.stdout

    def end(self, target: Contained) -> None:
        """Kill the program. Whatever started the container may remove it, too, and be the first."""
        os.kill(target.first, signal.SIGKILL)
        wait_until(lambda: not alive(target.first), "the program to end")
        subprocess.run([*self.words, "tasks", "rm", "--force", self.name], capture_output=True)

    def restored(self, name: str, image: str) -> "Ctr":
        """Make a container of a name from an image that has its processes; the container."""
        self.do("containers", "restore", "--live", "--rw", name, image)
        return replace(self, name=name)

    @property
    def pid(self) -> int:
        """The pid that the program has outside."""
        rows = [line.split() for line in self.do("tasks", "ls").splitlines()]
        return next(int(row[1]) for row in rows if row[0] == self.name)

    def follow(self, target: Contained, pid: int) -> None:
        """Take the log of a process for the target's. It is in the container's memory, which
        runtimes save: a file would have to be as it was.
        """
        target.first, target.log = pid, Path(f"/proc/{pid}/root{_LOG}")
        wait_until(target.log.exists, "the log in the container")


@contextmanager
def run_by_ctr(program: str, place: Path, criu: str) -> Iterator[tuple[Contained, Ctr]]:
    """Run a target program in a container. ``criu`` is what the settings of its CRIU say."""
    (place / "criu.conf").write_text(criu)
    ctr = Ctr(place, f"phos-test-{secrets.token_hex(4)}")
    with _containerd(ctr):
        _import_image(ctr)
        line = [*ctr.words, "run", "--snapshotter=native", "--net-host"]
        line += [f"--pid-file={place / 'pid'}", f"--annotation=org.criu.config={place}/criu.conf"]
        line += [f"--mount={mount}" for mount in containers.mounts_for_ctr(place)]
        env = containers.environment(place)
        line += [f"--env={name}={value}" for name, value in env.items()]
        line += [_IMAGE, ctr.name, *containers.command(program, place, _LOG)]
        end = [*ctr.words, "tasks", "rm", "--force", ctr.name]
        with containers.running(line, end, program, place) as target:
            ctr.follow(target, target.first)
            yield target, ctr


@contextmanager
def _containerd(ctr: Ctr) -> Iterator[None]:
    """Run containerd, with its mounts in a namespace of its own: what it leaves is gone with it."""
    folder = ctr.place / "containerd"
    folder.mkdir()
    (folder / "config.toml").write_text(_CONFIG.format(folder=folder, place=ctr.place))
    path = f"{Criu.find().path.parent}:{os.environ['PATH']}"
    with (
        (folder / "log").open("wb") as log,
        harness.running(
            ["unshare", "--mount", "containerd", f"--config={folder / 'config.toml'}"],
            stdout=log,
            stderr=log,
            env=os.environ | {"PATH": path, "PHOS_RUNTIME_DIR": str(ctr.place / "run")},
        ) as daemon,
    ):
        wait_until((ctr.place / "ctr.sock").exists, "containerd")
        try:
            yield
        finally:
            daemon.terminate()
            daemon.wait()
            for pid in _shims(ctr):  # two that remove a container at once may leave its own
                os.kill(pid, signal.SIGKILL)


def _shims(ctr: Ctr) -> Iterator[int]:
    """Yield the processes that stood between the containerd and its containers."""
    for pid in procfs.pids():
        with suppress(FileNotFoundError, ProcessLookupError):
            words = (procfs.PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            if b"shim" in words[0] and os.fsencode(ctr.place / "ctr.sock") in words:
                yield pid


def _import_image(ctr: Ctr) -> None:
    """Import an image in the form in which `docker save` writes one."""
    folder = ctr.place / "image"
    folder.mkdir()
    layer, archive = folder / "layer.tar", folder / "archive.tar"
    with tarfile.open(layer, "w") as tar:
        tar.add(containers.rootfs(ctr.place), arcname=".")
    digest = f"sha256:{hashlib.sha256(layer.read_bytes()).hexdigest()}"
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    (folder / "config.json").write_text(json.dumps(described))
    made = [{"Config": "config.json", "RepoTags": [_IMAGE], "Layers": ["layer.tar"]}]
    (folder / "manifest.json").write_text(json.dumps(made))
    with tarfile.open(archive, "w") as tar:
        for name in ("manifest.json", "config.json", "layer.tar"):
            tar.add(folder / name, arcname=name)
    ctr.do("image", "import", "--snapshotter=native", str(archive))
