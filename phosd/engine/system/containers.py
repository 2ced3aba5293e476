"""The containers that programs run in: which one a process is in, and the folders that it sees.

A runtime (podman, containerd, ...) gives a container a cgroup whose name has the container's id,
and, for its hook, a folder in memory of its own (docs/operate/containers.md). All that a container
has in its file systems is its root's, who need not be ours: it is looked at, and not believed.
"""

import itertools
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phosd.engine.system import cgroups, mounts, procfs
from phosd.engine.system.places_apart import place_in_root

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
    for hierarchy, cgroup in cgroups.memberships(pid).items():
        for runtime, form in _OF_RUNTIMES:
            if found := form.search(cgroup):
                pod = _POD.search(cgroup)
                known = pod[1].replace("_", "-") if pod else ""
                above = cgroup[: cgroup.rindex("/", 0, found.start(1))]
                container = Container(runtime, found[1], pod=known)
                return named(container, pid, by_root=_is_roots(hierarchy, above))
    return None


def _is_roots(hierarchy: str, cgroup: str) -> bool:
    """Return whether only root gives names to the cgroups in this one. A user gives any to those in
    a cgroup that was delegated to them, as that of another's container.
    """
    place = cgroups.folder(hierarchy, cgroup)
    try:
        return place is not None and place.stat().st_uid == 0
    except FileNotFoundError:
        return False


def named(container: Container, pid: int, *, by_root: bool = True) -> Container:
    """Return the container of a process with its names, as far as its runtime tells them.
    ``by_root``: its id is. By any other one nothing is looked up that root's runtimes keep: users
    would read there what others run, and pass for it.
    """
    monitor, trusted = _monitor(pid)
    by_id = CONTAINERD.format(id=container.id) if by_root else ""
    folder = _option(monitor, "-b") if trusted else ""
    labels = _json(Path(folder or by_id) / "config.json", "annotations") if folder or by_id else {}
    known = _json(DOCKER / container.id / "config.v2.json") if by_root else {}
    docker = _text(known.get("Name"))
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
    """Return whether a process has a mount namespace that is not ours; False if it has ended, or
    is of a user namespace above ours, and so in no container that we could see.
    """
    try:
        return procfs.namespace(pid, "mnt") != procfs.namespace(os.getpid(), "mnt")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


@contextmanager
def own_memory(pid: int, folder: str) -> Iterator[int | None]:
    """Open a file system in memory that is mounted at ``folder`` as a process in a container sees
    it, and is no other's; None if there is none there, or the process has ended.
    """
    found = _MEMORIES.get(pid, folder) if is_apart(pid) else None
    try:
        yield found
    finally:
        if found is not None:
            os.close(found)


def known_memory(mount: int) -> int | None:
    """Return the caller's own descriptor for what :func:`own_memory` opened, by the id of its
    mount; None if no process is known any more that sees it.
    """
    return _MEMORIES.known(mount)


class _Memories:
    """Those that were opened, by their mounts' ids, which no other mounts get as long as these are
    open, each with a process that sees it: it is closed when that has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[procfs.ProcessId, int]] = {}

    def get(self, pid: int, folder: str) -> int | None:
        """Return the caller's own descriptor, None if there is none there."""
        wanted = _mount_of_memory(pid, folder)
        if wanted is None:
            return None
        with self._lock:
            self._forget_the_dead()
            if wanted in self._known:
                return os.dup(self._known[wanted][1])
        with opened(pid, folder) as found:
            # Only now nobody else can get the number of the mount.
            if found is None or mounts.mount_of(found) != _mount_of_memory(pid, folder):
                return None
            witness = procfs.process_id(pid)
            with self._lock:
                if witness is not None and mounts.mount_of(found) not in self._known:
                    self._known[mounts.mount_of(found)] = witness, os.dup(found)
            return os.dup(found)

    def known(self, mount: int) -> int | None:
        with self._lock:
            known = self._known.get(mount)
            return None if known is None else os.dup(known[1])

    def _forget_the_dead(self) -> None:
        for mount, (witness, memory) in [*self._known.items()]:
            if procfs.process_id(witness.pid) != witness:
                del self._known[mount]
                os.close(memory)


_MEMORIES = _Memories()


@contextmanager
def opened(pid: int, path: str) -> Iterator[int | None]:
    """Open what a process sees at a path, as ``O_PATH``; None if there is nothing, it has ended, or
    whoever serves a file system on the way does not answer.

    No link is followed: the container may have made it, and it may lead anywhere. What is opened
    may be on a file system that is not to be asked for anything (:mod:`.file_status`).
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    found = None
    with suppress(OSError):  # it has ended
        root = os.open(procfs.PROC / str(pid) / "root", flags)
        try:
            found = place_in_root(root, path, procfs.namespace(pid, "mnt"))
        finally:
            os.close(root)
    try:
        yield found
    finally:
        if found is not None:
            os.close(found)


def _mount_of_memory(pid: int, folder: str) -> int | None:
    """Return the id of the mount of a whole tmpfs that is the last one mounted there."""
    found = None
    with suppress(FileNotFoundError, ProcessLookupError):
        for mount in mounts.mounts(pid):
            if mount.place == folder:
                whole = mount.root == "/" and mount.kind == "tmpfs"
                found = mount.id if whole else None
    return found
