"""Stand in for devices of the GPU driver that a restored program had open and cannot open here."""

import contextlib
import os
from collections.abc import Sequence
from typing import Self

from phosd.engine.criu.run.driver_devices import DriverDevices
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart


class PlaceholderDevices(CriuPart):
    """Counters that never count, in the place of those of ``devices`` that ``owner`` cannot open.

    NVML then answers with errors, as on a machine without a GPU.
    """

    def __init__(self, devices: tuple[str, ...], owner: Owner) -> None:
        here = DriverDevices.here()
        self._missing = [each for each in devices if not here.openable(each, owner)]
        self._stack = contextlib.ExitStack()
        self._counters: list[int] = []

    @property
    def descriptors(self) -> Sequence[int]:
        return self._counters

    @property
    def words(self) -> Sequence[str]:
        return [
            word
            for number, path in zip(self._counters, self._missing, strict=True)
            for word in ("--inherit-fd", f"fd[{number}]:{path.removeprefix('/')}")
        ]

    def __enter__(self) -> Self:
        for _ in self._missing:
            number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._stack.callback(os.close, number)
            self._counters.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
