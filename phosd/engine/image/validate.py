"""Validate a decoded manifest: root reads it, so nothing in it is taken on trust."""

import re
from collections.abc import Callable

from phosd.engine.image.manifest import CHUNK, FORMAT, Block, Manifest
from phosd.engine.image.name import valid_name
from phosd.engine.image.packs import CAPACITY, PAGE, record_size
from phosd.errors import ImageCorrupt

ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"(?!\.\.?(/|$))[A-Za-z0-9._+@:-]{1,200}")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LAST_ID = 1 << 22
"""Linux gives no process or thread a higher id (``PID_MAX_LIMIT``)."""
MAX_BLOCK = 1 << 44
MAX_DEPTH = 8


def valid_id(text: str) -> bool:
    """Return whether ``text`` has the form of an image id; only then is it joined to a path."""
    return ID.fullmatch(text) is not None


def valid_relative(path: str) -> bool:
    """Return whether ``path`` is harmless and stays below the folder it is joined to."""
    parts = path.split("/")
    return len(parts) <= MAX_DEPTH and all(_PART.fullmatch(part) for part in parts)


def check_manifest(manifest: Manifest, image_id: str) -> None:
    """Raise :class:`ImageCorrupt` unless the manifest is consistent and is that of ``image_id``.

    Checks ids, indices, sizes (bytes) and sums, alignment, digests and relative paths.
    """

    def demand(condition: bool, what: str) -> None:
        if not condition:
            raise ImageCorrupt(
                f"the manifest of image {image_id} {what}",
                hint="the image cannot be restored; delete it",
            )

    demand(manifest.format == FORMAT, f"has format {manifest.format}, this phosd reads {FORMAT}")
    demand(manifest.id == image_id, f"says it is {manifest.id!r}")
    demand(manifest.parent is None or valid_id(manifest.parent), "names no parent by its id")
    demand(not manifest.origin or valid_id(manifest.origin), "names no origin by its id")
    demand(0 <= manifest.owner < 1 << 32, "has no valid owner")
    demand(not manifest.name or valid_name(manifest.name), "has a name that no program can have")
    demand(0 <= manifest.number < 1 << 32, "has a number that no image can have")
    for tree in manifest.trees:
        demand(valid_relative(tree.folder), f"names the folder {tree.folder!r}")
        for file in tree.files:
            demand(valid_relative(file.path), f"names the file {file.path!r}")
            demand(file.size >= 0, f"gives {file.path} a negative size")
            demand(_SHA256.fullmatch(file.sha256) is not None, f"has no digest of {file.path}")
    for process in manifest.processes:
        for number in (process.pid, *process.threads):
            demand(0 < number <= _LAST_ID, f"has the process id {number}")
        demand(0 <= process.outer_pid <= _LAST_ID, f"has the process id {process.outer_pid}")
        demand(0 <= process.tree < len(manifest.trees), f"puts process {process.pid} in no tree")
        demand(process.uid >= 0 and process.gid >= 0, f"gives process {process.pid} no user")
    ordinals = {gpu.ordinal for gpu in manifest.gpus}
    demand(len(ordinals) == len(manifest.gpus), "has two GPUs of one number")
    for gpus in (manifest.gpus, manifest.host.gpus):
        uuids = {gpu.uuid for gpu in gpus}
        demand(len(uuids) == len(gpus), "has two GPUs of one UUID")
        demand(all(map(_UUID.fullmatch, uuids)), "has a GPU without a UUID")
    for gpu in manifest.gpus:
        demand(0 <= gpu.needs < 1 << 63, f"needs {gpu.needs} bytes on GPU {gpu.ordinal}")
    blocks = {(block.process, block.id): block for block in manifest.blocks}
    demand(len(blocks) == len(manifest.blocks), "has two blocks of one id")
    for block in manifest.blocks:
        name = f"block {block.va:#x}"
        demand(0 <= block.process < len(manifest.processes), f"puts {name} in no process")
        demand(block.gpu in ordinals, f"puts {name} on an unknown GPU")
        demand(0 <= block.va < 1 << 64, f"gives {name} no address")
        demand(0 <= block.id < 1 << 64, f"gives {name} no id")
        demand(
            0 < block.size <= MAX_BLOCK and block.size % PAGE == 0,
            f"gives {name} {block.size} bytes",
        )
        if block.alias is None:
            _check_chunks(block, name, demand)
        else:
            holder = blocks.get(block.alias)
            demand(
                holder is not None and holder.alias is None and holder.size == block.size,
                f"shares {name} with a block that is not there",
            )
            demand(not block.chunks, f"stores {name} twice")


def _check_chunks(block: Block, name: str, demand: Callable[[bool, str], None]) -> None:
    demand(len(block.chunks) == -(-block.size // CHUNK), f"has not all chunks of {name}")
    left = block.size
    for chunk in block.chunks:  # tens of thousands: what is wrong with one is put in words if it is
        if chunk.length != min(CHUNK, left):
            wrong = f"has a chunk of {chunk.length} bytes in {name}"
        elif not _DIGEST.fullmatch(chunk.digest):
            wrong = f"has a chunk of {name} undigested"
        elif chunk.pack < 0:
            wrong = f"has a chunk of {name} in no pack"
        elif (
            chunk.offset < 0
            or chunk.offset % PAGE
            or chunk.offset + record_size(chunk.length) > CAPACITY
        ):
            wrong = f"has a chunk of {name} at {chunk.offset} of its pack"
        else:
            left -= chunk.length
            continue
        demand(False, wrong)
