"""What went wrong, in the words of the clients; and what exit status says so."""

import enum
from typing import TYPE_CHECKING

from phosd.errors import PhosError

# Whoever shows an error imports this, also commands that never talk to the bus.
if TYPE_CHECKING:
    from phosd.bus import CallError


class Exit(enum.IntEnum):
    """What a command's exit status says."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_AUTHORIZED = 3
    NO_SUCH_THING = 4


_EXITS = {
    "InvalidOption": Exit.USAGE,
    "NotAuthorized": Exit.NOT_AUTHORIZED,
    "NoSuchProcess": Exit.NO_SUCH_THING,
    "NoSuchImage": Exit.NO_SUCH_THING,
    "NoSuchJob": Exit.NO_SUCH_THING,
    "UnknownObject": Exit.NO_SUCH_THING,
}

_NOT_STARTED = (
    "org.freedesktop.DBus.Error.Spawn.",
    "org.freedesktop.DBus.Error.TimedOut",
    "org.freedesktop.systemd1.",
)
"""Errors of a bus that was to start phosd, by itself or by systemd."""


class CommandError(Exception):
    """A command failed. ``code`` is the error's name as on the bus, without the prefix."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def exit(self) -> Exit:
        return _EXITS.get(self.code, Exit.FAILED)


def in_words(caught: Exception) -> CommandError:
    """What failed, in the words of the command line; raises again what it has no words for."""
    from phosd.bus import CallError, NoBusError

    match caught:
        case CommandError():
            return caught
        case PhosError():
            return CommandError(caught.code, str(caught))
        case NoBusError():
            return CommandError("NoBus", f"{caught}; {caught.hint}")
        case CallError():
            return of_bus(caught)
        case _:
            raise caught


def of_bus(error: "CallError") -> CommandError:
    """An error of the bus in the words of the command line."""
    from phosd.bus import ERROR_PREFIX

    if error.name.startswith(ERROR_PREFIX):
        return CommandError(error.name.removeprefix(ERROR_PREFIX), error.text)
    if error.name.endswith((".ServiceUnknown", ".NameHasNoOwner")):
        return CommandError(
            "NoDaemon",
            "phosd does not run on this bus; start it (`systemctl start phosd`, or `phosd &` as "
            "root), or name the bus that it is on with --bus or PHOS_BUS",
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
