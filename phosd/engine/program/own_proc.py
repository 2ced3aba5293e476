"""Mount a /proc of a new pid namespace, which hides and shows what the other one does."""

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
_MNT_DETACH = 2
_PROC_OPTIONS = ("hidepid=", "gid=", "subset=")
"""What the other /proc has, too."""
_DELETED = "//deleted"
"""How the kernel ends the name of a file that is mounted somewhere, and has no name any more."""
_MOST_COPIED = 64 << 10
libc = ctypes.CDLL(None, use_errno=True)


class _Nameless(NamedTuple):
    """A file that is mounted at ``place``, and that no second mount can have: it was deleted."""

    place: str
    mode: int
    content: bytes


def mount_proc(aside: str) -> int:
    """Mount a /proc of this pid namespace, with the options of the other one, and with what is
    mounted on that: a container hides parts of it so, and shows its own figures instead of those
    of the machine. ``aside`` is a folder on which the other one is mounted meanwhile.

    Returns a descriptor of ``ns_last_pid``, which a container may forbid to write to.
    """
    options: list[str] = []
    covers: list[str] = []
    automatic: set[str] = set()
    deleted: set[str] = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, found = after.split(" ", 2)
        if place == "/proc":  # the last one is the one that is seen
            options = [each for each in found.split(",") if each.startswith(_PROC_OPTIONS)]
            covers, automatic, deleted = [], set(), set()
        elif place.startswith("/proc/"):
            # To go there would mount it (binfmt_misc, by systemd).
            (automatic.add if kind == "autofs" else covers.append)(place)
            (deleted.add if root.endswith(_DELETED) else deleted.discard)(place)
    nameless = [each for place in sorted(deleted - automatic) if (each := _nameless(place))]
    if covers:
        mount("/proc", aside, "", MS_BIND | MS_REC)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, ",".join(options))
    ids = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY)
    for place in covers:
        # What is of a process does not exist here.
        if place not in automatic | deleted and Path(place).exists():
            mount(f"{aside}{place.removeprefix('/proc')}", place, "", MS_BIND)
    if covers:
        check(libc.umount2(aside.encode(), _MNT_DETACH), f"unmount {aside}")
    if nameless:
        _mount_copies(nameless, aside)
    return ids


def _nameless(place: str) -> _Nameless | None:
    """Read what is mounted at ``place``, as systemd-nspawn mounts an id of the boot, and a pipe in
    place of the kernel's messages. None for anything else than a file and a pipe.
    """
    mode = Path(place).stat().st_mode
    if stat.S_ISFIFO(mode):
        return _Nameless(place, mode, b"")
    if not stat.S_ISREG(mode):
        return None
    with Path(place).open("rb") as file:
        return _Nameless(place, mode, file.read(_MOST_COPIED))


def _mount_copies(files: Iterable[_Nameless], aside: str) -> None:
    """Mount copies of the files. They are in a file system that nobody sees."""
    mount("tmpfs", aside, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=1m,mode=700")
    for number, file in enumerate(files):
        copy = Path(aside) / str(number)
        if stat.S_ISFIFO(file.mode):
            os.mkfifo(copy)
        else:
            copy.write_bytes(file.content)
        copy.chmod(stat.S_IMODE(file.mode))
        mount(str(copy), file.place, "", MS_BIND)
    check(libc.umount2(aside.encode(), _MNT_DETACH), f"unmount {aside}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check(done, f"mount {kind or source or 'nothing'} on {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
