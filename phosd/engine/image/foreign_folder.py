"""Keep an image of device memory in a folder of others: in a container runtime's checkpoint.

::

    <folder>/phos-<id>            empty, made before CRIU writes: until the manifest is there,
                                  CRIU's files are refused
    <folder>/phos-<id>.json       the manifest, sealed with the store's key; written last
    <folder>/phos-<id>.<n>.pack   chunks (packs.py)

They have no folder of their own: containerd's CRI takes each entry of a checkpoint for a file. What
it writes anew others may read (mode 0644), in a folder that is closed to them.

The key is not there: the runtime's user may give the folder away. An image that this store has not
sealed is refused. There is one image at most: a runtime that saves into a folder again (podman)
overwrites CRIU's files, and with others it would be restored with the memory of another time.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from phosd.engine.image import brought, private_files
from phosd.engine.image.mac import unsealed
from phosd.engine.image.manifest import MAX_MANIFEST, Manifest
from phosd.engine.image.reader import Image, decoded, packs_of
from phosd.engine.image.store import Store
from phosd.engine.image.tier import MANIFEST
from phosd.engine.image.usage import pack_ends
from phosd.engine.image.validate import ID
from phosd.errors import ImageCorrupt, OutOfSpace

_PREFIX = "phos-"
_OURS = re.compile(rf"{_PREFIX}({ID.pattern})(\.json|\.\d+\.pack)?")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def begin(folder: int, image_id: str, size: int) -> None:
    """Make the place of an image of ``size`` bytes in an open ``folder``, instead of earlier ones.
    CRIU's files beside it are refused until the image is there. Raises
    :class:`~phosd.errors.OutOfSpace`.
    """
    name = f"{_PREFIX}{image_id}"
    with private_files.space_errors(name), ExitStack() as files:
        for old in _files(folder):
            os.unlink(old, dir_fd=folder)
        _opened(files, name, _NEW, folder)
    status = os.fstatvfs(folder)
    if (free := status.f_bavail * status.f_frsize) < size:
        raise OutOfSpace(
            f"the device memory takes {size / 1e6:.0f} MB in the runtime's folder, which has"
            f" {free / 1e6:.0f} MB free",
            hint="free some there, or give another folder",
        )


def save(image: Image, folder: int, copied: Callable[[int], None]) -> None:
    """Write an image without CRIU's files to its place (:func:`begin`) in an open ``folder``.
    ``copied`` is told of bytes, and may raise to end it: then nothing is left at the place. Raises
    :class:`~phosd.errors.OutOfSpace`.
    """
    ends = pack_ends([image.manifest])
    image_id = image.manifest.id
    with private_files.space_errors(image_id), ExitStack() as files, ExitStack() as failed:

        def new(name: str) -> int:
            made = _opened(files, name, _NEW, folder)
            failed.callback(os.unlink, name, dir_fd=folder)
            return made

        for number, source in image.packs.items():
            pack = new(_pack(image_id, number))
            brought.copy(source, pack, ends[number], copied)
            os.fsync(pack)
        source = _opened(files, MANIFEST, os.O_RDONLY | os.O_NOFOLLOW, image.folder)
        manifest = new(_manifest(image_id))
        brought.copy(source, manifest, os.fstat(source).st_size, copied)
        for each in (manifest, folder):
            os.fsync(each)
        failed.pop_all()


def saved_in(folder: int) -> str:
    """Return the id of the image in an open folder; empty if there is none. Raises
    :class:`ImageCorrupt` if there are several.
    """
    ids = sorted({found[1] for name in _files(folder) if (found := _OURS.fullmatch(name))})
    if len(ids) > 1:
        names = ", ".join(f"{_PREFIX}{each}" for each in ids)
        raise ImageCorrupt(
            f"the runtime's folder has device memory of several times ({names})",
            hint="leave the one that was saved with CRIU's files there",
        )
    return ids[0] if ids else ""


def _files(folder: int) -> list[str]:
    with ExitStack() as files:  # the offset of the descriptor is another program's, too
        names = os.listdir(_opened(files, ".", _FOLDER, folder))
    return [name for name in names if _OURS.fullmatch(name)]


@contextmanager
def opened(folder: int, image_id: str, store: Store) -> Iterator[Image]:
    """Open the image in an open folder. Raises :class:`~phosd.errors.ImageCorrupt`, also if it was
    not sealed by this store.
    """
    with Image() as image:
        try:
            text = private_files.read_private(
                _manifest(image_id), MAX_MANIFEST, dir_fd=folder, lent=True
            )
        except FileNotFoundError as error:
            raise ImageCorrupt(
                f"the device memory was not written to the end ({_PREFIX}{image_id}): the runtime's"
                " checkpoint failed, whatever it said",
                hint="restore another one",
            ) from error
        body = unsealed(store.key.packed, text)
        if body is None:
            raise ImageCorrupt(
                f"the manifest of image {image_id} is not what was written here: it was changed, or"
                " saved on another node",
                hint="restore it on the node that saved it; there it is damaged, if this is that "
                "one",
            )
        image.manifest = decoded(body, image_id)
        for number in sorted(packs_of(image.manifest)):
            name = _pack(image_id, number)
            try:
                image.packs[number] = private_files.open_private(
                    name, os.O_RDONLY, dir_fd=folder, lent=True
                )
            except OSError as error:
                raise ImageCorrupt(
                    f"{name} of the device memory cannot be opened ({error.strerror})",
                    hint="the runtime's checkpoint is not whole: restore another copy of it",
                ) from error
        yield image


def bring(image: Image, store: Store, copied: Callable[[int], None]) -> Manifest:
    """Copy an image into a store, and return its manifest there."""
    with store.begin(image.manifest.owner) as writer:
        blocks = brought.bring(image, writer, copied)
        manifest = msgspec.structs.replace(image.manifest, id=writer.id, blocks=blocks)
        writer.publish(manifest)
    return manifest


def _manifest(image_id: str) -> str:
    return f"{_PREFIX}{image_id}.json"


def _pack(image_id: str, number: int) -> str:
    return f"{_PREFIX}{image_id}.{number}.pack"


def _opened(files: ExitStack, name: str, flags: int, folder: int) -> int:
    found = os.open(name, flags, 0o600, dir_fd=folder)
    files.callback(os.close, found)
    return found
