"""Read a published image: its manifest, and, while it is open, its folder and packs."""

import os

import msgspec

from phosd import __version__
from phosd.engine.digest import DigestKey
from phosd.engine.image import private_files
from phosd.engine.image.mac import unsealed
from phosd.engine.image.manifest import FORMAT, MAX_MANIFEST, Manifest
from phosd.engine.image.tier import MANIFEST
from phosd.engine.image.validate import check_manifest, valid_relative
from phosd.errors import ImageCorrupt, NoSuchImage

_decoder = msgspec.json.Decoder(Manifest)


class _Format(msgspec.Struct):
    """The part of a manifest that tells how to read the rest. It is in every format."""

    format: int = FORMAT
    phosd: str = ""


_format_decoder = msgspec.json.Decoder(_Format)


class Image:
    """A published image, opened by :meth:`Store.open`: manifest, folder and pack descriptors."""

    manifest: Manifest
    folder: int = -1

    def __init__(self) -> None:
        self.packs: dict[int, int] = {}

    def open_file(self, folder: str, path: str, *, lent: bool = False) -> int:
        """Open ``path`` in the image's ``folder`` (both relative); return the descriptor.

        ``lent``: a restore may have lent it to the image's owner, to read.
        """
        name = f"{folder}/{path}"
        if not valid_relative(name):
            raise ImageCorrupt(
                f"image {self.manifest.id} names a file outside of it: {name!r}",
                hint="the image cannot be restored; delete it",
            )
        try:
            return private_files.open_below(self.folder, name, lent=lent)
        except OSError as error:
            raise ImageCorrupt(
                f"the file {name} of image {self.manifest.id} cannot be opened ({error.strerror})",
                hint="the image cannot be restored; delete it",
            ) from error

    def __enter__(self) -> "Image":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.packs.values():
            private_files.close_locked(fd)
        if self.folder >= 0:
            private_files.close_locked(self.folder)


def packs_of(manifest: Manifest) -> set[int]:
    """Return the numbers of the packs that an image needs."""
    return {chunk.pack for block in manifest.blocks for chunk in block.chunks}


def read_manifest(folder: int, image_id: str, key: DigestKey) -> Manifest:
    """Read the manifest of the image with this open ``folder``.

    Raises :class:`NoSuchImage`, and :class:`ImageCorrupt` unless a writer with this ``key`` wrote
    it.
    """
    try:
        text = private_files.read_private(MANIFEST, MAX_MANIFEST, dir_fd=folder)
    except FileNotFoundError:
        raise no_such_image(image_id) from None
    body = unsealed(key.packed, text)
    if body is None:
        raise ImageCorrupt(
            f"the manifest of image {image_id} is not what was written (its seal is broken)",
            hint="the image cannot be restored; delete it",
        )
    return decoded(body, image_id)


def decoded(body: bytes, image_id: str) -> Manifest:
    """Return the manifest whose seal was found whole. Raises :class:`ImageCorrupt`."""
    made_as = _Format()
    try:
        made_as = _format_decoder.decode(body)
        if made_as.format != FORMAT:
            raise _of_another_version(image_id, made_as)
        manifest = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if made_as.phosd not in ("", __version__):
            raise _of_another_version(image_id, made_as) from error
        raise ImageCorrupt(
            f"the manifest of image {image_id} cannot be read ({error})",
            hint="the image cannot be restored; delete it",
        ) from error
    check_manifest(manifest, image_id)
    return manifest


def _of_another_version(image_id: str, made_as: _Format) -> ImageCorrupt:
    """Return the error for an image that is whole, and that another phosd can read."""
    by = f"phosd {made_as.phosd}" if made_as.phosd else "another phosd"
    return ImageCorrupt(
        f"image {image_id} was made by {by} in format {made_as.format}; this is phosd"
        f" {__version__}, which reads format {FORMAT}",
        hint=f"restore it with {by if made_as.phosd else 'the one that made it'} or a newer one, or"
        " delete it",
    )


def manifest_stamp(folder: int) -> tuple[int, ...]:
    """Return a value that changes when the folder's manifest is replaced or written to."""
    try:
        status = os.stat(MANIFEST, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def no_such_image(image_id: str) -> NoSuchImage:
    """Return the error for an id that no image has."""
    return NoSuchImage(f"there is no image {image_id}", hint="see `phos images`")
