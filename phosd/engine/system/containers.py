"""The containers that programs run in: which one a process is in, and the folders that it sees.

A runtime (podman, containerd, ...) gives a container a cgroup whose name has the container's id,
and, for its hook, a folder in memory of its own (docs/operate/containers.md). All that a container
has in its file systems is its root's, who need not be ours: it is looked at, and not believed.
"""

import itertools
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phosd.engine.system import cgroups, procfs
from phosd.engine.system.in_root import place_in_root

_ID = "[0-9a-f]{64}"
_OF_RUNTIMES = (
    ("podman", re.compile(rf"libpod-({_ID})(?:\.scope)?(?:/container)?")),
    ("docker", re.compile(rf"docker[-/]({_ID})(?:\.scope)?")),
    ("containerd", re.compile(rf"cri-containerd[-:]({_ID})(?:\.scope)?")),
    ("cri-o", re.compile(rf"crio-({_ID})(?:\.scope)?(?:/container)?")),
    ("kubernetes", re.compile(rf"kubepods.*/({_ID})")),
)
"""How the last part of a container's cgroup is named by the runtimes' drivers for cgroups."""
_POD = re.compile("pod([0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
CONTAINERD = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}"
"""Where containerd keeps what it starts for Kubernetes."""
DOCKER = Path("/var/lib/docker/containers")
_CONTAINER_LABELS = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name")
_POD_LABELS = (
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"),
    ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name"),
)
"""Annotations of containerd, and of CRI-O."""
_MOST_BYTES = 1 << 20
_LONGEST_NAME = 256


@dataclass(frozen=True)
class Container:
    """A container by the id that its runtime gave it. ``name`` and ``pod`` are empty where they are
    not known; ``pod`` is the namespace and name of a pod of Kubernetes, or its uid.
    """

    runtime: str
    id: str
    name: str = ""
    pod: str = ""


def container_of(pid: int) -> Container | None:
    """Return the container that a process is in; None if it is in none that has a name, or has
    ended.
    """
    if not is_apart(pid):
        return None
    found = next(filter(None, map(_in_cgroup, cgroups.memberships(pid).values())), None)
    return found and named(found, pid)


def _in_cgroup(cgroup: str) -> Container | None:
    for runtime, form in _OF_RUNTIMES:
        if found := form.search(cgroup):
            pod = _POD.search(cgroup)
            return Container(runtime, found[1], pod=pod[1].replace("_", "-") if pod else "")
    return None


def named(container: Container, pid: int) -> Container:
    """Return the container of a process with its names, as far as its runtime tells them."""
    monitor, trusted = _monitor(pid)
    told = _option(monitor, "-b") if trusted else ""
    labels = _json(Path(told or CONTAINERD.format(id=container.id)) / "config.json", "annotations")
    docker = _text(_json(DOCKER / container.id / "config.v2.json").get("Name"))
    names = [_text(labels.get(label)) for label in _CONTAINER_LABELS]
    pods = ["/".join(_text(labels.get(label)) for label in pair) for pair in _POD_LABELS]
    return replace(
        container,
        name=next(filter(None, [*names, docker.lstrip("/"), _option(monitor, "-n")]), ""),
        pod=next((pod for pod in pods if pod != "/"), container.pod),
    )


def _monitor(pid: int) -> tuple[tuple[str, ...], bool]:
    """Return the command of what podman or CRI-O started the container with, the parent of its
    first process, and whether it is root's: others may have called anything so.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        while is_apart(pid) and (found := procfs.stat(pid)):
            pid = found.parent
        command = procfs.command_line(pid)
        if command and Path(command[0]).name == "conmon":
            return command, set(procfs.status(pid).uids) == {0}
    return (), False


def _option(command: Sequence[str], option: str) -> str:
    return dict(itertools.pairwise(command)).get(option, "")


def _json(path: Path, *keys: str) -> dict[str, Any]:
    """Return the object that a runtime wrote there, below these keys; nothing if there is none."""
    found: Any = {}
    with suppress(OSError, ValueError):
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _text(found: object) -> str:
    return found if isinstance(found, str) and len(found) <= _LONGEST_NAME else ""


def is_apart(pid: int) -> bool:
    """Return whether a process has a mount namespace that is not ours; False if it has ended."""
    try:
        return procfs.namespace(pid, "mnt") != procfs.namespace(os.getpid(), "mnt")
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def own_memory(pid: int, folder: str) -> Iterator[int | None]:
    """Open a file system in memory that is mounted at ``folder`` as a process in a container sees
    it, and is no other's; None if there is none there, or the process has ended.
    """
    device = _device_of_memory(pid, folder) if is_apart(pid) else None
    with opened(pid, folder) if device is not None else nullcontext() as found:
        status = None if found is None else os.fstat(found)
        ours = status and status.st_dev == device and stat.S_ISDIR(status.st_mode)
        yield found if ours else None


@contextmanager
def opened(pid: int, path: str) -> Iterator[int | None]:
    """Open what a process sees at a path, as ``O_PATH``; None if there is nothing, or it has ended.

    No link is followed: the container may have made it, and it may lead anywhere.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    found = None
    with suppress(OSError):  # it has ended, or its container has something else on the way there
        root = os.open(procfs.PROC / str(pid) / "root", flags)
        try:
            found = place_in_root(root, path)
        finally:
            os.close(root)
    try:
        yield found
    finally:
        if found is not None:
            os.close(found)


def _device_of_memory(pid: int, folder: str) -> int | None:
    """Return the device of the whole tmpfs that is mounted there last."""
    device = None
    with suppress(FileNotFoundError, ProcessLookupError):
        for mount in procfs.mounts(pid):
            if mount.place == folder:
                whole = mount.root == "/" and mount.kind == "tmpfs"
                device = mount.device if whole else None
    return device
