"""Releases of the driver whose checkpoint is known to end programs."""

from dataclasses import dataclass

from phosd.engine.node import gpus
from phosd.errors import Reason, Unsupported


@dataclass(frozen=True)
class DriverDefect:
    """What is wrong with a ``release``, and with those that begin with it and a dot; ``source`` is
    where that is reported.
    """

    release: str
    what: str
    source: str

    def concerns(self, release: str) -> bool:
        return f"{release}.".startswith(f"{self.release}.")


KNOWN = (
    DriverDefect(
        "610.57",
        "its lock (cuCheckpointProcessLock) may end a program that has several threads with a "
        "segmentation fault",
        "https://github.com/NVIDIA/cuda-checkpoint/issues/58",
    ),
)
SETTING = "allow_unsafe_driver"
"""The setting of phosd that has such a driver used all the same."""


def defect_of(release: str) -> DriverDefect | None:
    """Return what is known to be wrong with a release; none has an empty name."""
    return next((each for each in KNOWN if each.concerns(release)), None)


def require_safe() -> None:
    """Raise :class:`Unsupported` if the driver of this node may end a program that it saves."""
    release = gpus.driver_release()
    if (defect := defect_of(release)) is not None:
        raise Unsupported(
            f"the program is not touched with driver {release}: {defect.what} ({defect.source})",
            hint=f"install another release of the driver; `{SETTING} = true` in phosd.toml has this"
            " one used all the same",
            reason=Reason.UNSAFE_DRIVER,
        )
