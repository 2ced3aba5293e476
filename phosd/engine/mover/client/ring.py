"""Choose the size of a mover's pinned host memory."""

from phosd.engine.system import cuda

RING_BYTES = 512 << 20
"""Pinned memory of a mover on a real GPU; as much device memory is used for staging."""
SOFTWARE_RING_BYTES = 32 << 20


def ring_size(ring_bytes: int | None) -> int:
    """Return the bytes of a mover's ring: ``ring_bytes``, or the default for None."""
    if ring_bytes is not None:
        return ring_bytes
    return SOFTWARE_RING_BYTES if cuda.is_software() else RING_BYTES
