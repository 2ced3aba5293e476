"""Choose the GPUs on which an image is restored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phosd.engine.image.manifest import Gpu, HostGpu, Manifest
from phosd.engine.node.gpus import GpuInfo, divided
from phosd.engine.node.placement import parse_pairs, require_undivided
from phosd.engine.program.driver_checkpoint import GpuPairs
from phosd.errors import GpuMismatch, OutOfMemory
from phosd.units import counted, human_bytes


@dataclass(frozen=True)
class ImagePlacement:
    """The GPUs of this node that replace those of an image.

    ``moves`` has the ordinal of each GPU that the program saw, with that of the one here. ``pairs``
    are for the driver's restore; none if the GPUs of the machine are as they were. ``text`` says in
    words which GPUs the program will use, and ``changed`` whether these are others than before.
    """

    moves: Mapping[int, int]
    pairs: GpuPairs
    text: str
    changed: bool


def place_image(
    manifest: Manifest,
    wanted: str,
    needs: Mapping[int, int],
    here: Sequence[GpuInfo],
    free: Callable[[GpuInfo], int],
) -> ImagePlacement:
    """Return where the GPUs of the image are ``here``: where they are ``wanted``
    (``placement.py``), otherwise the same, by UUID, if they have room; otherwise, of the same chip
    and with room, that with the most free memory, or of these the first. Each takes the place of
    one.

    ``needs`` are the bytes on each GPU of the image, by ordinal; ``free`` tells those of one here.
    Raises :class:`GpuMismatch`, :class:`OutOfMemory`, :class:`InvalidOption`, :class:`Unsupported`.
    """
    search = _Search(manifest, needs, here, free)
    saved = {gpu.ordinal: gpu for gpu in manifest.gpus}
    if wanted:
        used = [gpu.ordinal for gpu in manifest.gpus if gpu.used]
        whose = f"the program of image {manifest.id}"
        pairs = parse_pairs(wanted, used, here, olds=manifest.gpus, whose=whose)
        for old, new in pairs.items():
            search.take_wanted(saved[old], new)
    largest_first = sorted(manifest.gpus, key=lambda gpu: (-needs.get(gpu.ordinal, 0), gpu.ordinal))
    for gpu in largest_first:
        if gpu.used:
            search.take_same(gpu)
    for gpu in largest_first:
        if gpu.used:
            search.take_another(gpu)
    for gpu in manifest.gpus:  # what a program only sees may be any that is left
        if not gpu.used:
            search.take_unused(gpu)
    search.require_as_many()
    return search.placement()


class _Search:
    """The search for a GPU ``here`` for each GPU of an image."""

    def __init__(
        self,
        manifest: Manifest,
        needs: Mapping[int, int],
        here: Sequence[GpuInfo],
        free: Callable[[GpuInfo], int],
    ) -> None:
        self._manifest = manifest
        self._needs = needs
        self._here = here
        self._free = free
        self._taken: dict[int, GpuInfo] = {}

    def take_wanted(self, gpu: Gpu, ordinal: int) -> None:
        """Take the GPU that the user has named. Raises if it will not do."""
        (found,) = (each for each in self._here if each.ordinal == ordinal)
        if found.name != gpu.chip:
            raise GpuMismatch(
                f"GPU {gpu.ordinal} of image {self._manifest.id} is a {gpu.chip}, GPU {ordinal}"
                f" here a {found.name}",
                hint="the driver moves programs between GPUs of one kind only",
            )
        if found.uuid != gpu.uuid:
            require_undivided(ordinal)
        if not self._has_room(found, gpu):
            raise self._too_full(gpu, [found])
        self._taken[gpu.ordinal] = found

    def take_same(self, gpu: Gpu) -> None:
        """Take the very GPU, if it is here and has room."""
        for each in self._left():
            if (each.uuid, each.name) == (gpu.uuid, gpu.chip) and self._has_room(each, gpu):
                self._take(gpu, each)

    def take_another(self, gpu: Gpu) -> None:
        """Take one of the same chip, if there is none yet for it."""
        if gpu.ordinal in self._taken:
            return
        alike = [each for each in self._left() if each.name == gpu.chip]
        able = [each for each in alike if each.uuid == gpu.uuid or not divided(each.ordinal)]
        if not able:
            raise self._no_chip(gpu, alike)
        roomy = [each for each in able if self._has_room(each, gpu)]
        if not roomy:
            raise self._too_full(gpu, able)
        self._take(gpu, max(roomy, key=lambda each: (self._free(each), -each.ordinal)))

    def take_unused(self, gpu: Gpu) -> None:
        """Take one for a GPU that the program has seen, and not used: it goes on seeing as many."""
        if gpu.ordinal in self._taken:
            return
        alike = [each for each in self._left() if each.name == gpu.chip]
        if not alike:
            raise self._no_chip(gpu, alike)
        same = [each for each in alike if each.uuid == gpu.uuid]
        self._take(gpu, (same or alike)[0])

    def require_as_many(self) -> None:
        """Raise :class:`GpuMismatch` if the machine that made the image had more GPUs: the driver
        restores nothing where there are fewer than it knew, whatever the program saw of them.
        """
        known, here = len(self._manifest.host.gpus), len(self._here)
        if known > here:
            raise GpuMismatch(
                f"image {self._manifest.id} was made on a machine with {counted(known, 'GPU')}, "
                f"here {'are' if here > 1 else 'is'} {here}, and the driver restores a program only"
                " where there are as many, also if it saw fewer",
                hint=f"restore it where there are {known} or more",
            )

    def placement(self) -> ImagePlacement:
        """Return what was found."""
        moves = {old: new.ordinal for old, new in self._taken.items()}
        words, changed = [], False
        for gpu in self._manifest.gpus:
            new = self._taken[gpu.ordinal]
            if gpu.used and new.uuid != gpu.uuid:
                changed = True
                words.append(f"GPU {new.ordinal} in place of GPU {gpu.ordinal}")
            elif gpu.used:
                words.append(f"GPU {new.ordinal}")
        return ImagePlacement(moves, self._pairs(), ", ".join(words), changed)

    def _take(self, gpu: Gpu, found: GpuInfo) -> None:
        self._taken.setdefault(gpu.ordinal, found)

    def _left(self) -> list[GpuInfo]:
        return [each for each in self._here if each not in self._taken.values()]

    def _has_room(self, found: GpuInfo, gpu: Gpu) -> bool:
        need = self._needs.get(gpu.ordinal, 0)
        return need == 0 or self._free(found) >= need

    def _pairs(self) -> GpuPairs:
        """Return the pairs for the driver, which wants every GPU that it knew in the process, also
        those that the program did not see. What is left of these goes to the same GPU, or to one of
        the same chip, or to any.
        """
        to = {gpu.uuid: self._taken[gpu.ordinal].uuid for gpu in self._manifest.gpus}
        known = self._known()
        if [gpu.uuid for gpu in known] == [gpu.uuid for gpu in self._here] and all(
            old == new for old, new in to.items()
        ):
            return ()
        left = {gpu.uuid: gpu.name for gpu in self._here if gpu.uuid not in to.values()}
        rest = [gpu for gpu in known if gpu.uuid not in to]
        for fits in (
            lambda old, new: old.uuid == new,
            lambda old, new: old.chip == left[new],
            lambda old, new: True,
        ):
            for old in rest:
                new = next((new for new in left if old.uuid not in to and fits(old, new)), None)
                if new is not None:
                    to[old.uuid] = new
                    del left[new]
        return tuple((gpu.uuid, to[gpu.uuid]) for gpu in known if gpu.uuid in to)

    def _known(self) -> list[HostGpu]:
        """Return the GPUs of the machine that made the image. An older image does not tell those
        that the program did not see: they count as being those that are here.
        """
        if self._manifest.host.gpus:
            return list(self._manifest.host.gpus)
        seen = {gpu.uuid: HostGpu(gpu.uuid, gpu.chip) for gpu in self._manifest.gpus}
        here = {gpu.uuid: HostGpu(gpu.uuid, gpu.name) for gpu in self._here}
        if [here_uuid for here_uuid in here if here_uuid in seen] == list(seen):
            return list((here | seen).values())
        return list((seen | here).values())

    def _no_chip(self, gpu: Gpu, alike: Sequence[GpuInfo]) -> GpuMismatch:
        seen = [each for each in self._manifest.gpus if each.chip == gpu.chip]
        whose = ", ".join(each.uuid for each in seen)
        what = f"{len(seen)} GPUs {gpu.chip}" if len(seen) > 1 else f"a GPU {gpu.chip}"
        here = ", ".join(f"{each.ordinal} {each.name} ({each.uuid})" for each in self._here)
        verb = "is" if len(self._here) == 1 else "are"
        why = "".join(f"; GPU {each.ordinal} {divided(each.ordinal)}" for each in alike)
        return GpuMismatch(
            f"image {self._manifest.id} needs {what} in place of {whose}, which its program saw;"
            f" here {verb} {here or 'none'}{why}",
            hint="restore it where there are as many of that chip",
        )

    def _too_full(self, gpu: Gpu, candidates: Sequence[GpuInfo]) -> OutOfMemory:
        has = ", ".join(
            f"GPU {each.ordinal} has {human_bytes(self._free(each))}" for each in candidates
        )
        need = self._needs.get(gpu.ordinal, 0)
        return OutOfMemory(
            f"{has} free, image {self._manifest.id} needs {human_bytes(need)} in place of GPU"
            f" {gpu.ordinal}",
            hint="end or move what uses the GPU (`phos ps`)",
        )
