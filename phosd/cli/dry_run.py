"""Show what would stand in the way of a checkpoint or a restore, property by property."""

import sys
from typing import Any

from phosd.cli.client import call
from phosd.cli.settings import Settings
from phosd.client.checks import Check
from phosd.client.errors import CommandError


def tell_checks(settings: Settings, member: str, /, *args: Any, **options: Any) -> None:
    """Call TryCheckpoint or TryRestore, and show its rows. Exits with the code of the first error,
    if there is one.
    """
    rows = call(settings, member, *args, **options)
    checks = [Check.of(*row) for row in rows]
    settings.rows(
        [
            {
                "check": check.what,
                "trouble": check.error or None,
                "reason": check.reason or None,
                "text": check.text,
            }
            for check in checks
        ],
        {
            "CHECK": lambda row: row["check"],
            "RESULT": lambda row: f"✗ {row['trouble']}" if row["trouble"] else "✓",
            "DETAILS": lambda row: row["text"],
        },
    )
    troubles = [CommandError(check.error, check.text) for check in checks if check.error]
    if troubles:
        sys.exit(troubles[0].exit)
