"""``phos ps``: the GPU processes of this machine."""

import shlex
from collections.abc import Sequence
from typing import Any

import click

from phosd.bus import CallError
from phosd.cli.client import ask, call, objects, properties
from phosd.cli.settings import CommandError, Settings, command, human_bytes, of_bus

_BLOCK = ("id", "address", "size", "gpu", "flags")
_NOTHING = ("Busy", "Timeout", "Unsupported")
"""Errors that say why the hook in a process tells nothing now."""
_KERNEL = ("name", "module", "launches", "suspect")


@command()
@click.argument("pid", type=click.IntRange(min=1), required=False)
@click.option("--log", is_flag=True, help="Of PID: what phosd's hook in it has noted.")
def ps(settings: Settings, pid: int | None, log: bool) -> None:
    """List the processes that use a GPU, and how each can be saved; or tell all about PID: its
    device memory, and the kernels that the last checkpoint saw it launch.

    HOOK says it: hooked (by phosd, quickly), driver (by the CUDA driver alone, slowly), or
    unsupported, with the reason. EVERY: its periodic checkpoints, and how many images of them are
    kept. STATE is running, suspended (`phos resume` brings it back), or what a job or another tool
    does with the process.

    \b
    Examples:
      phos ps
      phos ps --json | jq 'select(.hook == "hooked").pid'
      phos ps 4711
      phos ps 4711 --log
    """
    if pid is not None:
        (path,) = call(settings, "GetProcess", "u", pid)
        _show_log(settings, pid, path) if log else _show(settings, path)
        return
    if log:
        raise CommandError("InvalidOption", "--log is of one process: give its PID with it")
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


def _show_log(settings: Settings, pid: int, path: str) -> None:
    text = ask(settings, path, "Process1", "ReadLog")
    if settings.json:
        settings.emit({"pid": pid, "log": text})
    else:
        settings.out.print(text, markup=False, end="")


def _show(settings: Settings, path: str) -> None:
    """One process, a line for each thing that there is to say, and what its hook tells."""
    row = _row(properties(settings, path, "org.phos.Process1"))
    row["blocks"], no_blocks = _told(settings, path, "ListBlocks", _BLOCK)
    row["kernels"], no_kernels = _told(settings, path, "ListKernels", _KERNEL)
    if settings.json:
        settings.emit(row)
        return
    lines = {
        "process": f"{row['pid']} of uid {row['user']}: {shlex.join(row['command'])}",
        "hook": row["hook"] + (f": {row['reason']}" if row["reason"] else ""),
        "state": row["state"],
        "memory": human_bytes(row["device_bytes"]),
        "last image": row["last_image"],
        "every": _every(row),
        "blocks": no_blocks,
        "kernels": no_kernels,
    }
    for name, text in lines.items():
        if text:
            settings.out.print(f"{name:<14}{text}", markup=False)
    settings.rows(
        row["blocks"],
        {
            "BLOCK": lambda block: str(block["id"]),
            "ADDRESS": lambda block: f"{block['address']:#x}",
            "SIZE": lambda block: human_bytes(block["size"]),
            "GPU": lambda block: "host" if block["gpu"] < 0 else str(block["gpu"]),
            "IS": lambda block: ", ".join(block["flags"]),
        },
    )
    settings.rows(
        row["kernels"],
        {
            "LAUNCHES": lambda kernel: str(kernel["launches"]),
            "SUSPECT": lambda kernel: "suspect" if kernel["suspect"] else "",
            "KERNEL": lambda kernel: kernel["name"],
        },
    )


def _told(
    settings: Settings, path: str, member: str, fields: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:
    """Rows of a list of the process, or why there are none."""
    try:
        rows = ask(settings, path, "Process1", member)
    except CallError as error:
        if of_bus(error).code not in _NOTHING:
            raise
        return [], error.text
    return [dict(zip(fields, row, strict=True)) for row in rows], ""


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
