"""Encode what is known of a module's kernels for the hook, which evaluates it at launches.

``phosd/hook/protocol/summaries.h`` is the other side, with the same names for all layouts. A table
is little-endian: a header, a row for each kernel in the order of its name's hash and its name, the
*body* of each (``table_body``), and the names.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.idempotency import Idempotent, of_kernel
from phosd.engine.analysis.summary import ANY, Summary
from phosd.engine.analysis.table_body import encode_body, encode_roles
from phosd.engine.analysis.values.terms import TooLarge
from phosd.errors import Unsupported

MAGIC = 0x4D55535F534F4850
"""``PHOS_SUM``."""
VERSION = 1
MAX_KERNELS = 1 << 16
MAX_BYTES = 64 << 20
MAX_NAME = 4096

HEADER = struct.Struct("<QIIQQII")
"""magic, version, architecture, module, size, kernel_count, reserved"""
KERNEL = struct.Struct("<QIIIIII")
"""name_hash, name_at, name_size, flags, parameter_bytes, body_at, body_size"""

READS_KNOWN, WRITES_KNOWN, RANGES_READ, RANGES_WRITTEN, ACCESSES = 1, 2, 4, 8, 16
"""What of a kernel is known: where the addresses come from that it reads through, or writes
through; that launches tell all ranges; and that its accesses are listed.
"""
PRINTS, OVERWRITES_NOTHING = 32, 64
"""That none of its launches may be run again, and that all may."""


@dataclass(frozen=True)
class _Row:
    name: bytes
    name_hash: int
    flags: int
    parameter_bytes: int
    body: bytes


def encode(module: int, architecture: int, summaries: Iterable[Summary]) -> bytes:
    """Return the table of a module for an architecture. ``module`` is the hash that the hook gives
    its image (``hook_client.code_images.hash_of``), ``architecture`` a number such as 90.

    A name that several kernels have is not in it. Raises :class:`Unsupported` for a module without
    kernels, and for one with too many.
    """
    if not 0 < module < 1 << 64:
        raise _refused(f"{module:#x} is no module's hash")
    if not 0 < architecture < 1 << 16:
        raise _refused(f"sm_{architecture} is no architecture")
    known: dict[str, Summary | None] = {}
    for summary in summaries:
        name = summary.kernel.name
        known[name] = None if name in known else summary
        if len(known) > MAX_KERNELS:
            raise _refused(f"the module has more than {MAX_KERNELS} kernels")
    rows = [row for name, one in known.items() if one is not None and (row := _row(name, one))]
    if not rows:
        raise _refused("the module has no kernels")
    return _laid_out(module, architecture, rows)


def _refused(what: str) -> Unsupported:
    return Unsupported(
        f"no table can be made: {what}",
        hint="its kernels count as writing through each of their pointers, as without a table",
        reason="no-table",
    )


def name_hash(name: bytes) -> int:
    """Return the 64-bit FNV-1a hash of a kernel's name."""
    found = 0xCBF29CE484222325
    for byte in name:
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return found


def _row(name: str, summary: Summary) -> _Row | None:
    encoded = name.encode(errors="surrogateescape")
    if not 0 < len(encoded) <= MAX_NAME:
        return None
    flags = 0
    if summary.followed is not None:
        for use, known, ranges in (
            (Use.READ, READS_KNOWN, RANGES_READ),
            (Use.WRITTEN, WRITES_KNOWN, RANGES_WRITTEN),
        ):
            flags |= known * (not summary.unknown(use)) | ranges * summary.computed(use)
        flags |= PRINTS * summary.followed.prints
        flags |= OVERWRITES_NOTHING * (of_kernel(summary).idempotent is Idempotent.ALWAYS)
    body, listed = _body(summary)
    flags |= listed
    return _Row(encoded, name_hash(encoded), flags, summary.kernel.size, body)


def _body(summary: Summary) -> tuple[bytes, int]:
    """Return the body of a kernel, and whether it has the accesses."""
    try:
        if summary.followed is not None:
            return encode_body(summary.followed, summary.accesses, summary.roles), ACCESSES
    except TooLarge:
        pass  # the roles are known nevertheless
    try:
        return encode_roles(summary.accesses, summary.roles), 0
    except TooLarge:
        return encode_roles((), {ANY: Use.BOTH}), 0


def _laid_out(module: int, architecture: int, rows: list[_Row]) -> bytes:
    rows.sort(key=lambda row: (row.name_hash, row.name))
    bodies_at = HEADER.size + KERNEL.size * len(rows)
    bodies = b"".join(row.body for row in rows)
    names_at = bodies_at + len(bodies)
    size = names_at + sum(len(row.name) for row in rows)
    if size > MAX_BYTES:
        raise _refused(f"it would have {size} bytes")
    table = [HEADER.pack(MAGIC, VERSION, architecture, module, size, len(rows), 0)]
    name_at, body_at = names_at, bodies_at
    for row in rows:
        table.append(
            KERNEL.pack(
                *(row.name_hash, name_at, len(row.name), row.flags, row.parameter_bytes),
                *(body_at, len(row.body)),
            )
        )
        name_at += len(row.name)
        body_at += len(row.body)
    return b"".join([*table, bodies, *(row.name for row in rows)])


def merged(module: int, architecture: int, tables: Iterable[bytes]) -> bytes:
    """Return the table that has the kernels of all these tables of a module. Raises
    :class:`Unsupported` for what is no table of it, and for none.
    """
    rows: dict[bytes, _Row] = {}
    for table in tables:
        for row in _rows(table, module, architecture):
            rows[row.name] = row
    if not rows or len(rows) > MAX_KERNELS:
        raise _refused(f"it would have {len(rows)} kernels")
    return _laid_out(module, architecture, list(rows.values()))


def _rows(table: bytes, module: int, architecture: int) -> list[_Row]:
    try:
        magic, version, of, which, size, count, _ = HEADER.unpack_from(table)
    except struct.error as error:
        raise _refused(f"{len(table)} bytes are no table") from error
    if (magic, version, of, which, size) != (MAGIC, VERSION, architecture, module, len(table)):
        raise _refused("what is to be in it is no table of this module")
    bodies_at = HEADER.size + KERNEL.size * count
    if bodies_at > size:
        raise _refused(f"{size} bytes are no table of {count} kernels")
    rows = []
    for fields in KERNEL.iter_unpack(table[HEADER.size : bodies_at]):
        hashed, name_at, name_size, flags, parameter_bytes, body_at, body_size = fields
        name = table[name_at : name_at + name_size]
        body = table[body_at : body_at + body_size]
        whole = bodies_at <= min(name_at, body_at) and len(name) == name_size
        whole = whole and len(body) == body_size and 0 < name_size <= MAX_NAME
        if not whole or hashed != name_hash(name):
            raise _refused("a kernel of what is to be in it has no place there")
        rows.append(_Row(name, hashed, flags, parameter_bytes, body))
    return rows
