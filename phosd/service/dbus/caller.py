"""Who calls."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """Who calls: ``uid`` is what the bus vouches for, ``name`` the client's connection.

    ``interactive``: the call says that its user would type a password.
    """

    uid: int
    name: str = ""
    interactive: bool = False

    def may_touch(self, owner: int) -> bool:
        """The owner may, and root."""
        return self.uid in (0, owner)
