"""Let tests make something go wrong at fault points.

``PHOS_FAULT=<point>[:n][:kind]`` arms one point: at its n-th visit (the first by default) the kind
happens: ``raise`` (the default) an internal error, ``kill`` SIGKILL to the process, ``enospc`` a
full disk, ``short`` a transfer that moves less than asked, ``hang`` a wait without end. Several
points are separated by commas. With ``PHOS_FAULT_DELAY=<seconds>`` every visit of every point waits
first, for a random time, seldom as long as that. Without the variables a point costs one lookup in
an empty table.

The points ``hook-...`` are in the hook, which reads the variables of the program that it is in;
``phosd/hook/base/faults.h`` says what the kinds do there.
"""

import enum
import errno
import logging
import os
import random
import signal
import threading
import time

from phosd.errors import Internal, InvalidOption

_log = logging.getLogger(__name__)


class Point(enum.StrEnum):
    """All fault points, each named after the step that it stands before."""

    PACK_CREATE = "pack-create"
    PACK_SYNC = "pack-sync"
    IMAGE_SEAL = "image-seal"
    MANIFEST_WRITE = "manifest-write"
    MANIFEST_RENAME = "manifest-rename"
    MANIFEST_SYNC = "manifest-sync"
    DELETE_MANIFEST = "delete-manifest"
    DELETE_FOLDER = "delete-folder"
    DELETE_PACK = "delete-pack"
    COMPACT_CREATE = "compact-create"
    COMPACT_SYNC = "compact-sync"
    COMPACT_MANIFEST_WRITE = "compact-manifest-write"
    COMPACT_MANIFEST_RENAME = "compact-manifest-rename"
    COMPACT_MANIFEST_SYNC = "compact-manifest-sync"
    COMPACT_DELETE = "compact-delete"
    MOVER_ADOPT = "mover-adopt"
    MOVER_DIGEST = "mover-digest"
    MOVER_COPY_OUT = "mover-copy-out"
    MOVER_WRITE = "mover-write"
    MOVER_READ = "mover-read"
    MOVER_COPY_IN = "mover-copy-in"
    MOVER_FETCH = "mover-fetch"
    SAFE_POINT = "safe-point"
    CHECKPOINT_QUIESCE = "checkpoint-quiesce"
    CHECKPOINT_DIGEST = "checkpoint-digest"
    CHECKPOINT_DRAIN = "checkpoint-drain"
    CHECKPOINT_PARK = "checkpoint-park"
    CHECKPOINT_CONTROL = "checkpoint-control"
    CHECKPOINT_CPU = "checkpoint-cpu"
    CHECKPOINT_UNPARK = "checkpoint-unpark"
    CHECKPOINT_PERSIST = "checkpoint-persist"
    CHECKPOINT_PUBLISH = "checkpoint-publish"
    STANDING_END = "standing-end"
    STANDING_HOLD = "standing-hold"
    WRITE_BACK_PACK = "write-back-pack"
    WRITE_BACK_MANIFEST = "write-back-manifest"
    PARKING_PARK = "parking-park"
    PARKING_DETACH = "parking-detach"
    DRIVER_LOCK = "driver-lock"
    DRIVER_CHECKPOINT = "driver-checkpoint"
    GROUP_STOP_BEGIN = "group-stop-begin"
    GROUP_STOP_END = "group-stop-end"
    GROUP_STOP_FORGET = "group-stop-forget"
    FILES_READ = "files-read"
    FILES_FROZEN = "files-frozen"
    FILES_COMPLETE = "files-complete"
    FILES_BESIDE = "files-beside"
    FILES_FILL = "files-fill"
    FILES_FILLED = "files-filled"
    FILES_REPLACE = "files-replace"
    RESTORE_LOAD = "restore-load"
    RESTORE_CPU = "restore-cpu"
    RESTORE_PAGES = "restore-pages"
    RESTORE_CONTROL = "restore-control"
    RESTORE_MAP = "restore-map"
    RESTORE_VERIFY = "restore-verify"
    RESTORE_OPEN = "restore-open"
    RESTORE_SHELVE = "hollow-shelve"
    REHEARSE_LOAD = "rehearse-load"
    REHEARSE_CPU = "rehearse-cpu"
    EXPORT_READ = "export-read"
    IMPORT_RECEIVE = "import-receive"
    IMPORT_PUBLISH = "import-publish"
    MIGRATE_PRECOPY = "migrate-precopy"
    MIGRATE_QUIESCE = "migrate-quiesce"
    MIGRATE_PARK = "migrate-park"
    MIGRATE_CONTROL = "migrate-control"
    MIGRATE_MOVE = "migrate-move"
    MIGRATE_UNPARK = "migrate-unpark"
    MIGRATE_RELEASE = "migrate-release"
    SUSPEND_QUIESCE = "suspend-quiesce"
    SUSPEND_SAVE = "suspend-save"
    SUSPEND_PARK = "suspend-park"
    SUSPEND_CONTROL = "suspend-control"
    SUSPEND_PUBLISH = "suspend-publish"
    SUSPEND_RELEASE = "suspend-release"
    READY_LOAD = "ready-load"
    READY_KEEP = "ready-keep"
    RESUME_LOAD = "resume-load"
    RESUME_CONTROL = "resume-control"
    RESUME_MAP = "resume-map"
    RESUME_OPEN = "resume-open"
    FREEZE_BEGIN = "freeze-begin"
    FREEZE_MOVED = "freeze-moved"
    FREEZE_END = "freeze-end"
    FREEZE_THAWED = "freeze-thawed"
    FREEZE_LEAVE = "freeze-leave"
    RUNTIME_WRITE = "runtime-write"
    HOOK_EXPORT = "hook-export"
    HOOK_CLOSE = "hook-close"
    HOOK_REHOME = "hook-rehome"
    HOOK_UNMAP = "hook-unmap"
    HOOK_IMPORT = "hook-import"
    HOOK_MAKE = "hook-make"
    HOOK_MAP = "hook-map"
    HOOK_ARM = "hook-arm"
    HOOK_SHADOW = "hook-shadow"
    HOOK_DISARM = "hook-disarm"
    HOOK_OPEN = "hook-open"


class Kind(enum.StrEnum):
    """What happens at an armed point."""

    RAISE = "raise"
    KILL = "kill"
    ENOSPC = "enospc"
    SHORT = "short"
    HANG = "hang"


def parse(text: str) -> dict[str, tuple[int, Kind]]:
    """Parse ``PHOS_FAULT``. Returns the armed points: name -> (visit, kind)."""
    armed: dict[str, tuple[int, Kind]] = {}
    for entry in filter(None, text.split(",")):
        name, *rest = entry.split(":")
        visit = int(rest.pop(0)) if rest and rest[0].isdecimal() else 1
        kind = rest.pop(0) if rest else Kind.RAISE.value
        if name not in list(Point) or kind not in list(Kind) or rest or visit < 1:
            raise InvalidOption(
                f"PHOS_FAULT names no fault: {entry!r}",
                hint=f"points: {', '.join(Point)}; kinds: {', '.join(Kind)}",
            )
        armed[name] = (visit, Kind(kind))
    return armed


_armed = parse(os.environ.get("PHOS_FAULT", ""))
_longest_delay = float(os.environ.get("PHOS_FAULT_DELAY", "0"))
_visits: dict[str, int] = {}
_lock = threading.Lock()


def point(where: Point) -> bool:
    """Visit a fault point. Returns True if the step must move fewer bytes than asked."""
    if _longest_delay:
        time.sleep(_longest_delay * random.random() ** 4)
    if where not in _armed:
        return False
    visit, kind = _armed[where]
    with _lock:
        _visits[where] = _visits.get(where, 0) + 1
        if _visits[where] != visit:
            return False
    _log.warning("fault point %s: %s", where, kind)
    if kind is Kind.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind is Kind.HANG:
        while True:
            time.sleep(3600)
    if kind is Kind.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"fault point {where}")
    if kind is Kind.RAISE:
        raise Internal(f"fault point {where}", hint="PHOS_FAULT asked for it")
    return True
