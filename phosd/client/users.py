"""Name users."""

import functools
import os
import pwd


@functools.cache
def user_name(uid: int) -> str:
    """Return a user's name, or the id. May query the network, so keep it off an event loop that
    draws screens.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def of_yours() -> str:
    """Return " of yours" unless this is root, who sees what is everybody's."""
    return "" if os.geteuid() == 0 else " of yours"
