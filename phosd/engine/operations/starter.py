"""Look at the process that asks phosd to start a program: the program must have no more than it.

It is any process of a user, and may change or end while it is looked at: a program that it
executes may have other ids and limits for a while (sudo lifts its own limits), and its pid may get
to another process, which is in no sandbox. So it is looked at twice.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phosd.engine.criu.run.program import Criu
from phosd.engine.system import audit, cgroups, procfs, rlimit, sockets
from phosd.engine.system.procfs import Credentials, ProcessId
from phosd.errors import Busy, NoSuchProcess, NotAuthorized, Reason, Unsupported

_UNCONFINED = ("", "unconfined")


@dataclass(frozen=True)
class Starter:
    """What a process has, and what limits it. ``of_threads`` are the credentials of all threads;
    ``confinement`` is the label that a security module gives it, as AppArmor does; ``loginuid`` its
    audit identity, None if the kernel has no audit.
    """

    id: ProcessId
    of_threads: frozenset[Credentials]
    namespaces: Mapping[str, str]
    root: str
    confinement: str
    cgroups: Mapping[str, str]
    limits: Mapping[int, tuple[int, int]]
    cpus: Sequence[int]
    scheduler: int
    nice: int
    oom_score: int
    loginuid: int | None

    @property
    def credentials(self) -> Credentials:
        """Those of all threads. Raises :class:`Unsupported` if they differ."""
        if len(self.of_threads) != 1:
            raise _refusal(self, "has threads with different rights")
        return next(iter(self.of_threads))

    @classmethod
    def look(cls, pid: int) -> "Starter":
        """Look at process ``pid``.

        Raises :class:`NoSuchProcess` if it has ended, and :class:`Unsupported` if it is closed to
        phosd, as in a container whose user namespace is not below phosd's.
        """
        try:
            return _seen(pid)
        except (FileNotFoundError, ProcessLookupError):
            raise NoSuchProcess(
                f"process {pid} has ended, which asked for a pid namespace", hint="start it again"
            ) from None
        except PermissionError as error:
            raise Unsupported(
                f"process {pid}, which asked for a pid namespace, lets nobody look at it"
                f" ({error.filename})",
                hint="it can be started without a pid namespace of its own (--no-pidns)",
                reason=Reason.CLOSED_PROCESS,
            ) from None

    def require_asking(self, socket: str) -> None:
        """Raise :class:`NotAuthorized` unless this is the process that listens on the abstract
        ``socket``, and :class:`Busy` if it has changed.
        """
        # A connection to the bus may outlive the process that the bus names for it.
        if not _listens(self.id.pid, socket):
            raise NotAuthorized(
                f"{procfs.describe(self.id.pid)} does not listen on the abstract socket {socket!r}",
                hint="the process that asks must be the one that tells what to start",
            )
        if Starter.look(self.id.pid) != self:
            raise Busy(
                f"{procfs.describe(self.id.pid)} changes its rights or limits while phosd looks at "
                "them",
                hint="try again",
            )

    def require_plain(self, uid: int, criu: Criu) -> None:
        """Raise :class:`NotAuthorized` unless the process is user ``uid``'s, and
        :class:`Unsupported` if it is in a sandbox that phosd's command would not be in.
        """
        rights = self.credentials
        if {*rights.uids} != {uid} or len({*rights.gids}) != 1:
            raise NotAuthorized(
                f"{procfs.describe(self.id.pid)} has ids other than those of user {uid}",
                hint="start it as one user",
            )
        ours = criu.namespaces.items()
        foreign = [kind for kind, name in ours if self.namespaces.get(kind, name) != name]
        sandbox = (
            (rights.seccomp_mode, "is under seccomp filters"),
            (rights.no_new_privileges, "may gain no privileges, and be under Landlock rules"),
            (uid and (rights.permitted or rights.ambient), "has capabilities"),
            (not uid and rights.permitted != rights.bounding, "has given up capabilities"),
            (foreign, f"is in a container or sandbox (its own {', '.join(foreign)} namespace)"),
            (self.root != "/", f"has another root directory ({self.root})"),
            (self.confinement not in _UNCONFINED, f"is confined ({self.confinement})"),
        )
        for found, what in sandbox:
            if found:
                raise _refusal(self, f"{what}, which a program started by phosd would not be")

    def require_same_place(self, pid: int) -> None:
        """Raise :class:`Unsupported` if a process that phosd has started is not where this one is:
        it may have left its cgroup meanwhile, or phosd may not enter that.
        """
        if cgroups.memberships(pid) != self.cgroups:
            raise _refusal(self, f"is in cgroups that phosd cannot enter ({self.cgroups})")
        if _confinement(pid) not in _UNCONFINED:
            raise _refusal(self, f"is less confined than phosd ({_confinement(pid)})")


def _seen(pid: int) -> Starter:
    process = procfs.process_id(pid)
    if process is None:
        raise ProcessLookupError(pid)
    kinds = (entry.name for entry in (procfs.PROC / str(pid) / "ns").iterdir())
    return Starter(
        id=process,
        of_threads=frozenset(_credentials(pid)),
        namespaces={
            kind: procfs.namespace(pid, kind)
            for kind in kinds
            if not kind.endswith("_for_children")
        },
        root=str((procfs.PROC / str(pid) / "root").readlink()),
        confinement=_confinement(pid),
        cgroups=cgroups.memberships(pid),
        limits=rlimit.limits(pid),
        cpus=sorted(os.sched_getaffinity(pid)),
        scheduler=os.sched_getscheduler(pid),
        nice=os.getpriority(os.PRIO_PROCESS, pid),
        oom_score=int((procfs.PROC / str(pid) / "oom_score_adj").read_text()),
        loginuid=audit.loginuid(pid),
    )


def _credentials(pid: int) -> Iterator[Credentials]:
    for thread in procfs.threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            yield procfs.credentials(thread)


def _confinement(pid: int) -> str:
    try:
        return (procfs.PROC / str(pid) / "attr/current").read_text().strip("\0\n")
    except OSError as error:
        if isinstance(error, FileNotFoundError | ProcessLookupError):
            raise
        return ""  # EINVAL: no security module gives labels


def _listens(pid: int, name: str) -> bool:
    inodes = {
        f"socket:[{each.inode}]"
        for each in sockets.unix_sockets().values()
        if each.listening and each.name == f"@{name}"
    }
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for link in (procfs.PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # just closed
                if str(link.readlink()) in inodes:
                    return True
    return False


def _refusal(starter: Starter, what: str) -> Unsupported:
    return Unsupported(
        f"{procfs.describe(starter.id.pid)} {what}",
        hint="it can be started without a pid namespace of its own (--no-pidns)",
        reason=Reason.PROCESS_STATE,
    )
