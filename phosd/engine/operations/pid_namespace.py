"""Make a pid namespace for a program that a user is about to start (``phos run --name``).

phosd's part ends with the keeper, which is the user's process, with the limits and in the
cgroup of the one that has asked. What the keeper starts is between the two
(:mod:`phosd.engine.program.keeper`).
"""

import json
import re
import sys
import time
from contextlib import ExitStack
from typing import Any

from phosd.engine.criu.run import launch
from phosd.engine.criu.run.cgroup_place import place_of
from phosd.engine.criu.run.launch import Started
from phosd.engine.image.cpu_manifest import Cgroups
from phosd.engine.node.node import Node
from phosd.engine.operations.starter import Starter
from phosd.engine.program import keeper
from phosd.engine.program.namespace_maker import NamespaceMaker
from phosd.engine.system import audit, cgroups, pid_namespaces, procfs
from phosd.errors import Busy, Internal, InvalidOption

_SOCKET = re.compile("[0-9A-Za-z._-]{1,100}")
_MOST_OF_A_USER = 1000
_TIMEOUT = 30.0
_LOOK_SECONDS = 0.005


def make_pid_namespace(node: Node, pid: int, uid: int, socket: str, end: str) -> int:
    """Make a namespace for process ``pid`` of user ``uid``, and return the pid of its keeper.

    The keeper connects to the abstract ``socket`` of that process, to be told what to start, and
    writes to the file ``end``, if it is given one, how that has ended. Raises :class:`Unsupported`
    if the process is in a sandbox that the program would not be in, and what
    :class:`Starter` raises.
    """
    if not _SOCKET.fullmatch(socket):
        raise InvalidOption(
            f"{socket[:200]!r} is no name of a socket that phosd takes",
            hint="use up to 100 letters, digits, and any of . _ -",
        )
    caller = Starter.look(pid)
    caller.require_plain(uid, node.criu)
    caller.require_asking(socket)
    rights = caller.credentials
    _require_few(node, uid)
    with ExitStack() as stack:
        maker = stack.enter_context(NamespaceMaker(node.config.runtime_dir))
        orders = {
            "namespace": maker.orders,
            "user": [uid, rights.gids[0], list(rights.groups)],
            "caller": _told(caller),
            "socket": socket,
            "end": end,
        }
        saved = Cgroups(dict(caller.cgroups), cgroups.limits(caller.cgroups))
        started = launch.launch(
            [sys.executable, "-S", "-P", "-m", keeper.__name__, json.dumps(orders)],
            maker.descriptors,
            node.criu.service,
            tied=False,
            place=place_of(saved, uid, node.criu.surroundings),
        )
        stack.callback(started.close)
        try:
            maker.started()
            made = maker.made(caller.require_same_place)
            _await(started)
        except BaseException:
            started.kill()  # it may be held up: in a cgroup that its user has frozen, for one
            maker.end()
            raise
        audit.note_other(made.keeper.pid, caller.loginuid)
        return made.keeper.pid


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


def _told(caller: Starter) -> dict[str, Any]:
    """Return what the keeper takes over from the process that has asked."""
    last = int((procfs.PROC / "sys/kernel/cap_last_cap").read_text())
    bounding = caller.credentials.bounding
    return {
        "limits": caller.limits,
        "cpus": caller.cpus,
        "scheduler": caller.scheduler,
        "nice": caller.nice,
        "oom_score": caller.oom_score,
        "loginuid": caller.loginuid,
        "without": [n for n in range(last + 1) if not bounding >> n & 1],
    }


def _await(started: Started) -> None:
    """Wait until the keeper is ready, and the process that made it has ended."""
    give_up = time.monotonic() + _TIMEOUT
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
