"""What is remembered of a process whose kernels are analysed, and what is said of them."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phosd.engine.hook_client.code_images import CodeImage, Held
from phosd.engine.hook_client.link import LaunchedKernel as Kernel
from phosd.engine.kernels.entry import Entry, KernelFacts, State

_MOST_IMAGES = 1 << 13
"""Most images of one process that are looked at; it may load more later."""
_MOST_ABSENT = 1 << 10
_MOST_LOOKED_UP = 512
"""Most modules that a process has loaded and not launched, in their order."""
_SMALL_BYTES = 1 << 20
"""A module that is compiled at run time and no larger is analysed before it is launched."""


@dataclass(frozen=True)
class KnownKernel:
    """A kernel that was launched. ``state`` is ``analysed``, ``waiting``, or says like ``reason``
    why there are no ``facts``.
    """

    kernel: Kernel
    state: str
    reason: str = ""
    facts: KernelFacts | None = None


@dataclass
class Watched:
    """What is remembered of a process. ``unread`` has why a module's bytes cannot be had, and
    ``absent`` launched kernels that its module does not have, both by the module's hash.
    ``given`` has of the tables that the hook has, ``given_bytes`` in all, whether they have none
    but launched kernels, and how many.
    ``settled`` has how many kernels of a module were launched when all of them were known, so that
    nothing is read again before there are more; ``done`` are those that are known as a whole, or
    given up; ``fruitless`` is how many analyses of it ended without a result. ``counted`` is when
    launches were last to be counted, ``trouble`` why the last look came to nothing.
    """

    uid: int
    images: dict[int, CodeImage] = field(default_factory=dict)
    seen: int = 0
    architectures: tuple[int, ...] = ()
    unread: dict[int, str] = field(default_factory=dict)
    absent: dict[int, set[str]] = field(default_factory=dict)
    given: dict[int, tuple[bool, int]] = field(default_factory=dict)
    given_bytes: int = 0
    settled: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    fruitless: Counter[int] = field(default_factory=Counter)
    counted: float = -math.inf
    quiet_until: float = 0.0
    asked_for: bool = False
    trouble: str = ""

    def has_not(self, kernel: Kernel) -> bool:
        """Whether the module of a kernel does not have it, or so many others are not in it that its
        process need not be believed.
        """
        names = self.absent.get(kernel.module, ())
        return kernel.name in names or len(names) > _MOST_ABSENT

    def load(self, images: Sequence[CodeImage]) -> None:
        """Remember images that the process has loaded since the last look."""
        self.seen += len(images)
        for image in images[: max(0, _MOST_IMAGES - len(self.images))]:
            self.images[image.hash] = image

    def first_images(self) -> list[CodeImage]:
        """Return the images that are looked at although they are not known to be used."""
        first = itertools.islice(self.images.values(), _MOST_LOOKED_UP)
        return [image for image in first if image.hash not in self.unread]

    def in_order(self, launched: Mapping[int, Sequence[Kernel]]) -> Iterator[int]:
        """Yield the modules to analyse: those that launched most first, then those that were
        compiled at run time.
        """
        total = {module: sum(k.launches for k in kernels) for module, kernels in launched.items()}
        made = [
            image.hash
            for image in self.images.values()
            if image.held is Held.IN_COPY
            and image.size <= _SMALL_BYTES
            and image.hash not in self.done
        ]
        for module in dict.fromkeys([*sorted(total, key=total.__getitem__, reverse=True), *made]):
            if module in self.images and module not in self.unread:
                yield module

    def is_known(self, entry: Entry | None, names: Sequence[Kernel] | None) -> bool:
        """Return whether nothing is left to analyse of a module, of which these were launched, or
        of all of it.
        """
        if entry is None:
            return False
        if entry.whole or entry.state is not State.ANALYSED:
            return True
        return names is not None and all(
            kernel.name in entry.kernels or self.has_not(kernel) for kernel in names
        )

    def described(self, kernel: Kernel, entry: Entry | None) -> KnownKernel | None:
        """Return what is known of a kernel, or why nothing ever will be; None if it can be
        analysed.
        """
        if entry is not None and kernel.name in entry.kernels:
            return KnownKernel(kernel, State.ANALYSED, facts=entry.kernels[kernel.name])
        if not kernel.module:
            return KnownKernel(kernel, "no-code", "it is not known what the kernel was loaded from")
        if why := self.unread.get(kernel.module, ""):
            return KnownKernel(kernel, "no-code", why)
        if self.has_not(kernel) or (entry is not None and entry.whole):
            return KnownKernel(kernel, "no-code", "its module has no such kernel")
        if entry is not None and entry.state is not State.ANALYSED:
            return KnownKernel(kernel, entry.state, entry.reason)
        return None


def by_module(kernels: Iterable[Kernel]) -> dict[int, list[Kernel]]:
    """Return kernels by their module, those that were launched most first."""
    found: dict[int, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: -kernel.launches):
        found.setdefault(kernel.module, []).append(kernel)
    return found
