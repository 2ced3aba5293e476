"""The programs that are suspended: a file for each, from which anybody at the node can tell.

What they had on the GPU is an image without a CPU part, in a store of its own (``Node.shelf``). The
file comes when the image is whole and goes before it does. It lies in the runtime folder, because a
reboot ends the programs.
"""

import logging
from collections.abc import Collection
from pathlib import Path

import msgspec

from phosd.engine.image import private_files
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess

_MAX_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class Suspended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A suspended program: the root ``pid`` and ``start_time`` of its tree, and its GPU processes.

    ``where`` is ``memory`` or ``disk``, ``stored_bytes`` what it takes there. ``gpus`` are those
    that it left, by ordinal, with the bytes of device memory that it needs there. ``since`` in
    seconds since the epoch.
    """

    image: str
    pid: int
    start_time: int
    owner: int
    command: tuple[str, ...]
    since: float
    where: str
    stored_bytes: int
    device_bytes: dict[int, int]
    processes: tuple[ProcessId, ...]

    @property
    def alive(self) -> bool:
        """Whether there is anything to be resumed."""
        return any(procfs.process_id(each.pid) == each for each in self.processes)

    def require_alive(self) -> None:
        """Raise :class:`NoSuchProcess` unless all of it lives."""
        left = [each.pid for each in self.processes if procfs.process_id(each.pid) == each]
        if gone := [pid for pid, _ in self.processes if pid not in left]:
            rest = f"end what is left of it (`kill -9 {' '.join(map(str, left))}`), then "
            raise NoSuchProcess(
                f"process {gone[0]} has ended, and with it the program of process {self.pid}",
                hint=f"{rest if left else ''}start it again, or restore an image of it",
            )

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs that it left."""
        return tuple(sorted(self.device_bytes))

    @property
    def pids(self) -> set[int]:
        """Its GPU processes."""
        return {pid for pid, _ in self.processes}


class Register:
    """The folder of these files, in ``runtime_dir``; only root enters it."""

    def __init__(self, runtime_dir: Path) -> None:
        self._folder = runtime_dir / "suspended"

    def living(self) -> list[Suspended]:
        """All that live, the oldest first."""
        return [each for each in self.all() if each.alive]

    def all(self) -> list[Suspended]:
        """Also those whose processes have ended."""
        found: list[Suspended] = []
        if not self._folder.is_dir():
            return found
        private_files.require_private(self._folder)
        for path in sorted(self._folder.glob("*.json")):
            try:
                text = private_files.read_private(path, _MAX_BYTES)
                found.append(msgspec.json.decode(text, type=Suspended))
            except FileNotFoundError:
                continue  # resumed meanwhile
            except (OSError, msgspec.DecodeError) as error:
                _log.error("%s does not tell who is suspended (%s)", path, error)
        return found

    def images(self) -> set[str]:
        """What may be removed for none of them, also where a file cannot be read: a phosd of
        another version has perhaps written it.
        """
        return {path.stem for path in self._folder.glob("*.json")}

    def of(self, pid: int) -> Suspended:
        """The suspended program that has a process ``pid``. Raises :class:`NoSuchProcess`."""
        for each in self.living():
            if pid == each.pid or pid in each.pids:
                return each
        raise NoSuchProcess(
            f"process {pid} is not suspended", hint="`phos ps` lists the GPU processes"
        )

    def require_awake(self, pids: Collection[int]) -> None:
        """Raise :class:`Busy` when one of these processes is suspended."""
        for each in self.living():
            if taken := each.pids & {*pids}:
                raise Busy(
                    f"process {min(taken)} is suspended", hint=f"`phos resume {each.pid}` first"
                )

    def write(self, suspended: Suspended) -> None:
        """From now on everybody can tell."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_files.require_private(self._folder)
        partial = self._path(suspended).with_suffix(".partial")
        partial.unlink(missing_ok=True)
        private_files.write_durably(partial, msgspec.json.encode(suspended))
        partial.rename(self._path(suspended))
        private_files.sync_folder(self._folder)

    def remove(self, suspended: Suspended) -> None:
        """It runs again, or has ended."""
        self._path(suspended).unlink(missing_ok=True)
        private_files.sync_folder(self._folder)

    def _path(self, suspended: Suspended) -> Path:
        return self._folder / f"{suspended.image}.json"
