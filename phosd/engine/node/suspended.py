"""Register the suspended programs: a file for each.

The device memory of a suspended program is an image without a CPU part, in a store of its own
(``SuspendStore.shelf``). The file is written when the image is complete, and removed before the
image is. It is in the runtime folder, because a reboot ends the programs.
"""

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path

import msgspec

from phosd import __version__
from phosd.engine.image import private_files
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess, Reason, Unsupported

FORMAT = 1
"""Rises when a phosd that knows only the earlier ones would misread a file."""
WITH_PIDS = 2
"""The format of a file with :attr:`Suspended.known`, which earlier ones lack."""
IN_RUNTIME_DIR = 3
"""The format of one whose memory is in the runtime folder; an older phosd does not look there."""
HOLLOW = 4
"""The format of a hollow program, which an older phosd would take for one that runs."""
_MAX_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class Suspended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A suspended program: the root ``pid`` and ``start_time`` of its tree, and its GPU processes.

    ``where`` is ``memory`` or ``disk``, and ``stored_bytes`` the size there. ``device_bytes`` has
    the bytes of device memory that it needs, by ordinal of the GPU that it left. ``since``: seconds
    since the epoch. A ``hollow`` program has left its contexts there, and nothing else; what counts
    is what the driver says, which may have them since.
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
    format: int = FORMAT
    phosd: str = __version__
    """The version of phosd that suspended it; of a file without one, this one."""
    known: dict[int, int] = {}
    """The pids of its processes, by those that its image has for them; empty: the same ones. In the
    image are those that they have for themselves if a container's runtime saves them.
    """
    hollow: bool = False

    @property
    def alive(self) -> bool:
        """Whether any of its GPU processes still runs."""
        return any(procfs.process_id(each.pid) == each for each in self.processes)

    def require_alive(self) -> None:
        """Raise :class:`NoSuchProcess` unless all its GPU processes live."""
        left = [each.pid for each in self.processes if procfs.process_id(each.pid) == each]
        if gone := [pid for pid, _ in self.processes if pid not in left]:
            rest = f"end what is left of it (`kill -9 {' '.join(map(str, left))}`), then "
            raise NoSuchProcess(
                f"process {gone[0]} has ended, and with it the program of process {self.pid}",
                hint=f"{rest if left else ''}start it again, or restore an image of it",
            )

    @property
    def gpus(self) -> tuple[int, ...]:
        """The ordinals of the GPUs that it left."""
        return tuple(sorted(self.device_bytes))

    @property
    def pids(self) -> set[int]:
        """The pids of its GPU processes."""
        return {pid for pid, _ in self.processes}

    @property
    def roots(self) -> tuple[ProcessId, ...]:
        """The processes that are known of it; all others are below these."""
        return ProcessId(self.pid, self.start_time), *self.processes


class _Head(msgspec.Struct):
    """The part of a file that every version writes."""

    pid: int
    format: int = FORMAT
    phosd: str = ""


def _decode(text: bytes) -> Suspended:
    """Raises :class:`Unsupported` if another phosd wrote what this one does not know."""
    head = msgspec.json.decode(text, type=_Head)
    try:
        if FORMAT <= head.format <= HOLLOW:
            return msgspec.json.decode(text, type=Suspended)
    except msgspec.DecodeError:
        if head.phosd in ("", __version__):
            raise
    by = f"phosd {head.phosd}" if head.phosd else "another phosd"
    raise Unsupported(
        f"the program of process {head.pid} was suspended by {by} in format {head.format}; this is"
        f" phosd {__version__}, which reads formats up to {HOLLOW}",
        hint=f"install {by} or a newer one, and resume it with that",
        reason=Reason.OTHER_FORMAT,
    )


class Register:
    """The folder of these files, in ``runtime_dir``; only root can enter it."""

    def __init__(self, runtime_dir: Path) -> None:
        self._folder = runtime_dir / "suspended"

    def living(self) -> list[Suspended]:
        """Return the suspended programs that still live, the oldest first."""
        return [each for each in self.all() if each.alive]

    def all(self) -> list[Suspended]:
        """Return all suspended programs, including those whose processes have ended."""
        found: list[Suspended] = []
        if not self._folder.is_dir():
            return found
        private_files.require_private(self._folder)
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(_decode(private_files.read_private(path, _MAX_BYTES)))
            except FileNotFoundError:
                continue  # resumed meanwhile
            except (OSError, msgspec.DecodeError, Unsupported) as error:
                _log.error("%s does not tell who is suspended (%s)", path, error)
        return found

    def images(self) -> set[str]:
        """Return the images to keep, including those of files that cannot be read: they may have
        been written by another version of phosd.
        """
        return {path.stem for path in self._folder.glob("*.json")}

    def of(self, pid: int) -> Suspended:
        """Return the suspended program that has process ``pid``. Raises :class:`NoSuchProcess`, and
        :class:`Unsupported` for one that another version of phosd has suspended.
        """
        if (found := self.find(pid)) is not None:
            return found
        self._require_readable(pid)
        raise NoSuchProcess(
            f"process {pid} is not suspended", hint="`phos ps` lists the GPU processes"
        )

    def find(self, pid: int) -> Suspended | None:
        """Return the suspended program that has process ``pid``, if one has it."""
        having = (each for each in self.living() if pid == each.pid or pid in each.pids)
        return next(having, None)

    def hollow(self) -> set[int]:
        """Return the pids of hollow programs' processes: they have contexts, and nothing runs."""
        return {pid for each in self.living() if each.hollow for pid in each.pids}

    def hollow_gpus(self) -> set[int]:
        """Return the GPUs on which hollow programs are."""
        return {gpu for each in self.living() if each.hollow for gpu in each.gpus}

    def _require_readable(self, pid: int) -> None:
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # :meth:`all` has told
                text = private_files.read_private(path, _MAX_BYTES)
                if msgspec.json.decode(text, type=_Head).pid == pid:
                    _decode(text)

    def require_awake(self, pids: Collection[int]) -> None:
        """Raise :class:`Busy` if one of these processes is suspended."""
        for each in self.living():
            if taken := each.pids & {*pids}:
                raise Busy(
                    f"process {min(taken)} is suspended", hint=f"`phos resume {each.pid}` first"
                )

    def write(self, suspended: Suspended) -> None:
        """Write the file of a program, which makes it suspended."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_files.require_private(self._folder)
        partial = self._path(suspended).with_suffix(".partial")
        partial.unlink(missing_ok=True)
        fields = msgspec.structs.asdict(suspended)
        for name in ("known", "hollow"):  # a phosd that does not know of it reads the file, too
            if not fields[name]:
                del fields[name]
        private_files.write_durably(partial, msgspec.json.encode(fields))
        partial.rename(self._path(suspended))
        private_files.sync_folder(self._folder)

    def remove(self, suspended: Suspended) -> None:
        """Remove the file of a program that runs again or has ended."""
        self._path(suspended).unlink(missing_ok=True)
        private_files.sync_folder(self._folder)

    def _path(self, suspended: Suspended) -> Path:
        return self._folder / f"{suspended.image}.json"
