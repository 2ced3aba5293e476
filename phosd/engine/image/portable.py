"""Translate manifests for other machines, and back.

In a store everything is named by digests that are keyed with the store's secret. Elsewhere it is
named by SHA-256, which everybody can compute: device memory as well as CRIU's files are chunks of
up to 2 MiB, each listed once. What comes from elsewhere is not taken on trust: :func:`parsed`
checks it as :func:`~phosd.engine.image.validate.check_manifest` checks a manifest of the store, and
more.
"""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import get_args

import msgspec

from phosd import __version__
from phosd.engine.image.manifest import CHUNK, FORMAT, ChunkRef, Manifest
from phosd.engine.image.validate import check_manifest, valid_id, valid_relative
from phosd.errors import ImageCorrupt, Reason, Unsupported
from phosd.interface.options import CheckpointMode
from phosd.portable import FORMAT as PORTABLE_FORMAT
from phosd.portable import Chunk, require_format

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"criu-(0|[1-9]\d{0,4})")
_CORE = re.compile(r"core-(0|[1-9]\d*)\.img")
MAX_FILES = 1 << 18
"""Most CRIU files in an image: some for each process and thread."""
_MODES = tuple(mode for mode in get_args(CheckpointMode) if mode != "auto")
_MOST_GPUS = 64
_MOST_CHUNKS = 1 << 20
"""2 TiB of device memory."""
_MOST_ENDPOINTS = 200
_MOST_MEMORY_FILES = 1000
"""Each takes a descriptor while the image is restored."""
_MOST_ITEMS = 1 << 17
_MOST_COMMAND = 12 << 10
"""Most characters of a program's path and command line: as many as a checkpoint records."""
_MOST_WORDS = 1000
"""Most characters of what is said in a few words."""
_MOST_CHARACTERS = 8 << 10
"""Most characters of any text."""
_LAST = (1 << 63) - 1
_LAST_USER = (1 << 32) - 2

_Demand = Callable[[bool, str], None]


class PortableFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A CRIU file: its path in its tree's folder, its bytes, and the numbers of its chunks."""

    path: str
    size: int
    chunks: tuple[int, ...]


class PortableImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of an image for other machines.

    ``image`` is the store's without chunks and files. These are in ``blocks``, for each block the
    numbers of its chunks, and in ``files``, for each tree. A number is a place in ``chunks``.
    """

    chunks: tuple[Chunk, ...]
    files: tuple[tuple[PortableFile, ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    image: Manifest
    format: int = PORTABLE_FORMAT

    @property
    def packed(self) -> bytes:
        """The JSON, with the same bytes each time that the image is exported."""
        return msgspec.json.encode(self)

    @property
    def file_bytes(self) -> int:
        """Bytes of CRIU's files."""
        return sum(file.size for files in self.files for file in files)

    @property
    def in_memory(self) -> frozenset[int]:
        """The numbers of the chunks that are device memory."""
        return frozenset(number for block in self.blocks for number in block)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory to store: a chunk counts once."""
        return sum(self.chunks[number].length for number in self.in_memory)

    def named(self) -> Iterator[tuple[str, PortableFile]]:
        """Yield each CRIU file, with the folder of its tree."""
        for tree, files in zip(self.image.trees, self.files, strict=True):
            for file in files:
                yield tree.folder, file


def portable(
    manifest: Manifest,
    chunks: Sequence[Chunk],
    files: Sequence[Sequence[PortableFile]],
    blocks: Sequence[Sequence[int]],
) -> PortableImage:
    """Return the manifest for other machines; ``files`` of each tree, ``blocks`` of each block."""
    replace = msgspec.structs.replace
    image = replace(
        manifest,
        parent=None,
        trees=tuple(replace(tree, files=()) for tree in manifest.trees),
        blocks=tuple(replace(block, chunks=()) for block in manifest.blocks),
    )
    return PortableImage(tuple(chunks), tuple(map(tuple, files)), tuple(map(tuple, blocks)), image)


class _Made(msgspec.Struct, frozen=True):
    """The part of the store's manifest that tells how to read the rest."""

    format: int = FORMAT
    phosd: str = ""


class _Format(msgspec.Struct):
    """The part that tells how to read the rest."""

    format: int
    image: _Made = _Made()


_format_decoder = msgspec.json.Decoder(_Format)
_decoder = msgspec.json.Decoder(PortableImage)


def parsed(text: bytes) -> PortableImage:
    """Return the manifest in a head. Raises :class:`ImageCorrupt` unless a phosd could have written
    it, :class:`Unsupported` if a newer one has.
    """
    made = _Made()
    try:
        formats = _format_decoder.decode(text)
        require_format(formats.format)
        made = formats.image
        if made.format != FORMAT:
            raise _of_another_version(made)
        found = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if made.phosd not in ("", __version__):
            raise _of_another_version(made) from error
        raise _no_image(f"cannot be read ({error})") from error
    _check(found)
    return found


def _check(found: PortableImage) -> None:
    image, count = found.image, len(found.chunks)

    def demand(condition: bool, what: str) -> None:
        if not condition:
            raise _no_image(what)

    demand(len({chunk.sha256 for chunk in found.chunks}) == count, "lists a chunk twice")
    for chunk in found.chunks:
        demand(_SHA256.fullmatch(chunk.sha256) is not None, "has a chunk without a digest")
        demand(0 < chunk.length <= CHUNK, f"has a chunk of {chunk.length} bytes")
    demand(len(found.files) == len(image.trees) > 0, "has not the files of each tree")
    demand(len(found.blocks) == len(image.blocks), "has not the chunks of each block")
    demand(sum(map(len, found.blocks)) <= _MOST_CHUNKS, "has more memory than GPUs have")
    used = bytearray(count)

    def length_of(number: int, what: str) -> int:
        demand(0 <= number < count, f"has not all chunks of {what}")
        used[number] = 1
        return found.chunks[number].length

    demand(sum(map(len, found.files)) <= MAX_FILES, "has more files than CRIU writes")
    for files in found.files:
        _check_files(files, length_of, demand)
    for block, numbers in zip(image.blocks, found.blocks, strict=True):
        demand(not block.chunks, "has chunks in packs")
        for number in numbers:
            length_of(number, f"block {block.va:#x}")
    demand(all(used), "lists chunks that are of nothing")
    _check_image(image, demand)
    check_manifest(
        image_with(found, {number: _somewhere(found, number) for number in found.in_memory}),
        image.id,
    )


def _check_files(
    files: Sequence[PortableFile], length_of: Callable[[int, str], int], demand: _Demand
) -> None:
    paths = {file.path for file in files}
    demand(len(paths) == len(files), "names a file twice")
    for file in files:
        demand(valid_relative(f"criu-0/{file.path}"), f"names the file {file.path!r}")
        # CRIU reads core-7.img; who looks at all of them must not take core-07.img for it.
        core = file.path.rpartition("/")[2].startswith("core-")
        demand(not core or _CORE.fullmatch(file.path) is not None, f"names the file {file.path!r}")
        parts = file.path.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        demand(not above & paths, f"has a folder and a file {file.path!r}")
        sizes = [length_of(number, file.path) for number in file.chunks]
        demand(sum(sizes) == file.size, f"gives {file.path} another size than its chunks have")
        demand(all(s == CHUNK for s in sizes[:-1]), f"has a short chunk within {file.path}")


def _check_image(image: Manifest, demand: _Demand) -> None:
    """Check what :func:`check_manifest` leaves alone, as phosd itself has written it there: what is
    shown on the bus must fit there, or nobody is shown anything.
    """
    demand(all(map(_is_plain, _values(image))), "has a number or a text that phosd does not write")
    demand(valid_id(image.id), "has no id")
    demand(image.parent is None, "names a parent")
    demand(image.mode in _MODES, f"has the mode {image.mode!r}")
    demand(0 <= image.stop_seconds <= _LAST, "has no duration")
    demand(0 <= image.wrong_guesses <= 1 << 20, "counts what it cannot have counted")
    try:
        datetime.fromisoformat(image.created).timestamp()
    except (ValueError, OverflowError) as error:
        raise _no_image(f"says it is of {image.created!r}, which is no time") from error
    most = max(len(image.gpus), len(image.host.gpus))
    demand(most <= _MOST_GPUS, "names more GPUs than a machine has")
    for gpu in image.gpus:
        demand(len(gpu.chip) <= _MOST_WORDS, "names a GPU that nobody makes")
        demand(0 <= gpu.ordinal < 1 << 16 and gpu.memory >= 0, f"describes no GPU {gpu.ordinal}")
    demand(0 <= image.host.driver < 1 << 31, "names no driver")
    for tree in image.trees:
        demand(not tree.files, "names files twice")
        demand(_FOLDER.fullmatch(tree.folder) is not None, f"names the folder {tree.folder!r}")
        details = tree.details
        if details is None:
            raise _no_image(f"says nothing about the tree of pid {tree.root}")
        ids = (details.uid, details.gid, *details.groups)
        demand(all(0 <= each <= _LAST_USER for each in ids), f"gives pid {tree.root} no user")
        opened = {(file.pid, file.descriptor) for file in details.open_files}
        demand(len(opened) == len(details.open_files), "has two files open by one number")
        outlets = len(details.endpoints)
        demand(outlets <= _MOST_ENDPOINTS, f"has {outlets} outputs, more than a restore passes on")
        demand(len(details.memory_files) <= _MOST_MEMORY_FILES, "has more files in memory than fit")
        demand(len(details.written_files) <= _MOST_MEMORY_FILES, "brings more files than fit")
        demand(len(set(details.groups)) == len(details.groups), "has a group twice")
        lists = (
            details.groups,
            details.open_files,
            details.mapped_files,
            details.device_memory,
        )
        demand(max(map(len, lists)) <= _MOST_ITEMS, "lists more than a program has")
        demand(0 <= details.tied_to_parent < signal.NSIG, f"ties pid {tree.root} to no signal")
    demand(
        len({tree.folder for tree in image.trees}) == len(image.trees), "has trees in one folder"
    )
    pids = {process.pid for process in image.processes}
    demand(len(pids) == len(image.processes), "has two processes of one pid")
    for number, tree in enumerate(image.trees):
        demand(
            any(p.pid == tree.root and p.tree == number for p in image.processes),
            f"has no process {tree.root}, the root of a tree",
        )
    for process in image.processes:
        ids = (process.uid, process.gid, *process.groups)
        demand(all(0 <= each <= _LAST_USER for each in ids), f"gives pid {process.pid} no user")
        demand(process.start_time >= 0, f"has no process {process.pid}")
        words = (process.executable, *process.command)
        demand(sum(map(len, words)) <= _MOST_COMMAND, "has a command line that nobody gave")


def _values(image: Manifest) -> Iterator[object]:
    left: list[object] = [msgspec.to_builtins(image)]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each
        else:
            yield each


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MOST_CHARACTERS and "\0" not in value
    return not isinstance(value, int | float) or -_LAST <= value <= _LAST


def _somewhere(found: PortableImage, number: int) -> ChunkRef:
    """Return a place that a chunk could have: only its length is checked."""
    return ChunkRef("0" * 32, 0, 0, found.chunks[number].length)


def image_with(found: PortableImage, places: "dict[int, ChunkRef]") -> Manifest:
    """Return the store's manifest, given the place of each chunk of device memory."""
    blocks = tuple(
        msgspec.structs.replace(block, chunks=tuple(places[number] for number in numbers))
        for block, numbers in zip(found.image.blocks, found.blocks, strict=True)
    )
    return msgspec.structs.replace(found.image, blocks=blocks)


def _of_another_version(made: _Made) -> Unsupported:
    """Return the error for an image that another phosd can read."""
    by = f"phosd {made.phosd[:40]}" if made.phosd else "another phosd"
    return Unsupported(
        f"the image was made by {by} in format {made.format}; this is phosd {__version__}, which "
        f"reads format {FORMAT}",
        hint=f"import it with {by} or a newer one",
        reason=Reason.OTHER_FORMAT,
    )


def _no_image(what: str) -> ImageCorrupt:
    return ImageCorrupt(
        f"the manifest of what is to be imported {what}",
        hint="ask for another export; if that says the same, somebody has changed it",
    )
