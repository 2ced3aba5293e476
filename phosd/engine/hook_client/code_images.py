"""The images that a process has loaded kernels from."""

import enum
import mmap
import zlib
from dataclasses import dataclass

from phosd.engine.hook_client.answers import Garbled, decode_rows
from phosd.engine.hook_client.wire import IMAGE

MAX_IMAGES = 1 << 16
"""Most images accepted from one program."""
MAX_BYTES = 1 << 30
"""Most bytes of an image that is read. The largest fat binary of PyTorch has some 100 MB."""
_HEAD, _TAIL, _WHOLE = 8 << 10, 4 << 10, 8 << 20
_WORD = (1 << 64) - 1


class Held(enum.IntEnum):
    """Where an image's bytes are; see wire.h."""

    NOT_KEPT = 0
    IN_OBJECT = 1
    IN_COPY = 2
    IN_FILE = 3


@dataclass(frozen=True)
class CodeImage:
    """An image of ``size`` bytes, by the hash that :attr:`.answers.Kernel.module` names it with.
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


def hash_of(data: bytes | mmap.mmap) -> int:
    """Return the hash that the hook gives an image (``phosd/hook/code/modules.cpp``)."""
    head = data[:_HEAD]
    tail = data[max(len(head), len(data) - _TAIL) :]
    parts = [head, tail]
    if len(data) <= _WHOLE:
        middle = zlib.adler32(data[len(head) : len(data) - len(tail)])
        parts.append(middle.to_bytes(8, "little"))
    mixed = len(data)
    for part in parts:
        for at in range(0, len(part), 8):
            word = int.from_bytes(part[at : at + 8], "little")
            mixed = ((mixed ^ word) * 0x9E3779B97F4A7C15) & _WORD
            mixed ^= mixed >> 32
    return mixed or 1
