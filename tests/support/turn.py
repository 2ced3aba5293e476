"""Say whether this run plays a step: ``python -m tests.support.turn NAME OF PATH...``.

The exit code is 0 if one of the last commits has changed something that a PATH (as git reads it)
names, or if it is the turn of this commit, as of one in OF; ``make test-all`` plays every step.
Else it is 1.
"""

import sys
from collections.abc import Sequence

from tests.support.checkout import git
from tests.support.rotation import EVERYTHING, plays

RECENT = 20
"""So many commits are played together, as when several are submitted at once."""


def is_played(name: str, of: int, paths: Sequence[str]) -> bool:
    """Return whether this run plays the step of this name."""
    if EVERYTHING or plays(name, "", of):
        return True
    commits = git("rev-list", f"--max-count={RECENT + 1}", "HEAD")
    if len(commits) < 2:  # what has changed cannot be told
        return True
    return bool(git("diff", "--name-only", commits[-1], "--", *paths))


def main() -> None:
    name, of, *paths = sys.argv[1:]
    if is_played(name, int(of), paths):
        return
    print(f"{name}: no recent commit changes what it tests, so another commit plays it")
    sys.exit(1)


if __name__ == "__main__":
    main()
