"""Mount a /proc of a new pid namespace, which hides and shows what the other one does."""

import ctypes
import os
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
_MNT_DETACH = 2
_PROC_OPTIONS = ("hidepid=", "gid=", "subset=")
"""What the other /proc has, too."""
libc = ctypes.CDLL(None, use_errno=True)


def mount_proc(aside: str) -> int:
    """Mount a /proc of this pid namespace, with the options of the other one, and with what is
    mounted on that: a container hides parts of it so, and shows its own figures instead of those
    of the machine. ``aside`` is a folder on which the other one is mounted meanwhile.

    Returns a descriptor of ``ns_last_pid``, which a container may forbid to write to.
    """
    options: list[str] = []
    covers: list[str] = []
    automatic: set[str] = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4]
        kind, _, found = after.split(" ", 2)
        if place == "/proc":  # the last one is the one that is seen
            options = [each for each in found.split(",") if each.startswith(_PROC_OPTIONS)]
            covers, automatic = [], set()
        elif place.startswith("/proc/"):
            # To go there would mount it (binfmt_misc, by systemd).
            (automatic.add if kind == "autofs" else covers.append)(place)
    if covers:
        mount("/proc", aside, "", MS_BIND | MS_REC)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, ",".join(options))
    ids = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY)
    for place in covers:
        if place not in automatic and Path(place).exists():  # of a process it does not
            mount(f"{aside}{place.removeprefix('/proc')}", place, "", MS_BIND)
    if covers:
        check(libc.umount2(aside.encode(), _MNT_DETACH), f"unmount {aside}")
    return ids


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check(done, f"mount {kind or source or 'nothing'} on {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
