"""Translate errors into messages and exit codes of the clients."""

import enum
from typing import TYPE_CHECKING

from phosd.errors import NoBus, NoDaemon, NotAuthorized, OtherError, PhosError, named

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
_START_ELSEWHERE = (
    "`phosd --session 2>phosd.log &` as root, with this bus in DBUS_SESSION_BUS_ADDRESS"
)


class CommandError(Exception):
    """A failed command. ``code`` is the D-Bus error name without the prefix, ``reason`` a code for
    what stood in the way, if there is one.
    """

    def __init__(self, code: str, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason

    @property
    def row(self) -> dict[str, str | None]:
        """The error in JSON output."""
        return {"error": self.code, "reason": self.reason or None, "message": str(self)}

    @property
    def exit(self) -> Exit:
        return _EXITS.get(self.code, Exit.FAILED)


def in_words(caught: Exception, bus: str) -> CommandError:
    """Translate an exception, met on ``bus``, into a :class:`CommandError`. An unknown one is
    raised again.
    """
    if isinstance(caught, CommandError):
        return caught
    error = typed(caught, bus)
    return CommandError(error.code, str(error), error.reason)


def of_bus(error: "CallError", bus: str) -> CommandError:
    """Translate an error of ``bus`` into a :class:`CommandError`."""
    return in_words(error, bus)


def typed(caught: Exception, bus: str) -> PhosError:
    """Return the error that an exception, met on ``bus``, stands for. An unknown one is raised
    again.
    """
    from phosd.bus import CallError, NoBusError

    match caught:
        case PhosError():
            return caught
        case NoBusError():
            return NoBus(str(caught), hint=caught.hint)
        case CallError():
            return _of_call(caught, bus)
        case _:
            raise caught


def _of_call(error: "CallError", bus: str) -> PhosError:
    from phosd.bus import ERROR_PREFIX

    if error.name.startswith(ERROR_PREFIX):
        what, _, hint = error.text.partition("; ")  # as far as can be told from the text
        return named(error.name.removeprefix(ERROR_PREFIX), what, hint, reason=error.reason)
    if error.name.endswith((".ServiceUnknown", ".NameHasNoOwner", ".NoSuchUnit")):
        return NoDaemon(
            "phosd does not run on this bus",
            hint=f"start it ({_START.get(bus, _START_ELSEWHERE)}), or name the bus that it is on "
            "with --bus or PHOS_BUS",
        )
    if error.name.startswith(_NOT_STARTED):
        return NoDaemon(
            f"phosd did not start when it was called: {error.text}",
            hint="`journalctl -u phosd` tells why",
        )
    if error.name.endswith(".NoReply") and "disconnected" in error.text:
        return NoDaemon(
            "phosd ended before it answered, and may have begun what was asked",
            hint="`phos history` shows it; a call with a token may be repeated with that",
        )
    if error.name.endswith(".Disconnected"):
        return NoBus(error.text, hint="connect again: a client does not outlive its bus")
    if error.name.endswith(".UnknownObject"):
        return OtherError("UnknownObject", error.text, hint="it has ended or was deleted meanwhile")
    if error.name.endswith(".AccessDenied"):
        return NotAuthorized(error.text)
    return OtherError(error.name.rpartition(".")[2], error.text)


def told(name: str, message: str, hint: str, reason: str) -> PhosError:
    """Return the error of a job: ``message`` has the hint in it, and perhaps more behind it."""
    what, mark, more = message.partition(f"; {hint}") if hint else (message, "", "")
    return named(name, what, mark.removeprefix("; ") + more, reason=reason)
