"""A published image that is open: its manifest, its folder and its packs."""

import os

from phosd.engine.image import private_files
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.validate import valid_relative
from phosd.errors import ImageCorrupt


class Image:
    """A published image, opened by :meth:`Store.open`: manifest, folder and pack descriptors."""

    manifest: Manifest
    folder: int = -1

    def __init__(self) -> None:
        self.packs: dict[int, int] = {}

    def open_file(self, folder: str, path: str) -> int:
        """A descriptor of the file ``path`` in the image's ``folder`` (both relative)."""
        name = f"{folder}/{path}"
        if not valid_relative(name):
            raise ImageCorrupt(
                f"image {self.manifest.id} names a file outside of it: {name!r}",
                hint="the image cannot be restored; delete it",
            )
        try:
            return private_files.open_below(self.folder, name)
        except OSError as error:
            raise ImageCorrupt(
                f"the file {name} of image {self.manifest.id} cannot be opened ({error.strerror})",
                hint="the image cannot be restored; delete it",
            ) from error

    def __enter__(self) -> "Image":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.packs.values():
            os.close(fd)
        if self.folder >= 0:
            private_files.close_locked(self.folder)


def packs_of(manifest: Manifest) -> set[int]:
    """The numbers of the packs that an image needs."""
    return {chunk.pack for block in manifest.blocks for chunk in block.chunks}
