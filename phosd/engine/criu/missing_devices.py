"""Stand in for devices of the GPU driver that a restored program had open and cannot open here."""

import contextlib
import os
from types import TracebackType
from typing import Self

from phosd.engine.criu.driver_files import DriverDevices
from phosd.engine.criu.program import Owner

MOST_DEVICES = 64
"""Most devices of an image: a descriptor of each may be passed to CRIU."""


class MissingDevices:
    """Counters that never count, in the place of those of ``devices`` that ``owner`` cannot open.

    NVML then answers with errors, as on a machine without a GPU. ``inherited`` are the descriptors
    that CRIU must inherit; ``words`` tell it about them.
    """

    def __init__(self, devices: tuple[str, ...], owner: Owner) -> None:
        here = DriverDevices.here()
        self._missing = [each for each in devices if not here.openable(each, owner)]
        self._stack = contextlib.ExitStack()
        self.inherited: tuple[int, ...] = ()

    @property
    def words(self) -> list[str]:
        return [
            word
            for number, path in zip(self.inherited, self._missing, strict=True)
            for word in ("--inherit-fd", f"fd[{number}]:{path.removeprefix('/')}")
        ]

    def __enter__(self) -> Self:
        for _ in self._missing:
            number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._stack.callback(os.close, number)
            self.inherited += (number,)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
