"""What a job measures beside its phases."""

import msgspec


class Figures(msgspec.Struct, omit_defaults=True):
    """Measure one job; None is what its mode does not measure. Units are in the names.

    Threads of the program have ``looked`` at what they submitted, and ``waited`` for chunks.

    A mode that was given up after a wrong guess leaves its figures beside those of the next.
    """

    released_bytes: int | None = None
    """Cached device memory that PyTorch gave back."""

    snapshot_bytes: int | None = None
    snapshot_seconds: float | None = None

    drain_seconds: float | None = None
    drain_bytes: int | None = None

    shadowed_chunks: int | None = None
    needless_shadows: int | None = None
    """Shadows of chunks that were not overwritten after all; only with ``audit``."""
    submissions: int | None = None
    looked_seconds: float | None = None
    look_median_seconds: float | None = None
    waits: int | None = None
    waited_seconds: float | None = None
    wrong_chunks: int | None = None

    passes: int | None = None
    bytes_left: int | None = None
    """What the last pass of a pre-copy left to the stop."""

    stored_bytes: int | None = None
    """What a suspended program has in its store."""

    def measured(self) -> dict[str, int | float]:
        """Return the figures that there are, by name."""
        return dict(msgspec.to_builtins(self))
