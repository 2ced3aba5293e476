"""Keep what several images of a user have in common of a program's files once: as hard links.

A database of gigabytes that has not changed would otherwise be written with each image. Which files
are equal is said by their digests, and looked at: a file that was damaged is not spread.
"""

import errno
import filecmp
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from phosd.engine.image.manifest import FileDigest

_NO_LINK = (errno.ENOENT, errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)
"""It has been deleted, has as many names as can be, or the file system has no links."""


def link_equal(
    root: Path, files: Iterable[FileDigest], earlier: Iterable[tuple[Path, FileDigest]]
) -> None:
    """Replace ``files`` below ``root`` by links to equal ``earlier`` ones, as far as there are."""
    wanted = defaultdict[tuple[str, int], list[Path]](list)
    for file in files:
        wanted[file.sha256, file.size].append(root / file.path)
    for path, file in earlier:
        if not wanted:
            return
        for own in wanted.pop((file.sha256, file.size), ()):
            _link(path, own)


def _link(earlier: Path, own: Path) -> None:
    beside = own.with_name(f"{own.name}.once")
    try:
        if filecmp.cmp(earlier, own, shallow=False):
            os.link(earlier, beside, follow_symlinks=False)
            beside.rename(own)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
