"""Translate errors into messages and exit codes of the clients."""

import enum
from typing import TYPE_CHECKING

from phosd.errors import PhosError

# Imported by every command that shows errors, also by those that never use the bus.
if TYPE_CHECKING:
    from phosd.bus import CallError


class Exit(enum.IntEnum):
    """Exit codes of a command. ``BUSY``: it may work at another time; ``UNSUPPORTED``: it will not,
    as long as the program, the image or the machine are as they are.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_AUTHORIZED = 3
    NO_SUCH_THING = 4
    BUSY = 5
    UNSUPPORTED = 6


_EXITS = {
    "InvalidOption": Exit.USAGE,
    "NotAuthorized": Exit.NOT_AUTHORIZED,
    "NoSuchProcess": Exit.NO_SUCH_THING,
    "NoSuchImage": Exit.NO_SUCH_THING,
    "NoSuchJob": Exit.NO_SUCH_THING,
    "UnknownObject": Exit.NO_SUCH_THING,
    "Busy": Exit.BUSY,
    "Timeout": Exit.BUSY,
    "OutOfMemory": Exit.BUSY,
    "OutOfSpace": Exit.BUSY,
    "Unsupported": Exit.UNSUPPORTED,
    "DriverTooOld": Exit.UNSUPPORTED,
    "GpuMismatch": Exit.UNSUPPORTED,
}

_NOT_STARTED = (
    "org.freedesktop.DBus.Error.Spawn.",
    "org.freedesktop.DBus.Error.TimedOut",
    "org.freedesktop.systemd1.",
)
"""Prefixes of errors from a failed activation of phosd, by the bus or by systemd."""


_START = {"system": "`systemctl start phosd`, or `phosd &` as root"}
_START_ELSEWHERE = "`phosd --session &` as root, with this bus in DBUS_SESSION_BUS_ADDRESS"


class CommandError(Exception):
    """A failed command. ``code`` is the D-Bus error name without the prefix."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def exit(self) -> Exit:
        return _EXITS.get(self.code, Exit.FAILED)


def in_words(caught: Exception, bus: str = "system") -> CommandError:
    """Translate an exception, met on ``bus``, into a :class:`CommandError`. An unknown one is
    raised again.
    """
    from phosd.bus import CallError, NoBusError

    match caught:
        case CommandError():
            return caught
        case PhosError():
            return CommandError(caught.code, str(caught))
        case NoBusError():
            return CommandError("NoBus", f"{caught}; {caught.hint}")
        case CallError():
            return of_bus(caught, bus)
        case _:
            raise caught


def of_bus(error: "CallError", bus: str = "system") -> CommandError:
    """Translate an error of ``bus`` into a :class:`CommandError`."""
    from phosd.bus import ERROR_PREFIX

    if error.name.startswith(ERROR_PREFIX):
        return CommandError(error.name.removeprefix(ERROR_PREFIX), error.text)
    if error.name.endswith((".ServiceUnknown", ".NameHasNoOwner")):
        return CommandError(
            "NoDaemon",
            f"phosd does not run on this bus; start it ({_START.get(bus, _START_ELSEWHERE)}), or "
            "name the bus that it is on with --bus or PHOS_BUS",
        )
    if error.name.startswith(_NOT_STARTED):
        return CommandError(
            "NoDaemon",
            f"phosd did not start when it was called: {error.text}; `journalctl -u phosd` tells "
            "why",
        )
    if error.name.endswith(".UnknownObject"):
        return CommandError("UnknownObject", f"{error.text}; it has ended or was deleted meanwhile")
    if error.name.endswith(".AccessDenied"):
        return CommandError("NotAuthorized", error.text)
    return CommandError(error.name.rpartition(".")[2], error.text)
