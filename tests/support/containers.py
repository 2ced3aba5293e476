"""Programs in containers, made by runc or podman from what this machine has: no image is fetched.

The container sees this machine's libraries, interpreter and checkout, read-only, and has a folder
for its output. Everything else is its own; but for the network, as a software GPU is reached by a
socket of it.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.criu.run.program import Criu
from tests.support import harness
from tests.support.harness import wait_until
from tests.support.rotation import times

CHECKOUT = Path(__file__).parents[2]
HOOK_FOLDER = {
    "destination": "/run/phos/hook",
    "type": "tmpfs",
    "source": "tmpfs",
    "options": ["nosuid", "nodev", "noexec", "mode=1733", "size=64k"],
}
"""What `phos setup-container-runtime` has runtimes mount."""
FIRST_MAPPED = 100_000
CRUN = CHECKOUT / "build/crun/bin/crun"
"""Where `make setup-containers` puts a crun that hands its settings on to CRIU."""
ROUNDS = times(1, everything=4, soak=20)
"""How often a container is saved while it runs on, saved and ended, and restored."""
_NEEDED = ("/usr", "/etc", sys.base_prefix, sys.prefix, str(CHECKOUT))
_READ_ONLY = [
    path
    for path in dict.fromkeys(_NEEDED)
    if not any(other != path and Path(path).is_relative_to(other) for other in _NEEDED)
]
"""Nothing within another one: at a restore runc leaves its mount behind."""
_UNIFIED = "/sys/fs/cgroup/unified"
_ALONE = ["unshare", "--mount", "sh", "-c"]
_LINKS = ("bin", "lib", "lib64", "sbin")


@dataclass
class Contained(harness.Target):
    """A target program in a container; ``process`` is the runtime's, ``first`` the program."""

    first: int = 0
    runc: "Runc | None" = None
    podman: "Podman | None" = None

    @property
    def pid(self) -> int:
        """The pid that the program has outside."""
        return self.first

    def kill(self) -> None:
        """Kill the program; its runtime then ends, too."""
        if harness.alive(self.first):
            os.kill(self.first, signal.SIGKILL)
        wait_until(lambda: self.process.poll() is not None, "the runtime to end")


def shared(place: Path) -> Path:
    """The folder that a container has for its output, and for what software GPUs share."""
    folder = place / "shared"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return folder


def software_gpus() -> Path:
    """The folder where software GPUs keep their accounts, which containers see, too."""
    folder = Path(os.environ.get("PHOS_SOFTGPU_DIR") or "/dev/shm/phos-softgpu")
    if not folder.exists():
        folder.mkdir()
        folder.chmod(0o1777)
    return folder


def rootfs(place: Path) -> Path:
    """An empty file system with the links that Debian has in its root."""
    root = place / "rootfs"
    for name in ("usr", "etc", "proc", "sys", "dev", "run", "tmp", "opt"):
        (root / name).mkdir(parents=True)
    for name in _LINKS:
        (root / name).symlink_to(f"usr/{name}")
    return root


def give(user: int, *paths: Path) -> None:
    """Make files and folders a user's, and their group's; no link is followed."""
    for path in paths:
        os.chown(path, user, user, follow_symlinks=False)


def environment(place: Path) -> dict[str, str]:
    """The environment of a hooked program in a container."""
    own = {"PHOS_TEST_CACHE": str(shared(place)), "PYTHONDONTWRITEBYTECODE": "1"}
    return harness.environment(hooked=True) | own


def command(program: str, place: Path, log: str = "") -> list[str]:
    """The shell command that runs a target program, with its log in the shared folder, or in a file
    of the container.
    """
    to = f">{log or _log(place)} 2>{_errors(place)}"
    line = f"exec {sys.executable} {harness.script(program)} 0 {to}"
    return ["/bin/sh", "-c", line]


@contextmanager
def run_by_runc(
    program: str,
    place: Path,
    *,
    user_namespace: bool = False,
    more: Sequence[Mapping[str, object]] = (),
    criu: str = "",
    read_only: bool = False,
    runtime: str = "runc",
    block_device: int | None = None,
    network: Path | None = None,
) -> Iterator[Contained]:
    """Run a target program in a container of runc, or of a ``runtime`` with the same commands,
    which has ``more`` mounts, the right to a ``block_device`` of this major number, and perhaps a
    root that is ``read_only``. ``criu`` is what the settings of its CRIU say. ``network`` is the
    namespace that it is in, if that is not this machine's.
    """
    bundle = place / "bundle"
    bundle.mkdir()
    subprocess.run([runtime, "spec"], cwd=bundle, check=True)
    spec = json.loads((bundle / "config.json").read_text())
    process, linux = spec["process"], spec["linux"]
    process |= {"terminal": False, "args": command(program, place), "rlimits": []}
    process["env"] = [f"{name}={value}" for name, value in environment(place).items()]
    spec["root"] = {"path": str(rootfs(place)), "readonly": read_only}
    spec["mounts"] += [bound(source, "ro") for source in _READ_ONLY]
    spec["mounts"] += [bound(path, "rw") for path in (shared(place), software_gpus())]
    spec["mounts"] += [HOOK_FOLDER, *more]
    spec["mounts"] = [each for each in spec["mounts"] if each["type"] not in ("sysfs", "cgroup")]
    if block_device is not None:
        given = {"allow": True, "type": "b", "major": block_device, "minor": 0, "access": "rw"}
        linux["resources"]["devices"].append(given)
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "network"]
    if network is not None:
        linux["namespaces"].append({"type": "network", "path": str(network)})
    if user_namespace:
        linux["namespaces"].append({"type": "user"})
        ids = [{"containerID": 0, "hostID": FIRST_MAPPED, "size": 65536}]
        linux |= {"uidMappings": ids, "gidMappings": ids}
        place.chmod(0o755)
        give(FIRST_MAPPED, place / "rootfs", *(place / "rootfs").iterdir())
    if Path(runtime).name == "crun":  # crun 1.28 does not restore what masks a folder
        linux["maskedPaths"] = [each for each in linux["maskedPaths"] if not Path(each).is_dir()]
    (place / "criu.conf").write_text(criu)
    spec["annotations"] = {"org.criu.config": str(place / "criu.conf")}
    (bundle / "config.json").write_text(json.dumps(spec))
    runc = Runc(place, f"phos-test-{secrets.token_hex(4)}", runtime)
    made = ("--bundle", str(bundle), "--pid-file", str(place / "pid"))
    # Kept: crun fails in a checkpoint that ends a container which is removed at that moment.
    words = [*runc.words, "run", "--keep", *made, runc.name]
    with running(words, [*runc.words, "delete", "--force", runc.name], program, place) as target:
        target.runc = runc
        yield target


@dataclass(frozen=True)
class Runc:
    """A container of runc, or of another ``runtime`` with its commands, and its checkpoints; CRIU
    is the one that phosd uses.
    """

    place: Path
    name: str
    runtime: str = "runc"

    @property
    def words(self) -> list[str]:
        words = [self.runtime, f"--root={self.place / 'runc'}"]
        if not self._is_crun:
            return words
        # It refuses to run where there are cgroups of both versions.
        return [*_ALONE, f'umount {_UNIFIED} 2>/dev/null; exec "$0" "$@"', *words]

    @property
    def _is_crun(self) -> bool:
        return Path(self.runtime).name == "crun"

    def checkpoint(self, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        """Save the container into a folder."""
        return self._run("checkpoint", folder, *words, self.name)

    def restore(self, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Make the container again from a folder."""
        pid = str(self.place / "pid")
        words = ("--detach", "--bundle", str(self.place / "bundle"), "--pid-file", pid, self.name)
        return self._run("restore", folder, *words)

    @property
    def pid(self) -> int:
        """The pid that the program has outside."""
        return int((self.place / "pid").read_text())

    def delete(self) -> None:
        subprocess.run([*self.words, "delete", "--force", self.name], check=True)

    def _run(self, command: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        path = f"{Criu.find().path.parent}:{os.environ['PATH']}"
        # What stays open belongs to the container that is restored.
        with (self.place / f"{command}.log").open("w+b") as log:
            given = ["--image-path", str(folder), "--work-path", str(self.place), *words]
            if self._is_crun:
                # Its containers are at the top of the hierarchy that it does not see: CRIU would
                # save all of the machine's cgroups, and make them again below the container's.
                given.insert(0, "--manage-cgroups-mode=ignore")
            done = subprocess.run(
                [*self.words, command, *given],
                input=b"",  # a pipe, as in the container: a file of this machine is not saved again
                stdout=log,
                stderr=log,
                env=os.environ | {"PATH": path, "PHOS_RUNTIME_DIR": str(self.place / "run")},
                check=False,
            )
            log.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, log.read().decode())


@contextmanager
def run_by_podman(
    program: str,
    place: Path,
    device: str,
    criu: str = "",
    *,
    user: int = 0,
    more: Sequence[str] = (),
) -> Iterator[Contained]:
    """Run a target program with podman, which gives it a device, and with it the hook. ``criu`` is
    what the settings of its CRIU say. ``user`` runs podman, and has all of ``place`` then; in the
    container it is the only user, and root. ``more`` are further options.
    """
    sources = _where_users_reach_it(place) if user else {path: path for path in _READ_ONLY}
    binds = [f"--volume={source}:{path}:ro" for path, source in sources.items()]
    binds += [f"--volume={path}:{path}" for path in (shared(place), software_gpus())]
    env = environment(place)
    del env["LD_PRELOAD"]  # which the device gives it
    variables = [f"--env={name}={env[name]}" for name in sorted(env)]
    limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
    (place / "criu.conf").write_text(criu)
    podman = Podman(place, f"phos-test-{secrets.token_hex(4)}", user)
    line = [*podman.words, "run", f"--name={podman.name}", f"--pidfile={place / 'pid'}"]
    line += ["--network=host", f"--device={device}", *limits, *binds, *variables]
    line += [f"--annotation=org.criu.config={place / 'criu.conf'}", *more]
    line += ["--rootfs", str(rootfs(place))]
    if user:
        made = (place, shared(place), place / "criu.conf", place / "rootfs")
        give(user, *made, *(place / "rootfs").iterdir())
    end = [*podman.words, "rm", "--force", "--time=0", "--ignore", podman.name]
    try:
        with running([*line, *command(program, place)], end, program, place) as target:
            target.podman = podman
            yield target
    finally:
        if user:
            podman.end()
            unmount_below(place)


def _where_users_reach_it(place: Path) -> dict[str, str]:
    """Mount what containers need where every user may go; the mounts by the paths that it has."""
    found = {}
    for number, path in enumerate(_READ_ONLY):
        (mounted := place / f"reached{number}").mkdir()
        subprocess.run(["mount", "--bind", path, mounted], check=True)
        found[path] = str(mounted)
    return found


@dataclass(frozen=True)
class Podman:
    """A podman container, in a store of its own; it asks phosd where that of ``place`` is. If a
    ``user`` runs it, that user's other podmans are not seen.
    """

    place: Path
    name: str
    user: int = 0

    @property
    def words(self) -> list[str]:
        folders = {"root": "storage", "runroot": "running", "tmpdir": "libpod"}
        given = [f"--{option}={self.place / folder}" for option, folder in folders.items()]
        return [*self._by_user, "podman", *given, *["--runtime=runc", "--storage-driver=vfs"],
                "--cgroup-manager=cgroupfs"]  # fmt: skip

    @property
    def _by_user(self) -> list[str]:
        if not self.user:
            return []
        own = [f"{name}={self.place}" for name in ("HOME", "XDG_RUNTIME_DIR")]
        ids = [f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return ["env", "--ignore-environment", f"PATH={os.environ['PATH']}", *own, "setpriv", *ids]

    @property
    def pid(self) -> int:
        """The pid that the program has outside."""
        asked = [*self.words, "inspect", "--format={{.State.Pid}}", self.name]
        return int(subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout)

    def end(self) -> None:
        """End what keeps a user's namespaces when no container runs any more."""
        if (file := self.place / "libpod/pause.pid").exists():
            os.kill(int(file.read_text()), signal.SIGKILL)

    def container(self, *words: str) -> None:
        """Run ``podman container``, with phosd's folder at its usual place: podman passes no
        environment on.
        """
        script = 'mkdir -p /run/phos; mount --bind "$0" /run/phos; exec "$@"'
        before = ["unshare", "--mount", "sh", "-ec", script, str(self.place / "run")]
        path = f"{Criu.find().path.parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [*before, *self.words, "container", *words, self.name],
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def running(
    words: Sequence[str | Path], end: Sequence[str], program: str, place: Path
) -> Iterator[Contained]:
    """Run a runtime, which writes the pid of the program into a file; ``end`` ends the container
    whatever has happened.
    """
    (log := _log(place)).touch()
    log.chmod(0o666)
    with harness.running(words, stdin=subprocess.DEVNULL) as runtime:
        try:
            first = int(wait_until(lambda: _pid(runtime, place), "the container to start"))
            yield Contained(program, log, _errors(place), runtime, first=first)  # type: ignore[arg-type]
        finally:
            subprocess.run(end, check=False, stderr=subprocess.DEVNULL)
            runtime.wait()
            unmount_below(place / "rootfs")


def unmount_below(folder: Path) -> None:
    """Unmount what is left in a folder: whoever removes that would remove the machine's own files.

    A runtime leaves some, and phosd the images in memory that are not yet on the disk.
    """
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if Path(mounted := line.split()[1]).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", mounted], check=True)


def bound_paths(place: Path) -> Iterator[tuple[str, str]]:
    """The files and folders of this machine that a container sees at the same path, and whether it
    may write there (``rw``, else ``ro``).
    """
    yield from ((path, "ro") for path in _READ_ONLY)
    yield from ((str(path), "rw") for path in (shared(place), software_gpus()))


def mounts_for_ctr(place: Path) -> Iterator[str]:
    """The mounts of a container, as ``ctr`` wants them."""
    for path, access in bound_paths(place):
        yield f"type=bind,src={path},dst={path},options=rbind:{access}"
    options = ":".join(HOOK_FOLDER["options"])
    yield f"type=tmpfs,src=tmpfs,dst={HOOK_FOLDER['destination']},options={options}"


def _pid(runtime: "subprocess.Popen[str]", place: Path) -> str:
    assert runtime.poll() is None, f"the runtime ended with {runtime.returncode}"
    path = place / "pid"
    return path.read_text() if path.exists() else ""


def bound(source: object, access: str) -> dict[str, object]:
    """Return the mount of a file or folder of this machine at the same path."""
    return {
        "destination": str(source),
        "type": "none",
        "source": str(source),
        "options": ["rbind", access],
    }


def _log(place: Path) -> Path:
    return shared(place) / "log"


def _errors(place: Path) -> Path:
    return shared(place) / "errors"


def installed(*names: str) -> bool:
    """Return whether these programs are installed."""
    return all(map(shutil.which, names))
