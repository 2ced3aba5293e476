"""Programs in containers, made by runc or podman from what this machine has: no image is fetched.

The container sees this machine's libraries, interpreter and checkout, read-only, and has a folder
for its output. Everything else is its own; but for the network, as a software GPU is reached by a
socket of it.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phosd.engine.system import procfs
from tests.support import harness
from tests.support.harness import wait_until

CHECKOUT = Path(__file__).parents[2]
HOOK_FOLDER = {
    "destination": "/run/phos/hook",
    "type": "tmpfs",
    "source": "tmpfs",
    "options": ["nosuid", "nodev", "noexec", "mode=1733", "size=64k"],
}
"""What `phos setup-container-runtime` has runtimes mount."""
FIRST_MAPPED = 100_000
_READ_ONLY = ("/usr", "/etc", sys.base_prefix, sys.prefix, str(CHECKOUT))
_LINKS = ("bin", "lib", "lib64", "sbin")


@dataclass
class Contained(harness.Target):
    """A target program in a container; ``process`` is the runtime's, ``first`` the program."""

    first: int = 0

    @property
    def pid(self) -> int:
        """The pid that the program has outside."""
        return self.first

    def kill(self) -> None:
        """Kill the program; its runtime then ends, too."""
        if harness.alive(self.first):
            os.kill(self.first, 9)
        self.process.wait()


def shared(place: Path) -> Path:
    """The folder that a container has for its output, and for what software GPUs share."""
    folder = place / "shared"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return folder


def rootfs(place: Path) -> Path:
    """An empty file system with the links that Debian has in its root."""
    root = place / "rootfs"
    for name in ("usr", "etc", "proc", "sys", "dev", "run", "tmp"):
        (root / name).mkdir(parents=True)
    for name in _LINKS:
        (root / name).symlink_to(f"usr/{name}")
    return root


def environment(place: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a hooked program in a container."""
    env = harness.environment(hooked=True, extra=extra)
    return env | {"PHOS_TEST_CACHE": str(shared(place)), "PYTHONDONTWRITEBYTECODE": "1"}


def command(program: str, place: Path) -> list[str]:
    """The shell command that runs a target program, with its log in the shared folder."""
    line = f"exec {sys.executable} {harness.script(program)} 0 >{_log(place)} 2>{_errors(place)}"
    return ["/bin/sh", "-c", line]


@contextmanager
def run_by_runc(
    program: str,
    place: Path,
    *,
    user_namespace: bool = False,
    folder: Mapping[str, Any] | None = HOOK_FOLDER,
    extra: Mapping[str, str] | None = None,
) -> Iterator[Contained]:
    """Run a target program in a container of runc's. ``folder`` is the mount for its hook."""
    bundle = place / "bundle"
    bundle.mkdir()
    subprocess.run(["runc", "spec"], cwd=bundle, check=True)
    spec = json.loads((bundle / "config.json").read_text())
    process, linux = spec["process"], spec["linux"]
    process |= {"terminal": False, "args": command(program, place), "rlimits": []}
    process["env"] = [f"{name}={value}" for name, value in environment(place, extra).items()]
    spec["root"] = {"path": str(rootfs(place)), "readonly": False}
    spec["mounts"] += [_bound(source, "ro") for source in _READ_ONLY]
    spec["mounts"] += [_bound(shared(place), "rw"), *([folder] if folder else [])]
    spec["mounts"] = [each for each in spec["mounts"] if each["type"] not in ("sysfs", "cgroup")]
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "network"]
    if user_namespace:
        linux["namespaces"].append({"type": "user"})
        ids = [{"containerID": 0, "hostID": FIRST_MAPPED, "size": 65536}]
        linux |= {"uidMappings": ids, "gidMappings": ids}
        place.chmod(0o755)
        for folder_of_root in (place / "rootfs", *(place / "rootfs").iterdir()):
            os.chown(folder_of_root, FIRST_MAPPED, FIRST_MAPPED, follow_symlinks=False)
    (bundle / "config.json").write_text(json.dumps(spec))
    name = f"phos-test-{secrets.token_hex(4)}"
    with _running(["runc", "run", "--bundle", bundle, name], program, place) as target:
        yield target


@contextmanager
def run_by_podman(
    program: str, place: Path, words: Sequence[str], podman: Sequence[str]
) -> Iterator[Contained]:
    """Run a target program with podman. ``words`` are options of ``run``, and ``podman`` podman's
    own.
    """
    binds = [f"--volume={source}:{source}:ro" for source in _READ_ONLY]
    env = environment(place)
    del env["LD_PRELOAD"]  # which the device gives it
    variables = [f"--env={name}={env[name]}" for name in sorted(env)]
    line = ["podman", *podman, "run", "--rm", "--network=host", *words, *binds, *variables]
    line += [f"--volume={shared(place)}:{shared(place)}", "--rootfs", str(rootfs(place))]
    with _running([*line, *command(program, place)], program, place) as target:
        yield target


@contextmanager
def _running(words: Sequence[str | Path], program: str, place: Path) -> Iterator[Contained]:
    (log := _log(place)).touch()
    log.chmod(0o666)
    with harness.running(words, stdin=subprocess.DEVNULL) as runtime:
        target = Contained(program, log, _errors(place), runtime)  # type: ignore[arg-type]
        try:
            target.first = wait_until(lambda: _first(runtime, program), "the program to start")
            yield target
        finally:
            target.kill()


def _first(runtime: "subprocess.Popen[str]", program: str) -> int:
    """Return the program, which is the first process of its namespace."""
    assert runtime.poll() is None, f"the runtime ended with {runtime.returncode}"
    for pid in procfs.pids():
        if str(harness.script(program)) in procfs.command_line(pid) and procfs.own_id(pid) == 1:
            return pid
    return 0


def _bound(source: object, access: str) -> dict[str, object]:
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
