"""Extended attributes of files, as far as their owner may set them, access lists among them."""

import errno
import os
from collections.abc import Mapping

_OWN = "user."
_ACCESS = "system.posix_acl_access"
_MOST = 64 << 10
"""Bytes of one file's, names included: as much as the file systems of a Linux machine promise."""


def attributes_of(descriptor: int) -> dict[str, str]:
    """Return those of an open file by name, in hexadecimal; none where there are more than 64 KiB,
    or the file system knows none.
    """
    found = dict[str, str]()
    try:
        for name in filter(_is_own, os.listxattr(descriptor)):
            found[name] = os.getxattr(descriptor, name).hex()
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENODATA, errno.E2BIG, errno.ERANGE):
            raise
    return found if sum(len(name) + len(found[name]) // 2 for name in found) <= _MOST else {}


def set_attributes(descriptor: int, wanted: Mapping[str, str]) -> None:
    """Give an open file these, and take others away."""
    now = attributes_of(descriptor)
    for name in now.keys() - wanted.keys():
        os.removexattr(descriptor, name)
    for name, value in wanted.items():
        if _is_own(name) and now.get(name) != value:
            os.setxattr(descriptor, name, bytes.fromhex(value))


def _is_own(name: str) -> bool:
    return name.startswith(_OWN) or name == _ACCESS
