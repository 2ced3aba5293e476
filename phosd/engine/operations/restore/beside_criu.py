"""Load the device memory of an image, and hash CRIU's files, beside CRIU's work."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from phosd.engine.image.store import Image
from phosd.engine.job.progress import Beside, Progress
from phosd.engine.node.image_placement import ImagePlacement
from phosd.engine.node.node import Node
from phosd.engine.operations.restore.cpu_side import CpuSide
from phosd.engine.operations.restore.load import LoadedMemory, loaded
from phosd.errors import Internal


class Loading:
    """What is read beside CRIU's work: device memory, which is loaded and hashed on its GPU, and
    CRIU's files, which are hashed.

    The phase ``load`` ends when the device memory is there; what CRIU needs longer is ``cpu``.
    """

    def __init__(
        self,
        node: Node,
        image: Image,
        cpu: CpuSide,
        placement: ImagePlacement,
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._part = Beside(progress)
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(2)
        self._hashed = self._pool.submit(cpu.check_bytes)
        self._loaded = self._pool.submit(
            lambda: self._stack.enter_context(loaded(node, image, self._part, placement.moves))
        )

    def complete(self) -> bool:
        """Return whether all of it is there, and as it was saved. Raises what went wrong."""
        parts: tuple[Future[Any], ...] = (self._hashed, self._loaded)
        for part in parts:
            if part.done():
                part.result()
        if self._loaded.done() and self._progress.phases[-1].name == "load":
            self._progress.phase("cpu")
        return all(part.done() for part in parts)

    @property
    def memory(self) -> LoadedMemory:
        """The device memory, once it is complete."""
        return self._loaded.result()

    def exported(self, name: str) -> int:
        """Return a descriptor of device memory that the program had open, once all is loaded.

        Raises :class:`ImageCorrupt` if the image has none of this name.
        """
        return self._loaded.result().descriptor_of(name)

    @contextmanager
    def named_if_damaged(self) -> Iterator[None]:
        """If CRIU fails in the context, raise :class:`ImageCorrupt` in place of its words, if its
        files are damaged.
        """
        try:
            yield
        except Internal:
            self._hashed.result()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part.cancel()
        self._pool.shutdown()
        self._stack.close()
