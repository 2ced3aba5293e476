"""Enforce quotas on a user's images and suspended programs, including unfinished ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import Usage, total_bytes
from phosd.errors import OutOfSpace
from phosd.units import human_bytes

_MOST_NAMED = 5
"""How many images an error names at most."""


@dataclass(frozen=True)
class SpaceReservation:
    """Bytes that an unfinished image of user ``owner`` is expected to take."""

    owner: int
    size: int


def taken(
    owner: int, reservations: Mapping[str, SpaceReservation], images: Sequence[Manifest]
) -> int:
    """Return the bytes of a user's images, including unfinished ones."""
    theirs = [image for image in images if image.owner == owner]
    making = sum(each.size for each in reservations.values() if each.owner == owner)
    return total_bytes(theirs) + making


def require_within(
    quota: int,
    image: str,
    reservations: Mapping[str, SpaceReservation],
    images: Sequence[Manifest],
    suspended: int = 0,
) -> None:
    """Raise :class:`OutOfSpace` if the user of ``image`` would exceed the quota (bytes).

    ``reservations`` are those of all unfinished images, including this one; ``images`` are all
    published images, oldest first. ``suspended`` is the bytes of the user's suspended programs.
    """
    mine = reservations[image]
    others = sum(
        p.size for name, p in reservations.items() if p.owner == mine.owner and name != image
    )
    theirs = [published for published in images if published.owner == mine.owner]
    before = total_bytes(theirs) + others + suspended
    excess = before + mine.size - quota
    if excess <= 0:
        return
    whose = "images and suspended programs" if suspended else "images"
    raise OutOfSpace(
        f"the image takes about {human_bytes(mine.size)}, but the {whose} of uid {mine.owner} take "
        f"{human_bytes(before)} of the {human_bytes(quota)} that they may",
        hint=_what_to_delete(theirs, excess),
    )


def require_suspendable(quota: int, owner: int, size: int, before: int) -> None:
    """Raise :class:`OutOfSpace` if suspending ``size`` bytes would exceed the user's quota.

    ``before`` is the bytes of the user's images and suspended programs so far.
    """
    if before + size <= quota:
        return
    raise OutOfSpace(
        f"the program's data take about {human_bytes(size)}, but the images and suspended "
        f"programs of uid {owner} take {human_bytes(before)} of the {human_bytes(quota)} that "
        "they may",
        hint="delete images (`phos rm`), resume or end a suspended program, or have the quota "
        "raised ([[limits]] in phosd.toml)",
    )


def _what_to_delete(images: Sequence[Manifest], excess: int) -> str:
    """Name the oldest images that must be deleted to free ``excess`` bytes."""
    usage = Usage(images)
    named = []
    freed = 0
    for image in images:
        if freed >= excess:
            break
        freed += usage.remove(image.id)
        named.append(image.id)
    if freed < excess:
        return "it does not fit: ask for a larger quota ([[limits]] in phosd.toml)"
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f"delete {', '.join(named[:_MOST_NAMED])}{more} (`phos rm`), the oldest, which frees "
        f"{human_bytes(freed)}"
    )
