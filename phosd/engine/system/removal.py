"""Remove folders in which users may have made what they like."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from phosd.errors import Timeout

_SECONDS = 30.0
_TRIES = 3
"""A folder in which somebody has made a file meanwhile is not empty, and stays after the first."""


def remove_trees(folders: Sequence[Path]) -> None:
    """Remove folders with all that is in them. Something stays of one that cannot be removed.

    Not by ``shutil.rmtree``: users may make folders one below the other until a recursion would end
    this process, or more and more. Raises :class:`Timeout`.
    """
    left = list(folders)
    try:
        for _ in range(_TRIES):
            if not left:
                return
            words = ["rm", "-rf", "--one-file-system", "--", *map(str, left)]
            subprocess.run(words, check=False, stderr=subprocess.DEVNULL, timeout=_SECONDS)
            left = [folder for folder in left if os.path.lexists(folder)]
    except subprocess.TimeoutExpired as error:
        raise Timeout(
            f"what users have made in {folders[0]} could not be removed within {_SECONDS:.0f} s",
            hint="see who writes to it: `lsof +D`",
        ) from error
