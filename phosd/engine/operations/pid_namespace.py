"""Make a pid namespace for a program that a user is about to start (``phos run --name``).

phosd's part ends with the keeper, which is a process of the user's, with the limits and in the
cgroup of the one that has asked. What the keeper starts is between the two
(:mod:`phosd.engine.program.keeper`).
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from phosd.engine.criu import launch
from phosd.engine.criu.cgroup_place import place_of
from phosd.engine.criu.launch import Started
from phosd.engine.image.cpu_manifest import Cgroups
from phosd.engine.node.node import Node
from phosd.engine.program import keeper
from phosd.engine.program.namespace_maker import NamespaceMaker
from phosd.engine.program.tree import TreeProcess, scan
from phosd.engine.system import cgroups, pid_namespaces, procfs
from phosd.errors import Busy, Internal, NoSuchProcess, NotAuthorized, Reason, Unsupported

_MOST_OF_A_USER = 1000
_PATIENCE = 30.0
_LOOK_SECONDS = 0.005


def make_pid_namespace(node: Node, pid: int, uid: int, socket: str, end: str) -> int:
    """Make a namespace for process ``pid`` of user ``uid``, and return the pid of its keeper.

    The keeper connects to the abstract ``socket`` of that process, to be told what to start, and
    writes to the file ``end``, if it is given one, how that has ended. Raises :class:`Unsupported`
    if the process is in a sandbox that the program would not be in.
    """
    caller = _caller(node, pid, uid)
    _require_few(node, uid)
    with ExitStack() as stack:
        maker = stack.enter_context(NamespaceMaker(node.config.runtime_dir))
        orders = {
            "namespace": maker.orders,
            "user": [caller.uid, caller.gid, list(caller.groups)],
            "caller": _limits(pid),
            "socket": socket,
            "end": end,
        }
        paths = cgroups.memberships(pid)
        started = launch.launch(
            [sys.executable, "-S", "-P", "-m", keeper.__name__, json.dumps(orders)],
            maker.descriptors,
            node.criu.service,
            tied=False,
            place=place_of(Cgroups(paths, cgroups.limits(paths)), uid, node.criu.surroundings),
        )
        stack.callback(started.close)
        maker.started()
        made = maker.made()
        try:
            _await(started)
        except BaseException:
            maker.end()
            raise
        return made.keeper.pid


def _caller(node: Node, pid: int, uid: int) -> TreeProcess:
    """Return the process that asks, if a program that phosd starts has no more rights than it."""
    process = scan(pid).root
    if {*process.uids} != {uid} or {*process.gids} != {process.gid}:
        raise NotAuthorized(
            f"{procfs.describe(pid)} has ids other than those of user {uid}",
            hint="start it as one user",
        )
    rights = procfs.credentials(pid)
    foreign = [
        kind
        for kind, name in node.criu.namespaces.items()
        if not kind.endswith("_for_children") and procfs.namespace(pid, kind) != name
    ]
    sandbox = (
        (rights.seccomp_mode, "is under seccomp filters"),
        (rights.no_new_privileges, "may gain no privileges, and be under Landlock rules"),
        (uid != 0 and rights.permitted, "has capabilities"),
        (foreign, f"is in a container or sandbox (its own {', '.join(foreign)} namespace)"),
    )
    for found, what in sandbox:
        if found:
            raise Unsupported(
                f"{procfs.describe(pid)} {what}, which a program started by phosd would not be",
                hint="it can be started without a pid namespace of its own (--no-pidns)",
                reason=Reason.PROCESS_STATE,
            )
    return process


def _require_few(node: Node, uid: int) -> None:
    """Raise :class:`Busy` if the user has so many that something must be wrong."""
    count = 0
    for each in pid_namespaces.living(node.config.runtime_dir):
        try:
            count += procfs.status(each.keeper.pid).uids[0] == uid
        except (FileNotFoundError, ProcessLookupError):
            continue
    if count >= _MOST_OF_A_USER:
        raise Busy(
            f"user {uid} has {count} pid namespaces already", hint="end programs, and try again"
        )


def _limits(pid: int) -> dict[str, Any]:
    """Return what limits a process; it may have ended."""
    last = int((procfs.PROC / "sys/kernel/cap_last_cap").read_text())
    try:
        bounding = procfs.credentials(pid).bounding
        return {
            "limits": procfs.limits(pid),
            "cpus": sorted(os.sched_getaffinity(pid)),
            "nice": os.getpriority(os.PRIO_PROCESS, pid),
            "oom_score": int((procfs.PROC / str(pid) / "oom_score_adj").read_text()),
            "without": [n for n in range(last + 1) if not bounding >> n & 1],
        }
    except (FileNotFoundError, ProcessLookupError):
        raise NoSuchProcess(
            f"process {pid} has ended, which asked for a pid namespace", hint="start it again"
        ) from None


def _await(started: Started) -> None:
    """Wait until the keeper is ready, and the process that made it has ended."""
    give_up = time.monotonic() + _PATIENCE
    while started.poll() is None:
        if time.monotonic() > give_up:
            raise Internal("a pid namespace was not made in time", hint="try again")
        time.sleep(_LOOK_SECONDS)
    if started.returncode != 0:
        said = started.said.strip().splitlines()
        raise Internal(
            f"no pid namespace could be made: {said[-1] if said else 'for no known reason'}",
            hint="start the program without one (--no-pidns)",
        )
