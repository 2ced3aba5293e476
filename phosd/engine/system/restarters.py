"""Say which service of systemd a process is, if that is started again after a crash.

Managers are asked, a user's as that user, who may have made one that does not answer. What a
manager said is believed for a minute.
"""

import os
import pwd
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phosd.engine.system import cgroups, privileges, procfs

_USERS_MANAGER = re.compile(r"/user\.slice/user-\d+\.slice/user@(\d+)\.service(/.*)")
"""The cgroup of a user's own manager, made by root, and what the user made below it."""
_SERVICE = re.compile(r"[^/]+\.service")
_AFTER_A_CRASH = frozenset({"always", "on-failure", "on-abnormal", "on-abort"})
"""Values of ``Restart=`` (systemd.service(5)) that start a service again that a signal ended."""
_ANSWER_SECONDS = 2.0
_BELIEVED_SECONDS = 60.0
_MOST_KNOWN = 10_000


@dataclass(frozen=True)
class Unit:
    """A service of the system's manager, or of the manager of user ``uid``."""

    name: str
    uid: int | None

    def __str__(self) -> str:
        return f"unit {self.name}" if self.uid is None else f"user unit {self.name}"


@dataclass(frozen=True)
class Service:
    """What a manager says of a service; ``main`` is 0 if it has no main process."""

    main: int
    restarts: bool


class Restarters:
    """Knows what the managers of services said. May be used by many threads."""

    def __init__(self, ask: Callable[[Unit], Service | None] | None = None) -> None:
        self._ask = ask or _ask
        self._known: dict[Unit, tuple[float, Service | None]] = {}
        self._silent: dict[int | None, float] = {}
        self._lock = threading.Lock()

    def unit_of(self, pid: int, *, named: bool, follower: int | None = None) -> str:
        """Return the unit whose manager would start the program of process ``pid`` again if it
        crashed; empty if there is none. ``named``: `phos run --name` started it, which is none of
        its ancestors, and ends when it does. ``follower``: this process goes on with it, wherever
        that is by now, and ends when it does.
        """
        if follower is not None:
            pid, named = follower, False
        unit = unit_of(cgroups.memberships(pid))
        service = None if unit is None else self._asked(unit)
        if unit is None or service is None or not service.restarts:
            return ""
        return str(unit) if named or _belongs_to(pid, service.main) else ""

    def _asked(self, unit: Unit) -> Service | None:
        now = time.monotonic()
        with self._lock:
            when, service = self._known.get(unit, (-_BELIEVED_SECONDS, None))
            silent = self._silent.get(unit.uid, -_BELIEVED_SECONDS)
        if now - max(when, silent) < _BELIEVED_SECONDS:
            return service
        try:
            service = self._ask(unit)
        except subprocess.TimeoutExpired:
            with self._lock:
                self._silent[unit.uid] = time.monotonic()  # nor is it asked for its other services
            return service
        with self._lock:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[unit] = (time.monotonic(), service)
        return service


def unit_of(places: Mapping[str, str]) -> Unit | None:
    """Return the innermost service that has these cgroups."""
    path = places.get(cgroups.UNIFIED) or places.get("name=systemd", "")
    users = _USERS_MANAGER.fullmatch(path)
    below = users[2] if users else path
    names = [part for part in below.split("/") if _SERVICE.fullmatch(part)]
    # Anything else below a service is its own business, and a scope is nobody's service.
    if not names or below.rpartition("/")[2].endswith(".scope"):
        return None
    return Unit(names[-1] if users else names[0], int(users[1]) if users else None)


def _belongs_to(pid: int, main: int) -> bool:
    """Return whether a process is a service's main one, or waited for by it: within one session.
    A daemon that starts other people's programs (sshd, cron) gives each a session.
    """
    stat = procfs.stat(pid)
    while stat is not None and stat.pid != main:
        parent = procfs.stat(stat.parent) if stat.parent > 0 else None
        stat = parent if parent is not None and parent.session == stat.session else None
    return stat is not None


def _ask(unit: Unit) -> Service | None:
    """Ask a service's manager; None if it knows nothing of it. Raises
    :class:`subprocess.TimeoutExpired`.
    """
    words = ["/usr/bin/systemctl", "show", "--property=MainPID,Restart", "--", unit.name]
    environment = None
    try:
        if unit.uid is not None:
            words.insert(1, "--user")
            environment = {"XDG_RUNTIME_DIR": f"/run/user/{unit.uid}"}
            words = _as_user(unit.uid, words)
        said = subprocess.run(
            words,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            env=environment,
        ).stdout
    except (OSError, KeyError, subprocess.CalledProcessError):
        return None  # no systemctl, no such user, no manager
    told = dict(line.partition("=")[::2] for line in said.splitlines())
    main = told.get("MainPID", "")
    if not main.isascii() or not main.isdecimal():
        return None
    return Service(int(main), told.get("Restart") in _AFTER_A_CRASH)


def _as_user(uid: int, words: list[str]) -> list[str]:
    """Return the command line that runs ``words`` as a user, whose manager answers nobody else."""
    if os.geteuid() != 0:
        return words
    return privileges.command(
        words, uid=uid, gid=pwd.getpwuid(uid).pw_gid, groups=(), dies_with_parent=True
    )
