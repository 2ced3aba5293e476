"""The images that a process has loaded kernels from, and their bytes, read from its memory."""

import enum
import os
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.hook_client.wire import IMAGE, Garbled, decode_rows
from phosd.engine.system import procfs

MAX_IMAGES = 1 << 16
"""Most images accepted from one program."""
MAX_BYTES = 1 << 30
"""Of an image that is read. The largest fat binary of PyTorch has some 100 MB."""
_HEAD, _TAIL = 8 << 10, 4 << 10
_WORD = (1 << 64) - 1


class Held(enum.IntEnum):
    """Where an image's bytes are; see wire.h."""

    NOT_KEPT = 0
    IN_OBJECT = 1
    IN_COPY = 2
    IN_FILE = 3


@dataclass(frozen=True)
class CodeImage:
    """An image of ``size`` bytes, by the hash that :attr:`wire.Kernel.module` names it with.
    ``address`` is in the process, ``path`` in its namespace.
    """

    hash: int
    address: int
    size: int
    held: Held
    path: str = ""


def decode_images(body: bytes) -> tuple[list[CodeImage], bool]:
    """Decode the answer to ``IMAGES``, and whether there are more. Raises :class:`Garbled`."""
    rows, more = decode_rows(body, IMAGE, "images", "a path")
    images = []
    for (image_hash, address, size, held), path in rows:
        if held not in list(Held):
            raise Garbled(f"an image held in {held}")
        images.append(CodeImage(image_hash, address, size, Held(held), path))
    return images, more


def read_image(pid: int, image: CodeImage) -> bytes | None:
    """Return the bytes that the process has loaded, or None if they are no longer there, or more
    than :data:`MAX_BYTES`.

    They are whatever the process says that they are: for whoever takes them for its own kernels.
    """
    if not 0 < image.size <= MAX_BYTES or image.held is Held.NOT_KEPT:
        return None
    folder = procfs.PROC / str(pid)
    try:
        if image.held is Held.IN_FILE:
            data = _read(folder / "root" / image.path.lstrip("/"), 0, image.size)
        else:
            data = _read(folder / "mem", image.address, image.size)
    except (OSError, OverflowError):
        return None
    return data if hash_of(data) == image.hash else None


def _read(path: Path, offset: int, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        data = bytearray()
        while len(data) < size and (
            part := os.pread(descriptor, min(size - len(data), 16 << 20), offset + len(data))
        ):
            data += part
        return bytes(data)
    finally:
        os.close(descriptor)


def hash_of(data: bytes) -> int:
    """Return the hash that the hook gives an image (``phosd/hook/code/modules.cpp``)."""
    head = data[:_HEAD]
    tail = data[max(len(head), len(data) - _TAIL) :]
    mixed = len(data)
    for part in (head, tail):
        for at in range(0, len(part), 8):
            word = int.from_bytes(part[at : at + 8], "little")
            mixed = ((mixed ^ word) * 0x9E3779B97F4A7C15) & _WORD
            mixed ^= mixed >> 32
    return mixed or 1
