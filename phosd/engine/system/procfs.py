"""Read what ``/proc`` says about processes, as typed values. Nothing is decided here."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phosd.engine.system.file_status import known_status

PROC = Path("/proc")
_PF_EXITING = 4
_PF_KTHREAD = 0x200000
_COMMAND_BYTES = 8 << 10
"""Most bytes of a command line that are read: a process may say that it is any of its memory."""
_ENVIRONMENT_BYTES = 6 << 20
"""The same of an environment: as much as execve(2) takes at the most."""


class ProcessId(NamedTuple):
    """A process of this boot, told apart from later ones with its pid.

    ``start_time`` is in clock ticks since boot (field 22 of ``/proc/pid/stat``).
    """

    pid: int
    start_time: int


@dataclass(frozen=True)
class Stat:
    """The content of ``/proc/pid/stat``. ``start_time`` is field 22, in clock ticks since boot;
    ``cpu_ticks`` is the time that it has run, of which a child's is none.

    ``of_kernel`` marks a kernel thread. An empty command line does not: a program has none for a
    moment in each ``execve``, and may clear it.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    terminal: int
    exiting: bool
    of_kernel: bool
    start_time: int
    cpu_ticks: int

    @property
    def dead(self) -> bool:
        """Whether it is a zombie, or about to be one."""
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger, so that no thread in it answers."""
        return self.state in "Tt"


@dataclass(frozen=True)
class Status:
    """The content of ``/proc/pid/status``: real, effective, saved and fs ids, restrictions.

    ``process`` is the thread group id, since ``/proc`` has entries for threads as well.
    ``capabilities`` are the permitted ones, and those that are ``inheritable`` or in the
    ``bounding`` set.
    """

    process: int
    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: int
    inheritable: int
    bounding: int
    seccomp: int
    tracer: int


@dataclass(frozen=True)
class Credentials:
    """The credentials of a thread. Ids are real, effective, saved and file system; capability sets
    are masks. The kernel shows ``secure_bits`` to no other process.
    """

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    inheritable: int
    permitted: int
    effective: int
    bounding: int
    ambient: int
    no_new_privileges: int
    seccomp_mode: int
    secure_bits: int = 0


@dataclass(frozen=True)
class Descriptor:
    """An open descriptor. ``target`` is where its link leads; ``file`` is the file's status, and
    ``mount`` the id of its mount.

    ``watches``: it reports changes of files (inotify, fanotify).
    """

    pid: int
    number: int
    target: str
    flags: int
    position: int
    file: os.stat_result
    mount: int
    watches: bool = False

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def link(self) -> Path:
        """A link to the open file itself, even if its path has changed."""
        return Path(f"{PROC}/{self.pid}/fd/{self.number}")


@dataclass(frozen=True)
class Mapping:
    """A line of ``/proc/pid/maps``. ``device`` is as in ``st_dev``."""

    pid: int
    start: int
    end: int
    permissions: str
    device: int
    inode: int
    path: str

    @property
    def shared(self) -> bool:
        return self.permissions[3] == "s"

    @property
    def writable(self) -> bool:
        return self.permissions[1] == "w"

    @property
    def link(self) -> Path:
        """A link to the mapped file itself, even if its path has changed."""
        return PROC / str(self.pid) / "map_files" / f"{self.start:x}-{self.end:x}"


def stat(pid: int) -> Stat | None:
    """Return the process or thread ``pid``, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    parent, group, session, terminal = map(int, rest[1:5])
    flags = int(rest[6])
    return Stat(
        pid=pid,
        name=name,
        state=rest[0],
        parent=parent,
        group=group,
        session=session,
        terminal=terminal,
        exiting=bool(flags & _PF_EXITING),
        of_kernel=bool(flags & _PF_KTHREAD),
        start_time=int(rest[19]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
    )


def lines(path: "Path | str") -> list[str]:
    """Split a file of the kernel into lines, at newlines only.

    In names that users chose the kernel escapes only newlines, not the other characters at which
    ``read_text`` and ``splitlines`` end a line.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.readall().decode(errors="replace").split("\n")


def process_id(pid: int) -> ProcessId | None:
    """Return the process that has this pid now; None if it has ended."""
    found = stat(pid)
    return None if found is None or found.dead else ProcessId(pid, found.start_time)


def status(pid: int) -> Status:
    """Read ``/proc/pid/status``.

    Raises :class:`ProcessLookupError` or :class:`FileNotFoundError` if the process has ended.
    """
    fields = fields_of(PROC / str(pid) / "status")
    return Status(
        process=int(fields["Tgid"]),
        uids=_numbers(fields, "Uid"),
        gids=_numbers(fields, "Gid"),
        groups=_numbers(fields, "Groups"),
        capabilities=int(fields.get("CapPrm", "0"), 16),
        inheritable=int(fields.get("CapInh", "0"), 16),
        bounding=int(fields.get("CapBnd", "0"), 16),
        seccomp=int(fields.get("Seccomp", "0")),
        tracer=int(fields["TracerPid"]),
    )


def credentials(thread: int) -> Credentials:
    """Read the credentials of a thread.

    Raises :class:`ProcessLookupError` or :class:`FileNotFoundError` if the thread has ended.
    """
    return credentials_in(PROC / str(thread))


def credentials_in(folder: Path) -> Credentials:
    """Read the credentials of the thread with this folder in ``/proc``, which may be a link to it.

    Raises what :func:`credentials` raises.
    """
    fields = fields_of(folder / "status")
    return Credentials(
        uids=_numbers(fields, "Uid"),
        gids=_numbers(fields, "Gid"),
        groups=tuple(sorted(_numbers(fields, "Groups"))),
        inheritable=int(fields["CapInh"], 16),
        permitted=int(fields["CapPrm"], 16),
        effective=int(fields["CapEff"], 16),
        bounding=int(fields["CapBnd"], 16),
        ambient=int(fields["CapAmb"], 16),
        no_new_privileges=int(fields["NoNewPrivs"]),
        seccomp_mode=int(fields["Seccomp"]),
    )


def own_id(thread: int) -> int:
    """Return the id that a process or thread has for itself: in the innermost pid namespace that it
    is in.

    Raises :class:`ProcessLookupError` or :class:`FileNotFoundError` if it has ended.
    """
    return _numbers(fields_of(PROC / str(thread) / "status"), "NSpid")[-1]


def tracer(pid: int) -> int:
    """Return the process that traces a thread of ``pid``; 0 if none does, or it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in threads(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if found := status(thread).tracer:
                    return found
    return 0


def ending(pid: int) -> bool:
    """Return whether ``pid`` is ending: a zombie, killed, or freeing its memory."""
    found = stat(pid)
    if found is None or found.dead or found.exiting:
        return True
    try:
        fields = fields_of(PROC / str(pid) / "status")
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = (int(fields.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd"))
    return any(mask & 1 << (signal.SIGKILL - 1) for mask in pending)


def system_call(pid: int) -> int | None:
    """Return the number of the system call that ``pid`` waits in; None if in none, if it has ended,
    or if the kernel does not tell.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        number = (PROC / str(pid) / "syscall").read_text().split()[0]
        return int(number) if number.isdigit() else None
    return None


def pids() -> Iterator[int]:
    """Yield every process of this pid namespace and nested ones."""
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def threads(pid: int) -> tuple[int, ...]:
    return tuple(sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()))


def children(pid: int) -> tuple[int, ...]:
    """Return the children of all threads of ``pid``."""
    found: list[int] = []
    for thread in threads(pid):
        path = PROC / str(pid) / "task" / str(thread) / "children"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += map(int, path.read_text().split())
    return tuple(found)


def namespace(pid: int, kind: str) -> str:
    """Return the identity of a namespace of ``pid``, such as ``mnt:[4026531840]``."""
    return str((PROC / str(pid) / "ns" / kind).readlink())


def command_line(pid: int) -> tuple[str, ...]:
    """Return the words of the command of ``pid``, as far as 8 KiB go."""
    raw = _beginning(PROC / str(pid) / "cmdline", _COMMAND_BYTES)
    return tuple(os.fsdecode(word) for word in raw.removesuffix(b"\0").split(b"\0")) if raw else ()


def environment(pid: int) -> list[bytes]:
    """Return the ``NAME=VALUE`` of the environment that ``pid`` began with."""
    return _beginning(PROC / str(pid) / "environ", _ENVIRONMENT_BYTES).split(b"\0")


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def describe(pid: int) -> str:
    """Describe a process for messages: ``pid 12 (python train.py)``."""
    try:
        command = " ".join(command_line(pid))
    except (FileNotFoundError, ProcessLookupError):
        command = ""
    if not command:
        found = stat(pid)
        command = found.name if found else "gone"
    return f"pid {pid} ({command[:80]})"


def descriptors(
    pid: int, without: type[OSError] | tuple[type[OSError], ...] = FileNotFoundError
) -> list[Descriptor]:
    """Return the open descriptors of ``pid``, without those that cannot be looked at for these
    reasons: by default, that they were closed meanwhile.

    Raises :class:`PermissionError`, naming the file, for those on a FUSE file system that is for
    one user alone.
    """
    folder, found = f"{PROC}/{pid}", []
    for number in sorted(int(entry.name) for entry in os.scandir(f"{folder}/fd")):
        link = f"{folder}/fd/{number}"  # a text: paths would take most of the time
        try:
            target = os.readlink(link)  # noqa: PTH115
            try:
                file = known_status(link)
            except PermissionError as error:
                raise PermissionError(error.errno, error.strerror, target) from error
            fields = fields_of(f"{folder}/fdinfo/{number}")
        except without:
            continue
        flags, position = int(fields["flags"], 8), int(fields["pos"])
        watches = any(name.startswith(("inotify wd", "fanotify ino")) for name in fields)
        mount = int(fields["mnt_id"])
        found.append(Descriptor(pid, number, target, flags, position, file, mount, watches))
    return found


def mappings(pid: int) -> list[Mapping]:
    """Return the mapped files of ``pid``, with devices, named memory, and what is of uprobes."""
    text = (PROC / str(pid) / "maps").read_bytes().decode(errors="surrogateescape")
    found = []
    for line in text.split("\n"):
        words = line.split(None, 5)
        if len(words) < 6 or (words[5].startswith("[") and not words[5].startswith("[uprobes")):
            continue
        start, end = words[0].split("-")
        major, minor = words[3].split(":")
        found.append(
            Mapping(
                pid=pid,
                start=int(start, 16),
                end=int(end, 16),
                permissions=words[1],
                device=os.makedev(int(major, 16), int(minor, 16)),
                inode=int(words[4]),
                path=words[5].replace("\\012", "\n"),
            )
        )
    return found


def fields_of(path: "Path | str") -> dict[str, str]:
    """Return the fields of a file such as ``/proc/pid/status``."""
    return dict(line.split(":", 1) for line in lines(path) if ":" in line)


def _numbers(fields: dict[str, str], name: str) -> tuple[int, ...]:
    """Return the numbers of a field, which are separated by blanks."""
    return tuple(map(int, fields[name].split()))


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
