"""The names that images have of their programs, and the numbers that tell those of one apart."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

# The command line checks names without what manifests need.
if TYPE_CHECKING:
    from phosd.engine.image.manifest import Manifest

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_LATEST = "latest"
"""Names the newest of all images."""
NAMES = f"a letter, then letters, digits and '.', '_' or '-', at most 63 in all, and not {_LATEST}"


def valid_name(text: str) -> bool:
    """Return whether a program may have this name: a letter, then letters, digits, dots, ``_`` and
    ``-``, 63 at most; so that it is never taken for an image's id, or a pid.
    """
    return _NAME.fullmatch(text) is not None


def may_be_given(text: str) -> bool:
    """Return whether a name may be given to a program or an image: :data:`NAMES`."""
    return valid_name(text) and text != _LATEST


def next_number(name: str, owner: int, images: "Iterable[Manifest]") -> int:
    """Return the number of the next image of a user's program: one more than the last one has."""
    numbers = (each.number for each in images if each.name == name and each.owner == owner)
    return max(numbers, default=0) + 1
