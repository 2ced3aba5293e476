"""Connect the daemon and its clients to D-Bus."""

from phosd.bus.connection import (
    ERROR_PREFIX,
    NAME,
    Answer,
    CallError,
    Connection,
    Server,
)
from phosd.bus.dbus import MAX_ARGUMENTS, Call, NoBusError, Signal, Variant, complete_types, plain
from phosd.bus.values import ROOT, clean, is_path, key_of, path_of, variants

__all__ = [
    "ERROR_PREFIX",
    "MAX_ARGUMENTS",
    "NAME",
    "ROOT",
    "Answer",
    "Call",
    "CallError",
    "Connection",
    "NoBusError",
    "Server",
    "Signal",
    "Variant",
    "clean",
    "complete_types",
    "is_path",
    "key_of",
    "path_of",
    "plain",
    "variants",
]
