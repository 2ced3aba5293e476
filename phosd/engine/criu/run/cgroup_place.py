"""Note in which cgroup a program is, and restore it there, or where the same is limited.

CRIU itself starts in that cgroup: the memory that it fills is charged to it from the first page on,
and nothing of the program ever runs without its limits.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.image.cpu_manifest import Cgroups
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import cgroups, procfs, slurm_steps
from phosd.errors import Busy, NoSuchProcess, NotAuthorized, Reason, Unsupported

_ENTER = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True)
class Place:
    """Where to start a command: in the cgroups whose ``cgroup.procs`` are ``entries``.

    If they no longer exist, in a new systemd scope with the ``properties``, in the slice of
    the user ``uid``.
    """

    uid: int
    entries: tuple[Path, ...] = ()
    properties: tuple[str, ...] = ()

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return a command, for root, that enters the cgroups and then executes ``command``."""
        return ["/bin/sh", "-c", _ENTER, "sh", *map(str, self.entries), "--", *command]


def noted(tree: ProcessTree) -> Cgroups:
    """Return where the tree's root is.

    Raises :class:`Unsupported` if another of its processes is elsewhere, and limited otherwise:
    a restore brings all of them back into the cgroups of the root.
    """
    paths = cgroups.memberships(tree.root.pid)
    found = Cgroups(paths, cgroups.limits(paths), _run_of(paths))
    for process in tree.living:
        others = cgroups.memberships(process.pid)
        if others and others != paths and cgroups.limits(others) != found.limits:
            raise Unsupported(
                f"{procfs.describe(process.pid)} has other limits than its root, in a cgroup of "
                f"its own ({_elsewhere(others, paths)})",
                hint="the program goes on; start all of it in one cgroup",
                reason=Reason.CGROUP,
            )
    return found


def _run_of(paths: Mapping[str, str]) -> str:
    """Return an id of this run of systemd's unit, and of Slurm's step in it, if there are such."""
    return ":".join(filter(None, (cgroups.invocation(paths), slurm_steps.run_of(paths))))


def of_process(pid: int, uid: int) -> Cgroups:
    """Return where process ``pid`` is, for a program of user ``uid`` to be put there.

    Raises :class:`NoSuchProcess`, and :class:`NotAuthorized` if the process is not that user's
    alone: its limits are then not those that the user's programs have.
    """
    before = procfs.process_id(pid)
    try:
        theirs = {*procfs.status(pid).uids}
        paths = cgroups.memberships(pid)
    except (FileNotFoundError, ProcessLookupError):
        before = None
    if before is None or procfs.process_id(pid) != before:  # its pid may be another's by now
        raise NoSuchProcess(
            f"process {pid}, in whose cgroups the program was to be, has ended",
            hint="name one that runs",
        )
    if theirs != {uid}:
        raise NotAuthorized(
            f"{procfs.describe(pid)}, in whose cgroups the program was to be, is not of its "
            f"user {uid}",
            hint="name a process of that user",
        )
    return Cgroups(paths, cgroups.limits(paths))


@dataclass(frozen=True)
class Surroundings:
    """Where CRIU starts by itself.

    ``paths`` are its cgroups if it is a child of this process: None in the service, which may enter
    any. ``scopes``: systemd can make a scope for it.
    """

    paths: Mapping[str, str] | None
    scopes: bool = False


def place_of(saved: Cgroups | None, uid: int, here: Surroundings) -> Place:
    """Return where to restore what was in these cgroups.

    Raises :class:`Busy` if the cgroup is frozen, and :class:`Unsupported` if it no longer exists,
    or cannot be entered, and nothing here can limit the program as it did.
    """
    if saved is None:
        return Place(uid)
    folders = {
        name: folder
        for name, path in saved.paths.items()
        if (folder := cgroups.folder(name, path)) and (here.paths or {}).get(name) != path
    }
    # A unit or a step of that name may be another's by now, with other limits, and its memory.
    renewed = saved.invocation not in ("", _run_of(saved.paths))
    for name in folders if not renewed else ():
        if cgroups.frozen(name, saved.paths[name]):
            raise Busy(
                f"the program was in cgroup {saved.paths[name]}, which is frozen",
                hint="thaw it (cgroup.freeze, or freezer.state), and try again",
            )
    gone = [name for name, folder in folders.items() if renewed or not folder.is_dir()]
    if gone and here.scopes:
        return Place(uid, properties=_properties(saved.limits))
    entries = {name: folders[name] / "cgroup.procs" for name in folders if name not in gone}
    closed = [
        name
        for name, entry in entries.items()
        if here.paths is not None and not os.access(entry, os.W_OK)
    ]
    holds = cgroups.limits(here.paths or {})  # such as a container's, which are above both
    for names, why in ((gone, "no longer exists"), (closed, "cannot be entered from here")):
        lost = {
            limit: value
            for limit, value in saved.limits.items()
            if _is_of(limit, names) and holds.get(limit) != value
        }
        if lost:
            told = ", ".join(f"{limit}={value}" for limit, value in sorted(lost.items()))
            raise Unsupported(
                f"the program was limited by cgroup {saved.paths[names[0]]} ({told}), which {why}",
                hint="create the cgroup with these limits, or make the file system of cgroups "
                "writable, and try again",
                reason=Reason.CGROUP,
            )
    return Place(uid, tuple(entry for name, entry in entries.items() if name not in closed))


def _is_of(limit: str, hierarchies: Sequence[str]) -> bool:
    """Return whether a controller of one of these hierarchies limits this."""
    controller = limit.partition(".")[0]
    return any(not name or controller in name.split(",") for name in hierarchies)


def _properties(limits: dict[str, str]) -> tuple[str, ...]:
    """Return systemd's properties for limits (``systemd.resource-control(5)``)."""
    names = {
        "memory.max": "MemoryMax",
        "memory.high": "MemoryHigh",
        "memory.swap.max": "MemorySwapMax",
        "pids.max": "TasksMax",
        "cpuset.cpus": "AllowedCPUs",
        "cpuset.mems": "AllowedMemoryNodes",
    }
    found = [f"{names[name]}={value}" for name, value in limits.items() if name in names]
    if "cpu.max" in limits:
        quota, period = map(int, limits["cpu.max"].split())
        found.append(f"CPUQuota={max(1, 100 * quota // period)}%")
    return tuple(found)


def _elsewhere(paths: dict[str, str], known: dict[str, str]) -> str:
    return next(path for name, path in paths.items() if known.get(name) != path)
