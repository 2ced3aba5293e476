"""``phos ps``: the GPU processes of this machine."""

import shlex
from typing import Any

from phosd.cli.client import objects
from phosd.cli.settings import Settings, command, human_bytes


@command()
def ps(settings: Settings) -> None:
    """List the processes that use a GPU, and how each can be saved.

    HOOK says it: hooked (by phosd, quickly), driver (by the CUDA driver alone, slowly), or
    unsupported, with the reason. EVERY: its periodic checkpoints, and how many images of them are
    kept.

    \b
    Examples:
      phos ps
      phos ps --json | jq 'select(.hook == "hooked").pid'
    """
    rows = [_row(process) for process in objects(settings, "Process1", "ListProcesses")]
    settings.rows(
        sorted(rows, key=lambda row: int(row["pid"])),
        {
            "PID": lambda row: str(row["pid"]),
            "USER": lambda row: str(row["user"]),
            "MEMORY": lambda row: human_bytes(row["device_bytes"]),
            "HOOK": lambda row: row["hook"],
            "STATE": lambda row: row["state"],
            "LAST IMAGE": lambda row: row["last_image"],
            "EVERY": _every,
            "COMMAND": lambda row: shlex.join(row["command"]) + _because(row),
        },
    )


def _every(row: dict[str, Any]) -> str:
    if row["checkpoint_interval"] is None:
        return ""
    return f"{row['checkpoint_interval']:g} s, last {row['checkpoints_kept']}"


def _because(row: dict[str, Any]) -> str:
    return f"\n  ({row['reason']})" if row["reason"] else ""


def _row(process: dict[str, Any]) -> dict[str, Any]:
    """What phosd does not let us see (others' command lines) is empty."""
    return {
        "pid": process["Pid"],
        "start_time": process["StartTime"],
        "user": process["User"],
        "gpus": process["GPUs"],
        "device_bytes": process["DeviceBytes"],
        "hook": process["HookState"],
        "state": process["State"],
        "last_image": process["LastImage"],
        "checkpoint_interval": process["CheckpointInterval"] or None,
        "checkpoints_kept": process["CheckpointsKept"] or None,
        "command": process.get("CommandLine", []),
        "reason": process.get("Reason", ""),
    }
