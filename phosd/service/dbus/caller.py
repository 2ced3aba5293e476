"""Identify the caller of a method."""

from dataclasses import dataclass

from phosd.engine.system.procfs import ProcessId


@dataclass(frozen=True)
class Caller:
    """The caller of a method: ``uid`` is what the bus vouches for, ``name`` the client's
    connection.

    ``interactive``: the call allows polkit to ask the user for a password. ``process``: the caller
    that did not come over the bus, as the kernel vouches for it.
    """

    uid: int
    name: str = ""
    interactive: bool = False
    process: ProcessId | None = None

    def may_touch(self, owner: int) -> bool:
        """Whether the caller is the owner or root."""
        return self.uid in (0, owner)
