"""``phos images``: what can be restored."""

import shlex
from typing import Any

from phosd.cli.client import objects
from phosd.cli.settings import Settings, command, human_bytes
from phosd.cli.times import time_text


@command()
def images(settings: Settings) -> None:
    """List the images, oldest first. SHARED is what of STORED an older image holds, too.

    \b
    Examples:
      phos images
      phos restore "$(phos images --json | jq -r .id | tail -1)"
    """
    rows = [_row(image) for image in objects(settings, "Image1", "ListImages")]
    settings.rows(
        sorted(rows, key=lambda row: str(row["id"])),
        {
            "IMAGE": lambda row: row["id"],
            "CREATED": lambda row: row["created"],
            "OWNER": lambda row: str(row["owner"]),
            "PID": lambda row: str(row["pid"]),
            "SIZE": lambda row: human_bytes(row["total_bytes"]),
            "STORED": lambda row: human_bytes(row["stored_bytes"]),
            "SHARED": lambda row: human_bytes(row["shared_bytes"]) if row["shared_bytes"] else "",
            "MODE": lambda row: row["mode"],
            "VERIFIED": _verified,
            "COMMAND": lambda row: shlex.join(row["command"]),
        },
    )


def _verified(row: dict[str, Any]) -> str:
    if row["verified"] is None:
        return "never"
    return "whole" if row["whole"] else "DAMAGED"


def _row(image: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": image["Id"],
        "created": time_text(image["Created"]),
        "owner": image["Owner"],
        "pid": image["Pid"],
        "total_bytes": image["TotalBytes"],
        "device_bytes": image["DeviceBytes"],
        "stored_bytes": image["StoredBytes"],
        "shared_bytes": image["SharedBytes"],
        "mode": image["Mode"],
        "why": image.get("Why", ""),
        "wrong_guesses": image["WrongGuesses"],
        "parent": image["Parent"] or None,
        "gpus": [{"uuid": uuid, "chip": chip} for uuid, chip in image["GPUs"]],
        "stop_seconds": image["StopSeconds"],
        "verified": time_text(image["Verified"]) if image["Verified"] else None,
        "whole": image["VerifiedWhole"] if image["Verified"] else None,
        "command": image.get("CommandLine", []),
    }
