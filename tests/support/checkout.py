"""Ask git about the checkout that the tests are in."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(*words: str) -> list[str]:
    """Return the lines that a command of git's prints; none if it fails, as in an unpacked archive,
    or if there is no git.
    """
    command = ["git", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    return done.stdout.splitlines()
