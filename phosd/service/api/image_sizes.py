"""Know what each user's images take on the disk, as long as the images stay the same."""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import is_not

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import total_bytes
from phosd.service.api.views import ImageView


class ImageSizes:
    """The bytes of users' images. Other threads than the event loop's may ask."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Manifest], int]] = {}
        """The images of each user when this was asked last, and their bytes."""

    def by_user(self, images: Iterable[ImageView]) -> Counter[int]:
        """Return the bytes of each user's images, computed only for users whose images have
        changed: thousands that share chunks take more than a second. ``images`` are those of all.
        """
        by_user: dict[int, list[Manifest]] = {}
        for view in images:
            by_user.setdefault(view.manifest.owner, []).append(view.manifest)
        now: dict[int, tuple[Sequence[Manifest], int]] = {}
        for user, theirs in by_user.items():
            before, size = self._known.get(user, ((), 0))
            if len(before) != len(theirs) or any(map(is_not, before, theirs)):
                size = total_bytes(theirs)
            now[user] = theirs, size
        self._known = now
        return Counter({user: size for user, (_, size) in now.items()})
