"""Remember what restores are about to take of GPUs, for others that choose one meanwhile."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping


class ExpectedMemory:
    """What will be left of each GPU's free memory. Safe to use from several threads.

    A restore allocates group by group, so what is free tells only later that it has come.
    """

    def __init__(self) -> None:
        self.choosing = threading.RLock()
        """Held while a GPU is chosen and until what is needed of it is expected."""
        self._left: dict[int, int] = {}
        self._jobs: Counter[int] = Counter()

    def left(self, gpu: int, free: int) -> int:
        """Return the bytes that will be left of the ``free`` ones of a GPU."""
        with self.choosing:
            return min(free, self._left.get(gpu, free))

    @contextlib.contextmanager
    def expect(self, needs: Mapping[int, int], free: Callable[[int], int]) -> Iterator[None]:
        """Expect that these bytes of GPUs are taken inside the context."""
        with self.choosing:
            for gpu, size in needs.items():
                self._left[gpu] = self.left(gpu, free(gpu)) - size
                self._jobs[gpu] += 1
        try:
            yield
        finally:
            with self.choosing:
                for gpu in needs:
                    self._jobs[gpu] -= 1
                    if not self._jobs[gpu]:
                        del self._left[gpu]
