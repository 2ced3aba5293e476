"""Freeze the processes of a program as a whole, each in a cgroup below the one that it is in.

So what limits it, and the unit or the step that it belongs to, stay the same; and unlike SIGSTOP
nobody undoes it by a signal. The cgroup is named after the program's image, ``phos-<image>``, and
has phosd's mark: both are found again by ``/proc/pid/cgroup``, and nothing else is remembered.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from phosd.engine.system import cgroups, procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Reason, Timeout, Unsupported

V1, V2 = "v1", "v2"
KINDS = (V1, V2)
"""Which freezers to use, the first that can be had: the hierarchy of v1, and cgroup v2."""
_PREFIX = "phos-"
_MARK = "trusted.phos"
"""Only root can set it: a user may make a cgroup of any name in one that was delegated to them."""
_SECONDS = 10.0
"""What the kernel may take for a step: a process may wait for a disk."""
_PATIENCE = 3.0
"""Seconds to wait for who is frozen by others: Slurm's step is thawed again within less."""
_LOOK_SECONDS = 0.001
_WITHOUT = "suspend it without `hollow`, and the driver saves all of it"
_log = logging.getLogger(__name__)


def thaw_killed(pids: Iterable[int]) -> None:
    """Thaw the hollow programs that these processes, which were killed, are of: SIGKILL does not
    reach what v1's freezer has frozen.
    """
    for one in {one for pid in pids for one in cgroups.freezable(pid) if cgroups.is_own(one[1])}:
        if (place := cgroups.folder(*one)) is not None:
            with contextlib.suppress(OSError):  # all of it has ended
                cgroups.thaw(place)


def frozen_for(pid: int) -> str:
    """Return the image of the hollow program as part of which phosd has frozen a process; empty if
    it has not. No thread of such a process answers, neither its hook nor the driver.
    """
    for hierarchy, path in cgroups.freezable(pid):
        place = cgroups.folder(hierarchy, path) if cgroups.is_own(path) else None
        if place is not None and cgroups.freezes_itself(place):
            return place.name.removeprefix(_PREFIX)
    return ""


def frozen_by_others(pid: int) -> str:
    """Return the path of the cgroup with which others than phosd have frozen a process, or empty.

    One that a ``docker pause`` or Slurm has frozen stays so when phosd thaws what is below it.
    """
    for hierarchy, path in cgroups.freezable(pid):
        theirs = path.rpartition("/")[0] or "/" if cgroups.is_own(path) else path
        if cgroups.frozen(hierarchy, theirs):
            return theirs
    return ""


class Freezer:
    """The cgroups of the programs that the phosd of a runtime folder has frozen.

    Processes that end meanwhile are no error. All but :meth:`made` may be repeated.
    """

    def __init__(self, runtime_dir: Path, kinds: Collection[str] = KINDS) -> None:
        self._mark = os.fsencode(runtime_dir.resolve())
        self._kinds = kinds

    @contextlib.contextmanager
    def made(self, image: str, pids: Collection[int]) -> Iterator[None]:
        """Make the cgroups for these processes, and remove those that are empty after the context.

        Raises :class:`Unsupported` where there can be none, and :class:`Busy` if others have frozen
        a process: it could not be saved, and whether it is thawed is not for phosd to say.
        """
        self.release(pids)  # what a phosd left that was killed
        await_thawed(pids)
        places: set[Path] = set()
        try:
            for pid in pids:
                if found := self._place_of(image, pid):
                    places.add(found[0])
            yield
        finally:
            for place in places:
                with contextlib.suppress(OSError):  # it has processes
                    place.rmdir()

    def gather(self, image: str, processes: Collection[ProcessId]) -> bool:
        """Move processes and all below them into their cgroups. Returns whether one was not there.

        Raises :class:`Unsupported` if the kernel refuses that.
        """
        moved = False
        for pid in with_those_below(processes):
            place, inside = self._place_of(image, pid) or (None, True)
            if place is not None and not inside:
                moved = _move(pid, place) or moved
        return moved

    def freeze(self, image: str, processes: Collection[ProcessId]) -> None:
        """Freeze processes and all below them, and return when the kernel says that they stand
        still. Raises :class:`Unsupported`, and :class:`Timeout`; some may be frozen then.
        """
        end = time.monotonic() + _SECONDS
        while True:
            moved = self.gather(image, processes)  # what they have forked since, too
            places = self._places(image)
            for place in places:
                with contextlib.suppress(FileNotFoundError):  # all of it has ended
                    cgroups.set_frozen(place, frozen=True)
            if not moved and all(map(_stands, places)):
                return
            if time.monotonic() > end:
                raise Timeout(
                    f"the processes of the program do not freeze within {_SECONDS:g} s",
                    hint="one of them waits in the kernel (`ps -o pid,state,wchan`), or forks "
                    f"without an end; {_WITHOUT}",
                )
            time.sleep(_LOOK_SECONDS)

    def thaw(self, pids: Collection[int]) -> bool:
        """Let the processes of the cgroups that these are in run again; they stay there. Returns
        whether they were frozen. Raises :class:`Busy` if others have frozen one, too.
        """
        found = [place for place in self._holding(pids) if cgroups.freezes_itself(place)]
        if found:
            await_thawed(pids)
        for place in found:
            with contextlib.suppress(FileNotFoundError):
                cgroups.set_frozen(place, frozen=False)
        return bool(found)

    def dissolve(self, image: str) -> None:
        """Thaw a program for good: each process goes back to the cgroup that it was in."""
        for place in self._places(image):
            _dissolve(place)

    def release(self, pids: Collection[int]) -> None:
        """Do so with what holds one of these processes, whichever program it was frozen for."""
        for place in self._holding(pids):
            self.dissolve(place.name.removeprefix(_PREFIX))

    def let_the_killed_end(self, pids: Collection[int]) -> None:
        """Take processes that were killed out of the cgroups that these are in: SIGKILL does not
        reach what v1's freezer has frozen.
        """
        for place in self._holding(pids):
            for pid in filter(procfs.ending, _members(place)):
                _try_to_move(pid, place.parent)

    def remove_left(self, wanted: Callable[[str], bool]) -> None:
        """Dissolve the cgroups of programs whose image is ``wanted``, with processes or without."""
        tops = {cgroups.top(hierarchy) for hierarchy, _ in cgroups.freezable(os.getpid())}
        for top in filter(None, tops):
            for folder, names, _ in os.walk(top):
                for place in [Path(folder, name) for name in names if cgroups.is_own(name)]:
                    if wanted(place.name.removeprefix(_PREFIX)) and self._is_ours(place):
                        _dissolve(place)

    def _place_of(self, image: str, pid: int) -> tuple[Path, bool] | None:
        """Return the cgroup for a process, and whether it is in it. It is made if it is missing;
        None if the process has ended.
        """
        refused: OSError | None = None
        for hierarchy, path in self._hierarchies(pid):
            if (here := cgroups.folder(hierarchy, path)) is None:
                continue
            if here.name == f"{_PREFIX}{image}" and self._is_ours(here):
                return here, True
            try:
                return self._make(here / f"{_PREFIX}{image}"), False
            except OSError as error:
                refused = refused or error
        if procfs.process_id(pid) is None:
            return None
        why = refused or "no file system of cgroups with a freezer is mounted"
        raise Unsupported(
            f"{procfs.describe(pid)} cannot be frozen, as a hollow program is: {why}",
            hint=f"make the file system of cgroups writable for phosd, or {_WITHOUT}",
            reason=Reason.CGROUP,
        )

    def _hierarchies(self, pid: int) -> Iterable[tuple[str, str]]:
        return (
            (hierarchy, path)
            for hierarchy, path in cgroups.freezable(pid)
            if (V1 if hierarchy else V2) in self._kinds
        )

    def _make(self, place: Path) -> Path:
        """Raises :class:`OSError` if the kernel makes none, or none that can freeze."""
        if self._is_ours(place):
            return place
        place.mkdir()
        try:
            os.setxattr(place, _MARK, self._mark)
            _require_freezable(place)
        except OSError:
            place.rmdir()
            raise
        return place

    def _places(self, image: str) -> set[Path]:
        """Return those of a program: of all processes, as some may have lost their parents."""
        wanted = f"{_PREFIX}{image}"
        return {place for place in self._holding(procfs.pids()) if place.name == wanted}

    def _holding(self, pids: Iterable[int]) -> set[Path]:
        """Return the cgroups of ours that these processes are in."""
        paths = {one for pid in pids for one in cgroups.freezable(pid) if cgroups.is_own(one[1])}
        places = {place for one in paths if (place := cgroups.folder(*one))}
        return set(filter(self._is_ours, places))

    def _is_ours(self, place: Path) -> bool:
        with contextlib.suppress(OSError):
            return os.getxattr(place, _MARK) == self._mark
        return False


def _require_freezable(place: Path) -> None:
    """Raise :class:`OSError` if a cgroup takes no processes, or does not freeze them."""
    kind = place / "cgroup.type"
    if kind.exists() and (said := kind.read_text().strip()) != "domain":
        raise OSError(f"below {place.parent} cgroups are {said!r}")
    if not any((place / name).exists() for name in ("cgroup.freeze", "freezer.state")):
        raise OSError(f"{place.parent} has no freezer")


def await_thawed(pids: Iterable[int]) -> None:
    """Wait a moment until others freeze none of these processes. Raises :class:`Busy`."""
    end = time.monotonic() + _PATIENCE
    for pid in pids:
        while path := frozen_by_others(pid):
            if time.monotonic() > end:
                raise Busy(
                    f"process {pid} is frozen, with its cgroup {path}",
                    hint="thaw it (`docker unpause`, `systemctl thaw`), then try again",
                )
            time.sleep(_LOOK_SECONDS)


def with_those_below(processes: Iterable[ProcessId]) -> Iterator[int]:
    """Yield the processes that live, and all below them, as they are now. A zombie is in a cgroup,
    too, and cannot be moved.
    """
    left = [each.pid for each in processes if procfs.process_id(each.pid) == each]
    seen: set[int] = set()
    while left:
        if (pid := left.pop()) in seen or procfs.process_id(pid) is None:
            continue
        seen.add(pid)
        yield pid
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            left += procfs.children(pid)


def _move(pid: int, place: Path) -> bool:
    """Move a process into a cgroup; False if it has ended. Raises :class:`Unsupported`."""
    try:
        (place / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        if procfs.process_id(pid) is None:
            return False
        raise Unsupported(
            f"the kernel does not let {procfs.describe(pid)} into {place}: {error.strerror}",
            hint=f"a hollow program is frozen there; {_WITHOUT}",
            reason=Reason.CGROUP,
        ) from error
    return True


def _try_to_move(pid: int, place: Path) -> None:
    try:
        _move(pid, place)
    except Unsupported as error:  # it runs where it is, and no worse
        _log.error("%s", error)


def _members(place: Path) -> list[int]:
    """Return the processes in a cgroup, as far as this pid namespace has them."""
    with contextlib.suppress(OSError):
        pids = map(int, (place / "cgroup.procs").read_text().split())
        return [pid for pid in pids if pid]
    return []


def _stands(place: Path) -> bool:
    """Return whether all processes of a cgroup stand still, as the kernel says."""
    with contextlib.suppress(OSError):
        unified = place / "cgroup.events"
        if unified.exists():
            return "frozen 1" in unified.read_text()
        return (place / "freezer.state").read_text().strip() == "FROZEN"
    return not place.exists()


def _dissolve(place: Path) -> None:
    """Thaw a cgroup, move its processes into the one above, and remove it."""
    end = time.monotonic() + _SECONDS
    try:
        cgroups.set_frozen(place, frozen=False)
        while True:
            for pid in _members(place):
                _try_to_move(pid, place.parent)
            try:
                place.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # a process has forked, or is not out of it yet
                if time.monotonic() > end:
                    raise
            time.sleep(_LOOK_SECONDS)
    except OSError as error:
        if place.exists():
            _log.error("the cgroup %s, in which a program was frozen, stays: %s", place, error)
