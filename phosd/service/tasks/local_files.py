"""Look after what restores and `phos run` leave in the folders of users."""

import logging
import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

from phosd.engine.criu.files import file_versions
from phosd.engine.criu.files.file_orders import Version
from phosd.engine.criu.files.file_worker import Output
from phosd.engine.criu.files.output_folders import Owner, remove_unneeded, unneeded
from phosd.engine.image.manifest import Manifest
from phosd.engine.node.node import Node
from phosd.engine.operations.permissions import ROOT
from phosd.errors import ImageCorrupt, Internal, PhosError, Reason, Unsupported

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class UsersFiles:
    """The part of the engine that works on the folders of users, as them."""

    _node: Node

    def remove_outputs(self, users: Iterable[int], before: float) -> int:
        if self._node.store.damaged():
            return 0  # the damaged images may need any of the folders
        images = self._node.store.list()
        removed = 0
        for uid in {ROOT, *users}:
            try:
                home = Path(pwd.getpwuid(uid).pw_dir) / ".local/state/phos"
                folder = (self._node.config.state_dir if uid == ROOT else home) / "run"
                # Only the worker opens the folder: access to a home directory may hang.
                removed += len(remove_unneeded(folder, _user(uid), images, before))
            except (KeyError, OSError, PhosError) as error:
                _log.info("output folders of user %d stay: %s", uid, error)
        return removed

    def unneeded_outputs(
        self, uid: int, folder: Path, before: float, without: Collection[str]
    ) -> list[Output]:
        images = [image for image in self._all_images() if image.id not in without]
        return _of_user(uid, lambda: unneeded(folder, _user(uid), images, before))

    def remove_outputs_of(
        self, uid: int, folder: Path, before: float, names: Collection[str]
    ) -> list[str]:
        images = self._all_images()
        return _of_user(uid, lambda: remove_unneeded(folder, _user(uid), images, before, names))

    def left_files(self, uid: int, before: float, used: Collection[str]) -> list[Version]:
        theirs, needed = self._of(uid, used)
        return _of_user(uid, lambda: file_versions.left(_user(uid), theirs, needed, before))

    def remove_left_files(
        self, uid: int, before: float, used: Collection[str], paths: Collection[str]
    ) -> list[str]:
        theirs, needed = self._of(uid, used)
        return _of_user(
            uid, lambda: file_versions.remove_left(_user(uid), theirs, needed, before, paths)
        )

    def _of(self, uid: int, used: Collection[str]) -> tuple[list[Manifest], list[Manifest]]:
        """Return a user's images, and those among them that are in use."""
        theirs = [image for image in self._node.store.list() if image.owner == uid]
        return theirs, [image for image in theirs if image.id in used]

    def files_of(self, image: str) -> list[tuple[str, int, list[Version]]]:
        manifest = self._node.store.get(image)
        files, uid, now = file_versions.files_of(manifest), manifest.owner, time.time()
        if not files:
            return []
        found = _of_user(uid, lambda: file_versions.left(_user(uid), [manifest], [], now))
        return [
            (path, size, [each for each in found if each.file == path])
            for path, size in sorted(files.items())
        ]

    def _all_images(self) -> list[Manifest]:
        """Return the images. Raises :class:`ImageCorrupt` if one cannot be read: it may need
        anything.
        """
        for image in self._node.store.damaged():
            raise ImageCorrupt(
                f"image {image} cannot be read, and may need any output folder",
                hint=f"as root, `phos rm {image}` deletes it",
            )
        return self._node.store.list()


def _user(uid: int) -> Owner:
    """Return the ids of a user. Raises :class:`KeyError` if there is no such user."""
    user = pwd.getpwuid(uid)
    return uid, user.pw_gid, tuple(os.getgrouplist(user.pw_name, user.pw_gid))


def _of_user(uid: int, work: Callable[[], _T]) -> _T:
    """Do work on a user's folders; what it cannot do is told in words."""
    try:
        return work()
    except KeyError as error:
        raise Unsupported(
            f"there is no user {uid} here, as whom to look at output folders",
            hint="add the user to the user database (`getent passwd`)",
            reason=Reason.UNKNOWN_USER,
        ) from error
    except OSError as error:
        raise Internal(
            f"which files processes of user {uid} have open cannot be read: {error}",
            hint="nothing was removed; try again",
        ) from error
