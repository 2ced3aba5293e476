"""Compare the credentials in CRIU's images with those that the kernel reports.

CRIU reads a program's credentials with code that it puts into the program's own memory. The
program's user can change that code while it runs, and so its answer. An image with other
credentials than the kernel's would give its owner more rights at a restore.
"""

import contextlib
import functools
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from phosd.engine.criu.images import core_image
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.system import procfs
from phosd.engine.system.privileges import Capability
from phosd.engine.system.procfs import Credentials
from phosd.errors import NotAuthorized, Reason, Unsupported

TO_RESTORE = frozenset({Capability.CHECKPOINT_RESTORE})
"""The capabilities that CRIU needs to restore a user's program: with it one may choose the ids of
new processes and threads, and look at what one has mapped.
"""


@dataclass(frozen=True)
class Rights:
    """Credentials of all threads of a tree, by the ids that these have for themselves."""

    of: Mapping[int, Credentials]

    @classmethod
    def known_to_kernel(cls, threads: Mapping[int, int]) -> "Rights":
        """Read the credentials from the kernel, without threads that have ended meanwhile: by the
        ids that they have for themselves the ids that we know them by.
        """
        found = {}
        for own, thread in threads.items():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the thread has ended
                found[own] = procfs.credentials(thread)
        return cls(found)

    @classmethod
    def in_images(cls, folder: Path) -> "Rights":
        """Read them from CRIU's images, without zombies. Raises :class:`Internal`."""
        found = {}
        for path in folder.glob("core-*.img"):
            rights = core_image.credentials(path)
            if rights is not None:
                found[int(path.stem.removeprefix("core-"))] = rights
        return cls(found)

    def require_equal(self, image: "Rights") -> None:
        """Raise :class:`NotAuthorized` unless ``image`` has the same threads and credentials."""
        if self.of.keys() != image.of.keys():
            raise _forged(f"has the threads {sorted(image.of)} instead of {sorted(self.of)}")
        for thread, what in self._differences(image):
            raise _forged(f"has other {what} for thread {thread} than the kernel")

    def require_restored(self, found: "Rights") -> None:
        """Raise :class:`NotAuthorized` if a thread that was ``found`` has other credentials.

        Threads that a restored program has begun since then, or ended, are ignored.
        """
        for thread, what in self._differences(found):
            raise NotAuthorized(
                f"thread {thread} of the restored program has other {what} than it had",
                hint="it was killed; somebody with its user's rights has changed its memory while "
                "it was restored",
            )

    def _differences(self, other: "Rights") -> Iterator[tuple[int, str]]:
        """Yield what differs in threads of both: the thread, and the name of the credential."""
        for thread in self.of.keys() & other.of.keys():
            right = self.of[thread]
            # The kernel tells nobody the secure bits.
            found = replace(other.of[thread], secure_bits=right.secure_bits)
            for field in fields(Credentials):
                if getattr(found, field.name) != getattr(right, field.name):
                    yield thread, field.name.replace("_", " ")

    def require_plain(self, owner: Owner) -> None:
        """Raise :class:`NotAuthorized` if a thread has more rights or other ids than ``owner``, or
        if CRIU would need CAP_SETPCAP for the tree: to make capabilities inheritable, or to give
        threads different bounding sets.
        """
        uids, gids = (owner.uid,) * 4, (owner.gid,) * 4
        groups = tuple(sorted(owner.groups))
        for thread, right in self.of.items():
            if (right.uids, right.gids, right.groups) != (uids, gids, groups):
                raise _more(f"thread {thread} has other ids than uid {owner.uid}")
            if right.permitted | right.effective | right.ambient:
                raise _more(f"thread {thread} has capabilities")
            if right.inheritable:
                raise _more(f"thread {thread} has inheritable capabilities")
            if right.secure_bits:
                raise _more(f"thread {thread} has secure bits, of which the kernel tells nobody")
        bounding = {right.bounding: thread for thread, right in self.of.items()}
        if len(bounding) > 1:
            first, second, *_ = sorted(bounding.values())
            raise _more(f"threads {first} and {second} have different bounding sets")

    def require_attainable(self) -> None:
        """Raise :class:`Unsupported` if a bounding set has more than that of this process, whose
        child CRIU is: nobody gets back what is missing there, and a program without it crashes.
        """
        own = procfs.credentials(os.getpid()).bounding
        lacking = functools.reduce(operator.or_, (each.bounding for each in self.of.values()), 0)
        if lacking := lacking & ~own:
            numbers = [str(each) for each in range(lacking.bit_length()) if lacking >> each & 1]
            raise Unsupported(
                "the program has capabilities in its bounding set that phosd was started without, "
                f"and so cannot give back (numbers {', '.join(numbers)} of linux/capability.h)",
                hint="start phosd with all capabilities in its bounding set; its container with "
                "--cap-add=ALL",
                reason=Reason.PROCESS_STATE,
            )

    @property
    def are_root_s(self) -> bool:
        """Whether all threads are root's, in every id."""
        return all(each.uids == (0,) * 4 for each in self.of.values())

    @property
    def bounding(self) -> int | None:
        """The bounding set of all threads of a user's program; None if there is no thread."""
        return next((each.bounding for each in self.of.values()), None)


def _more(why: str) -> NotAuthorized:
    return NotAuthorized(f"{why}: its user may neither save nor restore it", hint="ask as root")


def _forged(why: str) -> NotAuthorized:
    return NotAuthorized(
        f"what CRIU read of the program is not true: it {why}",
        hint="the image was not kept, and the program runs on; somebody with its user's rights has "
        "changed its memory while it was saved",
    )
