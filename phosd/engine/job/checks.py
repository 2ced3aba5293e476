"""Run the checks that stand before an operation: until the first that fails, or all of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phosd.errors import PhosError

Check = tuple[str, Callable[[], object]]
"""What is checked, in a few words, and the check: it raises :class:`PhosError`, or may return a
text for whoever asks what was found.
"""


@dataclass(frozen=True)
class Finding:
    """What came of a check: the ``trouble`` that stands in the way, or what was ``found``."""

    what: str
    trouble: PhosError | None = None
    found: str = ""

    @property
    def text(self) -> str:
        return str(self.trouble) if self.trouble is not None else self.found


def require_all(checks: Iterable[Check]) -> None:
    """Run checks until one fails; raise its error."""
    for _, check in checks:
        check()


def findings(checks: Iterable[Check]) -> list[Finding]:
    """Run all checks, whatever they find."""
    return [_finding(what, check) for what, check in checks]


def _finding(what: str, check: Callable[[], object]) -> Finding:
    try:
        found = check()
    except PhosError as error:
        return Finding(what, error)
    return Finding(what, found=found if isinstance(found, str) else "")
