"""Play phosd's part of a push and a pull, with an image of some chunks."""

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from phosd.client.remote import Remote
from phosd.client.transfer import Link, PhosdHasLeft, Sent
from phosd.portable import DONE, Chunk, Head, map_bytes, mapped, packed_map, read_head


class Image:
    """An image of these chunks, in this order, each of which is there once."""

    def __init__(self, image: str, parts: Sequence[bytes], name: str = "") -> None:
        self.id = image
        self.parts = list(dict.fromkeys(parts))
        self.chunks = [Chunk(hashlib.sha256(part).hexdigest(), len(part)) for part in self.parts]
        listed = [[chunk.sha256, chunk.length] for chunk in self.chunks]
        created = datetime.strptime(image[:15], "%Y%m%dT%H%M%S").isoformat()
        named = {"id": image, "name": name, "created": created}
        self.head = Head(json.dumps({"chunks": listed, "image": named}).encode())


def pushed(remote: Remote, image: Image, most: int | None = None) -> Sent:
    """Push an image. phosd leaves when it has sent ``most`` bytes of chunks, if so many are asked
    for, and the push fails with :class:`PhosdHasLeft`.
    """

    def phosd(link: Link) -> None:
        link.write(image.head.packed)
        count = len(image.chunks)
        left = most
        for number in mapped(link.read(map_bytes(count)), count):
            part = image.parts[number]
            link.write(part if left is None else part[:left])
            if left is not None:
                left -= len(part)
                if left < 0:
                    return
        while link.read(1) != DONE:
            pass

    with _beside(phosd) as link:
        return remote.push(link)


def pulled(remote: Remote, name: str = "latest") -> list[bytes]:
    """Pull an image; its chunks, which are what they are called."""
    found: list[bytes] = []

    def phosd(link: Link) -> None:
        chunks = read_head(link.read).contents.chunks
        link.write(packed_map([True] * len(chunks)))
        for chunk in chunks:
            found.append(link.read(chunk.length))
            assert hashlib.sha256(found[-1]).hexdigest() == chunk.sha256

    with _beside(phosd) as link:
        remote.source(remote.find(name)).pull(link)
    return found


@contextmanager
def _beside(phosd: Callable[[Link], None]) -> Iterator[Link]:
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            try:
                phosd(Link(theirs))
            except PhosdHasLeft:  # the other side has, and says why
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours:
            yield Link(ours)
    finally:
        thread.join()
