"""Give a restored program descriptors of the device memory that it had exported and kept open."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Self

from phosd.engine.criu.run.part import CriuPart


class DeviceMemory(CriuPart):
    """Descriptors of ``memory``, by the names that the program's files have in the image. In a
    rehearsal there is none, and a counter stands for each.
    """

    def __init__(self, names: Sequence[str], memory: Mapping[str, int]) -> None:
        self._names = names
        self._memory = memory
        self._stack = contextlib.ExitStack()
        self._opened: list[int] = []

    @property
    def descriptors(self) -> Sequence[int]:
        return self._opened

    @property
    def words(self) -> Sequence[str]:
        return [
            word
            for number, name in zip(self._opened, self._names, strict=True)
            for word in ("--inherit-fd", f"fd[{number}]:{name.removeprefix('/')}")
        ]

    def __enter__(self) -> Self:
        for name in self._names:
            given = self._memory.get(name)
            number = os.eventfd(0, os.EFD_CLOEXEC) if given is None else os.dup(given)
            self._stack.callback(os.close, number)
            self._opened.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
