"""Bring an image's device memory, and hash CRIU's files, beside CRIU's work."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

from phosd.engine.job.progress import Beside, Progress
from phosd.engine.node.loaded_memory import LoadedMemory
from phosd.engine.operations.restore.cpu_side import CpuSide
from phosd.engine.operations.restore.left_hollow import Shelved
from phosd.errors import Internal

Memory = LoadedMemory | Shelved


class BesideCriu:
    """What is read beside CRIU's work: device memory, by ``bring``, and CRIU's files, which are
    hashed.

    The phase that has begun ends when the device memory is there; what CRIU needs longer is
    ``cpu``.
    """

    def __init__(
        self,
        cpu: CpuSide,
        bring: Callable[[Progress], AbstractContextManager[Memory]],
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._part = Beside(progress)
        self._phase = len(progress.phases)
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(2)
        self._hashed = self._pool.submit(cpu.check_bytes)
        self._brought = self._pool.submit(lambda: self._stack.enter_context(bring(self._part)))

    def complete(self) -> bool:
        """Return whether all of it is there, and as it was saved. Raises what went wrong."""
        parts: tuple[Future[Any], ...] = (self._hashed, self._brought)
        for part in parts:
            if part.done():
                part.result()
        if self._brought.done() and len(self._progress.phases) == self._phase:
            self._progress.phase("cpu")
        return all(part.done() for part in parts)

    @property
    def memory(self) -> Memory:
        """The device memory, once it is complete."""
        return self._brought.result()

    def descriptor_of(self, name: str) -> int:
        """Return a descriptor of device memory that the program had open, once all is there.

        Raises :class:`ImageCorrupt` if the image has none of this name.
        """
        return self.memory.descriptor_of(name)

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
