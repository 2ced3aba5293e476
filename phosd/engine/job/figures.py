"""Define what a job measures besides its phases."""

import msgspec


class Figures(msgspec.Struct, omit_defaults=True):
    """Measurements of one job; None if its mode does not measure it. Units are in the names.

    ``looked``: the program's threads predicted what their submissions write; ``waited``: they
    waited for chunks. After a wrong guess, the figures of the mode that was given up stay beside
    those of the next.
    """

    released_bytes: int | None = None
    """Cached device memory that PyTorch freed."""

    snapshot_bytes: int | None = None
    snapshot_seconds: float | None = None

    drain_seconds: float | None = None
    drain_bytes: int | None = None

    shadowed_chunks: int | None = None
    needless_shadows: int | None = None
    """Shadows of chunks that the program did not overwrite after all; only with ``audit``."""
    submissions: int | None = None
    looked_seconds: float | None = None
    look_median_seconds: float | None = None
    look_p99_seconds: float | None = None
    look_p999_seconds: float | None = None
    look_worst_seconds: float | None = None
    waits: int | None = None
    waited_seconds: float | None = None
    wrong_chunks: int | None = None

    passes: int | None = None
    bytes_left: int | None = None
    """Bytes that the last pass of a pre-copy left to copy inside the stop."""

    stored_bytes: int | None = None
    """Bytes that a suspended program takes in its store."""

    def measured(self) -> dict[str, int | float]:
        """Return the figures that were measured, by name."""
        return dict(msgspec.to_builtins(self))
