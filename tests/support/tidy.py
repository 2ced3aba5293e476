"""Let clang-tidy look at native sources: ``python -m tests.support.tidy JOBS``.

Each takes seconds, so ``make test`` gives it those that the last commit has changed, and a part of
the others, another one for each commit; ``make test-all`` gives it all of them. A header is
looked at with the sources that include it, so a changed header counts for nothing here.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.checkout import ROOT, git
from tests.support.rotation import EVERYTHING, part

BUILD = ROOT / "build" / "native"
OF = 16
"""A run looks at one in so many sources, besides those that have changed."""
_LOOKED_AT = ("phosd/hook/*.cpp", "phosd/engine/*.cpp")


def sources() -> list[str]:
    """Return the sources to look at, in order."""
    known = [each for each in git("ls-files", *_LOOKED_AT) if "/tests/" not in each]
    if EVERYTHING:
        return known
    changed = {*git("diff", "--name-only", "HEAD~1", "--", *_LOOKED_AT)}
    return sorted({*part("clang-tidy", known, OF), *(changed & {*known})})


def _found(source: str) -> str:
    """What clang-tidy has to say of a source; nothing is as it should be."""
    command = [str(Path(sys.executable).parent / "clang-tidy"), "-p", str(BUILD), "--quiet"]
    done = subprocess.run(
        [*command, "--warnings-as-errors=*", source], cwd=ROOT, capture_output=True, text=True
    )
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def main() -> None:
    wanted = sources()
    with ThreadPoolExecutor(int(sys.argv[1])) as pool:
        found = [text for text in pool.map(_found, wanted) if text]
    print(f"clang-tidy has looked at {len(wanted)} sources: {' '.join(wanted)}")
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
