"""Read in which cgroups a process is, and what these limit; thaw and freeze them.

A hierarchy is named as in ``/proc/pid/cgroup``: the controllers of a v1 hierarchy, or the empty
string for the unified one.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from phosd.engine.system import procfs
from phosd.errors import Timeout

UNIFIED = ""

_NO_LIMIT = 1 << 62
"""From here on the memory controller of v1 means no limit: it rounds the largest number down."""
_AMOUNTS = {
    "memory": ("memory.max", "memory.high", "memory.swap.max"),
    "pids": ("pids.max",),
}
_FREEZING_SECONDS = 10.0
"""What the kernel may take for it: a process may wait for a disk."""
_LOOK_SECONDS = 0.001
_OWN = re.compile(r"phos-\d{8}T\d{6}-[0-9a-f]{4}")
"""The name of the cgroup in which phosd freezes a program: that of the program's image."""
_SETS = ("cpuset.cpus", "cpuset.mems")
_INVOCATION = "trusted.invocation_id"


def memberships(pid: int) -> dict[str, str]:
    """Return the path of the process's cgroup in each hierarchy; nothing if it has ended."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in filter(None, procfs.lines(procfs.PROC / str(pid) / "cgroup")):
            _, hierarchy, path = line.split(":", 2)
            found[hierarchy] = path
    return found


def folder(hierarchy: str, path: str) -> Path | None:
    """Return a cgroup's folder, which may be missing; None if no file system here shows it."""
    root, top = _mount(hierarchy)
    beneath = root.rstrip("/") + "/"
    # Other paths are outside of the cgroup namespace, or of what is mounted.
    shown = ".." not in Path(path).parts and (path.rstrip("/") + "/").startswith(beneath)
    return top / path[len(beneath) :] if top is not None and shown else None


def top(hierarchy: str) -> Path | None:
    """Return where a hierarchy is mounted; None if it is not."""
    return _mount(hierarchy)[1]


def invocation(cgroups: Mapping[str, str]) -> str:
    """Return the id that systemd has given this run of the unit which these cgroups are of; empty
    if none is known.

    systemd's own mark of it is read, and not the one that users can set on cgroups of theirs.
    """
    for hierarchy in (UNIFIED, "name=systemd"):
        place = folder(hierarchy, cgroups[hierarchy]) if hierarchy in cgroups else None
        for each in _upwards(hierarchy, place) if place is not None else ():
            with contextlib.suppress(OSError):
                return os.getxattr(each, _INVOCATION).decode()
    return ""


def frozen(hierarchy: str, path: str) -> bool:
    """Return whether the processes of the cgroup are frozen."""
    place = folder(hierarchy, path)
    if place is None:
        return False
    return "frozen 1" in _text(place / "cgroup.events") or _text(
        place / "freezer.state"
    ).strip() in ("FROZEN", "FREEZING")


def freezers(pid: int) -> Iterator[tuple[str, str]]:
    """Yield hierarchy and path of the cgroups of a process that are frozen."""
    return ((name, path) for name, path in freezable(pid) if frozen(name, path))


def freezable(pid: int) -> Iterator[tuple[str, str]]:
    """Yield hierarchy and path of the cgroups of a process that could be frozen, v1's first."""
    found = memberships(pid)
    for hierarchy in sorted(found, reverse=True):
        if hierarchy == UNIFIED or "freezer" in hierarchy.split(","):
            yield hierarchy, found[hierarchy]


def is_own(path: Path | str) -> bool:
    """Return whether a cgroup has the name of one in which phosd freezes a program."""
    return _OWN.fullmatch(Path(path).name) is not None


@contextlib.contextmanager
def thawed(pid: int) -> Iterator[None]:
    """Thaw the cgroup of a process inside the context, if it is frozen, and freeze it again. One
    that is frozen with another above it stays so, and one that phosd has frozen. Raises
    :class:`Timeout` if it does not freeze.
    """
    frozen_by_others = (one for one in freezers(pid) if not is_own(one[1]))
    found = [place for one in frozen_by_others if (place := folder(*one)) and freezes_itself(place)]
    with contextlib.ExitStack() as again:
        for place in found:
            again.callback(_freeze, place)
            set_frozen(place, frozen=False)
        yield


def freezes_itself(place: Path) -> bool:
    """Return whether the cgroup of a folder was frozen itself, and not one above it."""
    return "1" in (
        _text(place / "cgroup.freeze").strip(),
        _text(place / "freezer.self_freezing").strip(),
    )


def thaw(place: Path) -> bool:
    """Thaw the cgroup of a folder. Returns whether it was frozen itself."""
    if not freezes_itself(place):
        return False
    set_frozen(place, frozen=False)
    return True


def set_frozen(place: Path, *, frozen: bool) -> None:
    """Freeze or thaw the cgroup of a folder; its processes stand still a moment later."""
    if (unified := place / "cgroup.freeze").exists():
        unified.write_text("1" if frozen else "0")
    else:
        (place / "freezer.state").write_text("FROZEN" if frozen else "THAWED")


def _freeze(place: Path) -> None:
    end = time.monotonic() + _FREEZING_SECONDS
    while place.exists():  # it has processes
        set_frozen(place, frozen=True)
        if "frozen 1" in _text(place / "cgroup.events"):
            return
        if _text(place / "freezer.state").strip() == "FROZEN":
            return
        if time.monotonic() > end:
            raise Timeout(
                f"the cgroup {place} was thawed for a moment, and does not freeze again",
                hint="a process of it waits in the kernel (`ps -o state,wchan`); freeze it later",
            )
        time.sleep(_LOOK_SECONDS)


def limits(cgroups: Mapping[str, str]) -> dict[str, str]:
    """Return what these cgroups and those above them limit, by the names of cgroup v2.

    ``memory.max``, ``memory.high`` and ``memory.swap.max`` in bytes, ``pids.max``, ``cpu.max`` as
    microseconds of a period, ``cpuset.cpus`` and ``cpuset.mems``. What is not limited is missing.
    """
    found: dict[str, str] = {}
    for hierarchy, path in cgroups.items():
        place = folder(hierarchy, path)
        if place is None or not place.is_dir():
            continue
        chain = list(_upwards(hierarchy, place))
        controllers = hierarchy.split(",") if hierarchy else (*_AMOUNTS, "cpu", "cpuset")
        for controller in controllers:
            found |= _of_controller(controller, chain, unified=not hierarchy)
    return found


def _of_controller(controller: str, chain: list[Path], *, unified: bool) -> dict[str, str]:
    found = {}
    for name in _AMOUNTS.get(controller, ()):
        file = "memory.limit_in_bytes" if name == "memory.max" and not unified else name
        amounts = [int(text) for each in chain if (text := _text(each / file).strip()).isdigit()]
        least = min(amounts, default=_NO_LIMIT)
        if least < _NO_LIMIT:
            found[name] = str(least)
    if controller == "cpu":
        quotas = [_cpu_quota(each, unified=unified) for each in chain]
        least_cpu = min(filter(None, quotas), key=lambda each: each[0] / each[1], default=None)
        if least_cpu is not None:
            found["cpu.max"] = f"{least_cpu[0]} {least_cpu[1]}"
    if controller == "cpuset":
        for name in _SETS:
            file = f"{name}.effective" if unified else name
            everything = _text(chain[-1] / file).strip()
            allowed = _text(chain[0] / file).strip()
            if allowed and allowed != everything:
                found[name] = allowed
    return found


def _cpu_quota(place: Path, *, unified: bool) -> tuple[int, int] | None:
    if unified:
        quota, _, period = _text(place / "cpu.max").strip().partition(" ")
    else:
        quota = _text(place / "cpu.cfs_quota_us").strip()
        period = _text(place / "cpu.cfs_period_us").strip()
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else None


def _upwards(hierarchy: str, place: Path) -> Iterator[Path]:
    """Yield a cgroup's folder and those above it, up to what is mounted."""
    _, top = _mount(hierarchy)
    yield place
    while top in place.parents:
        place = place.parent
        yield place


def _mount(hierarchy: str) -> tuple[str, Path | None]:
    """Return the cgroup at the root of a mounted hierarchy, and where it is mounted."""
    wanted = set(filter(None, hierarchy.split(",")))
    for line in filter(None, procfs.lines(procfs.PROC / "self/mountinfo")):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        here = {each for each in options.split(",") if _names_v1(each)}
        if here == wanted and (kind == "cgroup2") == (not hierarchy):
            root, place = before.split(" ")[3:5]
            return root, Path(place)
    return "/", None


def _names_v1(option: str) -> bool:
    """Return whether an option of a mount names a controller of v1, or the hierarchy."""
    return option in _V1_CONTROLLERS or option.startswith("name=")


_V1_CONTROLLERS = {
    *("blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "hugetlb", "memory"),
    *("misc", "net_cls", "net_prio", "perf_event", "pids", "rdma"),
}


def _text(path: Path) -> str:
    """Return a file's text; empty if it does not exist or cannot be read, as at the root."""
    try:
        return path.read_text()
    except OSError:
        return ""
