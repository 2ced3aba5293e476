"""Keep images at a URL that fsspec knows: a folder, a bucket (docs/reference/portable-format.md).

::

    images/<id>.phos            the head of an image, written last
    packs/<aa>/<name>           chunks one after the other, up to 64 MiB; aa: the first two digits
    index/<id>-<name>.json      which packs were written for an image, and which chunks they have

A chunk is there once, whichever image it was pushed with. A pack is named by the chunks in it, and
an index by its own bytes: so a push that was interrupted makes the same packs the next time, and
sends only those that are not there as a whole, and half an index is none.
"""

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from phosd.client.remote_files import RemoteFiles
from phosd.client.transfer import Link, Sent, received_head
from phosd.errors import (
    ImageCorrupt,
    InvalidOption,
    NoSuchImage,
    RemoteFailed,
    Unsupported,
)
from phosd.portable import (
    ALIVE,
    DONE,
    FORMAT,
    MAX_MANIFEST,
    Chunk,
    Head,
    Named,
    map_bytes,
    mapped,
    packed_map,
    read_head,
    require_format,
)
from phosd.units import counted

PACK = 64 << 20
"""Most bytes of a pack: few objects for much memory, and little to send again."""
_AT_ONCE = 4
"""Packs that are on their way at the same time."""
_INDEXES_AT_ONCE = 8
_CLOCKS_DIFFER = 86_400.0
"""Seconds that the clock of the machine where an image was made may be ahead of this one's."""
_STAMP = "%Y%m%dT%H%M%S"
"""How the id of an image begins: with the time (UTC) at which it was made."""
_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}")
_INDEX = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}-[0-9a-f]{64}\.json")
_NAME = re.compile(r"[0-9a-f]{64}")

_T = TypeVar("_T")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Pack:
    """A pack of chunks, by their numbers in the manifest of the image that is pushed."""

    name: str
    numbers: tuple[int, ...]
    size: int


class _IndexedPack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    chunks: tuple[Chunk, ...]


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    packs: tuple[_IndexedPack, ...]
    format: int = FORMAT


class _Format(msgspec.Struct):
    format: int = FORMAT


@dataclass(frozen=True)
class _Place:
    """Where a chunk is: in a pack, from ``offset`` on."""

    pack: str
    offset: int


class Remote:
    """The images at a URL. Everything raises what :class:`RemoteFiles` raises."""

    def __init__(self, url: str, tell: Callable[[str], None] = lambda _: None) -> None:
        """``tell`` is told what is there and cannot be used."""
        self.url = url
        self._tell = tell
        self._files = RemoteFiles(url)
        self.begun = False
        """Whether a push has begun to send: what has come as a whole stays."""

    def images(self) -> list[str]:
        """Return the ids of the images there, oldest first, as their heads are called."""
        names = self._files.sizes("images")
        found = (name.removesuffix(".phos") for name in names if name.endswith(".phos"))
        return sorted(each for each in found if _ID.fullmatch(each))

    def head(self, image: str) -> Head:
        """Return the head of an image, which says itself that it is this one's.

        Raises :class:`NoSuchImage`, and :class:`ImageCorrupt` if there is something else.
        """
        path = _head_path(image)
        head = self._files.parse(path, _head)
        if head is None:
            raise NoSuchImage(
                f"there is no image {image} at {self.url}", hint="`phos pull URL --list` lists them"
            )
        said = head.contents.image
        if said.id != image:
            raise ImageCorrupt(
                f"{path} at {self.url} is the head of another image: of {said.id!r}, which was "
                f"made at {said.created or 'an unknown time'}, and not of {image}",
                hint="somebody has renamed or replaced it: see who may write there, and push the "
                "image again",
            )
        return head

    def heads(self, images: Iterable[str]) -> Iterator[Head]:
        """Yield the heads of images, without those that cannot be read: ``tell`` is told why."""
        for image in images:
            try:
                yield self.head(image)
            except (ImageCorrupt, Unsupported, NoSuchImage) as error:
                self._tell(f"{_head_path(image)} is left out: {error}")

    def find(self, name: str) -> Head:
        """Return the head of the image whose id begins like this, or of the newest, ``latest``, or
        of the newest of the program with this name.
        """
        found = self.images()
        if not found:
            raise NoSuchImage(
                f"there are no images at {self.url}", hint="`phos push IMAGE URL` brings them there"
            )
        if name == "latest":
            return self._newest(found, "that can be read", lambda _: True)
        if name[:1].isalpha():
            return self._newest(found, f"of {name}", lambda image: image.name == name)
        meant = [each for each in found if each.startswith(name)] if name else []
        if len(meant) != 1:
            what = f"{len(meant)} images" if meant else "no image"
            raise NoSuchImage(
                f"there is {what} at {self.url} whose id begins with {name!r}",
                hint="`phos pull URL --list` lists them",
            )
        return self.head(meant[0])

    def _newest(self, images: Sequence[str], what: str, fits: Callable[[Named], bool]) -> Head:
        """Return the newest head of ``what`` that ``fits``. One from the future, which only a wrong
        clock or a forger makes, would be the newest for years.
        """
        end = time.strftime(_STAMP, time.gmtime(time.time() + _CLOCKS_DIFFER))
        ahead = [image for image in images if image > end]
        for head in self.heads(reversed(images[: len(images) - len(ahead)])):
            if fits(head.contents.image):
                if ahead:
                    self._tell(f"{', '.join(ahead)} at {self.url} is from the future: left out")
                return head
        raise NoSuchImage(
            f"there is no image {what} at {self.url}"
            + (f", but for what is from the future: {', '.join(ahead)}" if ahead else ""),
            hint="`phos pull URL --list` lists them",
        )

    def push(self, link: Link, key: Path | None = None) -> Sent:
        """Bring the image there that phosd sends over ``link``: what of it is not there yet."""
        head = received_head(link, key)
        contents = head.contents
        image, chunks = contents.image.id, contents.chunks
        if not _ID.fullmatch(image):
            raise ImageCorrupt(f"phosd names an image {image!r}", hint="it is of another version")
        before = self._one_of(image, head)
        sizes = self._files.sizes("packs")
        known = self._places(chunks, sizes)
        packs = list(_packs(chunks, [n for n, c in enumerate(chunks) if c.sha256 not in known]))
        left = [pack for pack in packs if sizes.get(pack.name) != pack.size]
        wanted = [number for pack in left for number in pack.numbers]
        asked = frozenset(wanted)
        self.begun = True
        link.write(packed_map([number in asked for number in range(len(chunks))]))

        def contents_of() -> Iterator[tuple[str, bytes]]:
            for pack in left:
                parts = [link.read(chunks[number].length) for number in pack.numbers]
                yield _path_of(pack.name), b"".join(parts)

        for _ in _ahead(lambda each: self._files.write(*each), contents_of()):
            link.write(ALIVE)
        if packs:
            index = _Index(
                tuple(_IndexedPack(p.name, tuple(chunks[n] for n in p.numbers)) for p in packs)
            )
            text = msgspec.json.encode(index)
            self._files.write(f"index/{image}-{hashlib.sha256(text).hexdigest()}.json", text)
        if before is None or (head.signature and before.packed != head.packed):
            self._files.write(_head_path(image), head.packed)
        link.write(DONE)
        return Sent.of(chunks, wanted)

    def source(self, head: Head) -> "Source":
        """Return where the chunks of an image are. Raises :class:`RemoteFailed` if not all are."""
        contents = head.contents
        places = self._places(contents.chunks, self._files.sizes("packs"))
        missing = sum(chunk.sha256 not in places for chunk in contents.chunks)
        if missing:
            raise RemoteFailed(
                f"{missing} of the {counted(len(contents.chunks), 'chunk')} of image "
                f"{contents.image.id} are not at {self.url}",
                hint="push the image again, from where it was made",
            )
        return Source(self._files, head, [places[chunk.sha256] for chunk in contents.chunks])

    def _one_of(self, image: str, head: Head) -> Head | None:
        """Return the head that is there of the same image. Raises :class:`InvalidOption` if it is
        another one's.
        """
        try:
            before = self._files.parse(_head_path(image), _head)
        except ImageCorrupt:  # it was not written as a whole
            return None
        if before is None:
            return None
        # The manifest of another version of phosd may say the same in other words.
        if before.contents.chunks != head.contents.chunks:
            raise InvalidOption(
                f"there is another image {image} at {self.url}, which another phosd has made",
                hint="push it to another place",
            )
        return before

    def _places(self, chunks: Sequence[Chunk], sizes: Mapping[str, int]) -> dict[str, _Place]:
        """Return where those of the chunks are that are in packs of these sizes, by SHA-256."""
        meant = frozenset(chunk.sha256 for chunk in chunks)
        found: dict[str, _Place] = {}
        listed = sorted(self._files.sizes("index").items())
        # An index lists no more chunks than the manifest that it was written for.
        indexes = [
            (n, size) for n, size in listed if _INDEX.fullmatch(n) and 0 < size <= MAX_MANIFEST
        ]

        def read(index: tuple[str, int]) -> bytes | None:
            return self._files.read(f"index/{index[0]}", index[1])

        for (name, _), data in zip(
            indexes, _ahead(read, iter(indexes), _INDEXES_AT_ONCE), strict=True
        ):
            if data is None or hashlib.sha256(data).hexdigest() not in name:
                continue  # it was removed meanwhile, or not written as a whole
            for pack in self._index(data).packs:
                ends = sum(chunk.length for chunk in pack.chunks)
                if not _NAME.fullmatch(pack.name) or sizes.get(pack.name) != ends:
                    continue
                offset = 0
                for chunk in pack.chunks:
                    if chunk.sha256 in meant:
                        found.setdefault(chunk.sha256, _Place(pack.name, offset))
                    offset += chunk.length
        return found

    def _index(self, data: bytes) -> _Index:
        try:
            require_format(msgspec.json.decode(data, type=_Format).format)
            return msgspec.json.decode(data, type=_Index)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteFailed(
                f"an index at {self.url} cannot be read ({error})",
                hint="something else than `phos push` has written it: remove it there",
            ) from error


class Source:
    """The chunks of an image at a URL."""

    def __init__(self, files: RemoteFiles, head: Head, places: Sequence[_Place]) -> None:
        self._files = files
        self._head = head
        self._places = places

    def pull(self, link: Link) -> Sent:
        """Send the image to phosd: what it wants of it."""
        chunks = self._head.contents.chunks
        link.write(self._head.packed)
        wanted = [*mapped(link.read(map_bytes(len(chunks))), len(chunks))]
        runs = _runs(chunks, self._places, wanted)
        for data in _ahead(lambda run: self._files.read_range(*run), runs):
            link.write(data)
        link.wait_for_end()
        return Sent.of(chunks, wanted)


def _head_path(image: str) -> str:
    return f"images/{image}.phos"


def _head(read: Callable[[int], bytes]) -> Head:
    """Parse the head that a file has, and no more: ``read`` returns its next bytes."""

    def exactly(count: int) -> bytes:
        part = read(count)
        if len(part) < count:
            raise ImageCorrupt(
                "the beginning of the image is cut short", hint="push the image again"
            )
        return part

    return read_head(exactly)


def _packs(chunks: Sequence[Chunk], numbers: Sequence[int]) -> Iterator[Pack]:
    """Yield the packs for these chunks, in order."""
    held: list[int] = []
    size = 0
    for number in numbers:
        if size + chunks[number].length > PACK:
            yield _pack(chunks, held, size)
            held, size = [], 0
        held.append(number)
        size += chunks[number].length
    if held:
        yield _pack(chunks, held, size)


def _pack(chunks: Sequence[Chunk], numbers: Sequence[int], size: int) -> Pack:
    named = hashlib.sha256("".join(chunks[number].sha256 for number in numbers).encode())
    return Pack(named.hexdigest(), tuple(numbers), size)


def _runs(
    chunks: Sequence[Chunk], places: Sequence[_Place], wanted: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """Yield file, begin and end of what can be read at once, in the order of the chunks."""
    run: tuple[str, int, int] | None = None
    for number in wanted:
        place, length = places[number], chunks[number].length
        if run is not None and (run[0], run[2]) == (_path_of(place.pack), place.offset):
            run = (run[0], run[1], run[2] + length)
            continue
        if run is not None:
            yield run
        run = (_path_of(place.pack), place.offset, place.offset + length)
    if run is not None:
        yield run


def _ahead(
    work: Callable[[_Item], _T], items: Iterator[_Item], at_once: int = _AT_ONCE
) -> Iterator[_T]:
    """Yield what ``work`` makes of each item, in order; some are worked on in advance.

    What has begun is brought to its end, whatever happens: a pack that has come as a whole is not
    sent again.
    """
    with ThreadPoolExecutor(at_once) as pool:
        begun: deque[Future[_T]] = deque()
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) > at_once:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def _path_of(pack: str) -> str:
    return f"packs/{pack[:2]}/{pack}"
