"""Store the device memory of suspended programs: image stores in memory and on disk."""

import contextlib
import hashlib
import logging
import shutil
import threading
from pathlib import Path

from phosd.engine.image import private_files
from phosd.engine.image.store import Store
from phosd.engine.image.tier import SUSPENDED
from phosd.engine.node import staging
from phosd.engine.node.suspended import Register
from phosd.errors import Busy, NoSuchImage, NotAuthorized

_log = logging.getLogger(__name__)


class SuspendStore:
    """Stores of suspended programs, listed in ``register``, with the digests of ``images``.

    ``memory_dir`` is a folder in memory; None for one beside the images in memory, if ``tier_dir``
    is mounted for those: it has huge pages. Where it is not, there is one in ``/dev/shm``, named
    after ``runtime_dir``. Safe to use from several threads.
    """

    def __init__(
        self,
        images: Store,
        register: Register,
        runtime_dir: Path,
        memory_dir: Path | None,
        tier_dir: Path,
    ) -> None:
        self._images = images
        self._register = register
        self._runtime_dir = runtime_dir
        self._memory_dir = memory_dir
        self._tier_dir = tier_dir
        self._shelves: dict[str, Store] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Free the memory, if no program is suspended."""
        with self._lock:
            if (shelf := self._shelves.pop("memory", None)) and not self._register.images():
                shutil.rmtree(shelf.state)

    def shelf(self, where: str) -> Store:
        """Return the store for device memory of suspended programs: in ``memory`` or on ``disk``.

        It uses the same digests as the images.
        """
        with self._lock:
            if where not in self._shelves:
                self._shelves[where] = Store(self._folders[where], like=self._images)
            return self._shelves[where]

    def taken(self, owner: int) -> int:
        """Return the bytes of a user's suspended programs, including those being suspended."""
        there = {each.image: each for each in self._register.all()}
        with self._lock:
            making = {
                image: reserved
                for shelf in self._shelves.values()
                for image, reserved in dict(shelf.reservations).items()
                if image not in there
            }
        return sum(each.stored_bytes for each in there.values() if each.owner == owner) + sum(
            reserved.size for reserved in making.values() if reserved.owner == owner
        )

    def forget_the_dead(self) -> None:
        """Remove the data of suspended programs that have ended."""
        for each in self._register.all():
            if not each.alive:
                with contextlib.suppress(NoSuchImage, Busy):
                    self.shelf(each.where).delete(each.image)
                    _log.info("process %d ended while it was suspended", each.pid)
                self._register.remove(each)

    def sweep(self) -> None:
        """Remove data that belong to no suspended program. No job may run."""
        self.forget_the_dead()
        known = self._register.images()
        for where, folder in self._folders.items():
            if folder.is_dir():
                shelf = self.shelf(where)
                for image in {image.id for image in shelf.list()} | shelf.damaged().keys():
                    if image not in known:
                        shelf.delete(image)
                shelf.sweep()

    @property
    def _folders(self) -> dict[str, Path]:
        name = hashlib.sha256(bytes(self._runtime_dir.resolve())).hexdigest()[:16]
        memory = self._memory_dir or self._in_memory(name)
        return {"memory": memory, "disk": self._images.state / "suspended" / name}

    def _in_memory(self, name: str) -> Path:
        plain = staging.MEMORY / f"phos-suspended-{name}"
        if not self._tier_dir.is_mount() or self._has_some(plain):
            return plain
        return self._tier_dir / SUSPENDED

    def _has_some(self, folder: Path) -> bool:
        """Return whether programs lie there that were suspended before the tier was mounted."""
        try:
            private_files.require_private(folder)
        except (FileNotFoundError, NotAuthorized):
            return False
        return any((folder / "images" / image).exists() for image in self._register.images())
