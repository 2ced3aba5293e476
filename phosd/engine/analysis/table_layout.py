"""Lay out the body of a kernel in a table: the parts, and the numbers of their kinds.

``phosd/hook/protocol`` has the same; a test compares them.
"""

import struct
from collections.abc import Sequence

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.values.terms import TooLarge

MAX_INPUTS, MAX_NODES, MAX_ACCESSES, MAX_REFS = 256, 4096, 256, 1 << 16
NONE = 0xFFFFFFFF

BODY = struct.Struct("<12I")
"""How many there are of each part, in this order, and how many inputs are compared."""
ROLE = struct.Struct("<II")
INPUT = struct.Struct("<II")
NODE = struct.Struct("<BBHIIIqq")
FACTOR = struct.Struct("<qII")
CONDITION = struct.Struct("<BBHIIIII")
KEY = struct.Struct("<IIII")
LOOP = struct.Struct("<II")
ACCESS = struct.Struct("<IIBBH10I")

NODE_KINDS = (
    *("Sum", "Parameter", "Pointer", "Dimension", "Thread", "Product", "Word", "Quotient"),
    *("Common", "Choice", "Elsewhere", "Least", "Greatest", "Carried", "Anything"),
)
KIND = {name: number for number, name in enumerate(NODE_KINDS)}
HOWS = ("NEVER", "ALWAYS", "LT", "LE", "GT", "GE", "EQ", "NE")
KEY_KINDS = ("undecided", "if", "meet")
USES = {Use.READ: 5, Use.WRITTEN: 2, Use.BOTH: 7}
READ_FIRST = 4
"""Among the uses: what is read may have been there before the launch."""
UNKNOWN_ORIGIN, FROM_ANY_WORD = 1, 2


def packed(parts: Sequence[Sequence[bytes]], *, compared: int) -> bytes:
    """Return the body with these parts, in the order of :data:`BODY`. ``compared``: how many inputs
    are. Raises :class:`TooLarge`.
    """
    _, inputs, nodes, factors, conditions, keys, _, _, refs = counts = [len(part) for part in parts]
    if (
        inputs > MAX_INPUTS
        or max(nodes, conditions, keys) > MAX_NODES
        or max(factors, refs) > MAX_REFS
    ):
        raise TooLarge
    body = BODY.pack(*counts, compared, 0, 0) + b"".join(b"".join(part) for part in parts)
    return body + bytes(-len(body) % 8)
