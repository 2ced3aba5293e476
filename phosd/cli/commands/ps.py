"""Implement ``phos ps``: list and show GPU processes."""

import shlex
from collections.abc import Sequence
from typing import Any

import click

from phosd.bus import CallError
from phosd.cli import options
from phosd.cli.client import ask, call, if_missing, managed, no_process
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.client.daemon import Managed
from phosd.client.errors import CommandError, of_bus
from phosd.client.text import container_text, human_bytes, state_text
from phosd.client.users import user_name
from phosd.interface.methods import PROCESS
from phosd.units import duration_text

_BLOCK = ("id", "address", "size", "gpu", "flags")
_NOTHING = ("Busy", "Timeout", "Unsupported")
"""Errors that explain why a hook does not answer now."""
_MOST_BLOCKS, _MOST_KERNELS = 20_000, 4_000
"""Most rows that phosd returns."""
_KERNEL = ("name", "module", "launches", "suspect")


@command()
@click.argument("pid", type=options.PID, required=False)
@click.option("--log", is_flag=True, help="Show the log of phosd's hook in process PID.")
@click.option(
    "--kernels", "known", is_flag=True, help="Show what is known of what PID's kernels access."
)
def ps(settings: Settings, pid: int | None, log: bool, known: bool) -> None:
    """List the programs that use a GPU, or show one. The list says how each can be saved. With PID
    it tells all about one: its device memory, and the kernels that the last checkpoint saw it
    launch.

    GPU has the numbers of its GPUs (`phos gpus`). HOOK says how it can be saved: hooked (by
    phosd, quickly), driver (by the CUDA driver alone, slowly), or unsupported, with the reason.
    EVERY: its periodic checkpoints, and how many images of them are kept. STATE is running,
    suspended (`phos resume` brings it back), hollow (suspended, with its contexts on its GPUs),
    ready (hollow, with its memory there, too),
    asleep (hollow until somebody calls it), or what a job or another tool does with the process.
    POOL is shown where there is one, and so is CONTAINER: its runtime, pod and name; and so is
    SLURM JOB: the job and its step.

    --log prints what the hook has counted, and then noted, with the seconds at which it did. State
    is 0 while the program is let through; 1, 2 and 3 while its gate is closing, closed, and its
    memory parked. Threads are those inside a call that submits work, or held before one; admitted
    is how many were let in since the gate began to close.

    --kernels shows the kernels that a checkpoint has counted as `phos analyse PID` does, and waits
    for nothing.

    \b
    Examples:
      phos ps
      phos ps --json | jq 'select(.hook == "hooked").pid'
      phos ps 4711
      phos ps 4711 --log
      phos ps 4711 --kernels
    """
    if log and known:
        raise CommandError("InvalidOption", "--log and --kernels are two lists: give one of them")
    if pid is not None:
        path = call(settings, "GetProcess", pid)
        with if_missing("NoSuchProcess", f"process {pid} has ended; `phos ps` lists what runs"):
            if log:
                _show_log(settings, pid, path)
            elif known:
                _show_kernels(settings, pid, path)
            else:
                _show(settings, path)
        return
    if log or known:
        option = "--log" if log else "--kernels"
        raise CommandError("InvalidOption", f"{option} shows one process: name its PID, too")
    list_processes(settings)


def list_processes(settings: Settings, pool: str = "") -> None:
    """Show all processes, one per line; with ``pool`` those of its programs."""
    found = managed(settings, "ListProcesses")
    rows = [_row(process, found) for process in found.of(PROCESS)]
    if pool:
        rows = [row for row in rows if row["pool"] == pool]
    settings.rows(
        sorted(rows, key=lambda row: int(row["pid"])),
        {
            "PID": lambda row: str(row["pid"]),
            **({"NAME": lambda row: row["name"] or ""} if any(r["name"] for r in rows) else {}),
            **({"POOL": lambda row: row["pool"] or ""} if any(r["pool"] for r in rows) else {}),
            "USER": lambda row: row["user_name"],
            **({"CONTAINER": _container} if any(r["container"] for r in rows) else {}),
            **({"SLURM JOB": _slurm_step} if any(r["slurm_step"] for r in rows) else {}),
            "GPU": _gpus,
            "MEMORY": lambda row: human_bytes(row["device_bytes"]),
            "HOOK": lambda row: row["hook"],
            "STATE": _state,
            "LAST IMAGE": lambda row: row["last_image"],
            "EVERY": _every,
            "COMMAND": lambda row: (shlex.join(row["command"]), _because(row)),
        },
        spare=("EVERY", "USER", "LAST IMAGE", "MEMORY"),
        empty=f"the pool {pool} has no program yet" if pool else no_process(found),
    )


def _every(row: dict[str, Any]) -> str:
    if row["checkpoint_interval"] is None:
        return ""
    return f"{duration_text(row['checkpoint_interval'])}, last {row['checkpoints_kept']}"


def _gpus(row: dict[str, Any]) -> str:
    return ", ".join(str(gpu["ordinal"]) for gpu in row["gpus"])


def _state(row: dict[str, Any]) -> str:
    return state_text(row["state"], hollow=row["hollow"], ready=row["ready"], wakes=row["wakes"])


def _idle(row: dict[str, Any]) -> str:
    """Return when it falls asleep, and what wakes it."""
    if not row["wakes"]:
        return ""
    idle = f", asleep after {duration_text(row['idle'])} without work" if row["idle"] else ""
    return f"; woken when somebody calls it{idle}"


def _container(row: dict[str, Any]) -> str:
    return container_text(row["container"] or {})


def _slurm_step(row: dict[str, Any]) -> str:
    return row["slurm_step"] or ""


def _because(row: dict[str, Any]) -> str:
    """Return why a process is not hooked; what to do then is told by ``phos ps PID``."""
    return f"  ({row['reason'].partition('; ')[0]})" if row["reason"] else ""


def _show_log(settings: Settings, pid: int, path: str) -> None:
    text = ask(settings, path, PROCESS, "ReadLog")
    if settings.json:
        settings.emit({"pid": pid, "log": text})
    else:
        settings.say(text.removesuffix("\n"), lines=True)


def _show_kernels(settings: Settings, pid: int, path: str) -> None:
    from phosd.cli import kernels

    kernels.show(
        settings,
        kernels.launched(settings, path),
        empty=kernels.none_of(pid),
    )


def _show(settings: Settings, path: str) -> None:
    """Show one process: its facts, one per line, then its blocks and kernels."""
    found = managed(settings)
    row = _row(found.at(path, PROCESS), found)
    row["blocks"], no_blocks = _told(settings, path, "ListBlocks", _BLOCK, _MOST_BLOCKS)
    row["kernels"], no_kernels = [], ""
    if not no_blocks:  # a hook that does not answer would let us wait twice
        row["kernels"], no_kernels = _told(settings, path, "ListKernels", _KERNEL, _MOST_KERNELS)
    row["doors"], _ = _asked(settings, path, "ListDoors")
    row["all_blocks"] = len(row["blocks"]) < _MOST_BLOCKS
    row["all_kernels"] = len(row["kernels"]) < _MOST_KERNELS
    if settings.json:
        settings.emit(row)
        return
    settings.facts(
        {
            "process": f"{row['pid']} of {row['user_name']}: {shlex.join(row['command'])}",
            "gpu": _gpus(row),
            **({"container": _container(row)} if row["container"] else {}),
            **({"slurm job": _slurm_step(row)} if row["slurm_step"] else {}),
            "hook": row["hook"] + (f": {row['reason']}" if row["reason"] else ""),
            "state": _state(row) + _idle(row),
            **({"pool": row["pool"]} if row["pool"] else {}),
            "memory": human_bytes(row["device_bytes"]),
            "last image": row["last_image"],
            "every": _every(row),
            "output": ", ".join(row["output"]),
            **({"listens on": ", ".join(row["doors"])} if row["doors"] else {}),
            "blocks": no_blocks or _cut(row["all_blocks"], f"{_MOST_BLOCKS:,} of the lowest ids"),
            "kernels": no_kernels
            or _cut(row["all_kernels"], f"{_MOST_KERNELS:,}, suspects and those launched most"),
        }
    )
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


def _cut(whole: bool, shown: str) -> str:
    """Return a remark for a list that reached phosd's limit and so may be incomplete."""
    return "" if whole else f"only {shown}; there may be more"


def _told(
    settings: Settings, path: str, member: str, fields: Sequence[str], most: int
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a list of the process, or the reason why there are none."""
    rows, why = _asked(settings, path, member, limit=most)
    return [dict(zip(fields, row, strict=True)) for row in rows], why


def _asked(settings: Settings, path: str, member: str, **options: int) -> tuple[list[Any], str]:
    """Return a list of the process, or the reason why there is none."""
    try:
        return [*ask(settings, path, PROCESS, member, **options)], ""
    except CallError as error:
        if of_bus(error, settings.bus).code not in _NOTHING:
            raise
        return [], error.text


def _row(process: dict[str, Any], found: Managed) -> dict[str, Any]:
    """Convert properties to a row. Fields that we may not read (others' command lines) are
    empty.
    """
    return {
        "pid": process["Pid"],
        "start_time": process["StartTime"],
        "user": process["User"],
        "user_name": user_name(process["User"]),
        "gpus": [
            {"ordinal": gpu["Ordinal"], "uuid": gpu["UUID"]} for gpu in found.gpus_of(process)
        ],
        "device_bytes": process["DeviceBytes"],
        "hook": process["HookState"],
        "state": process["State"],
        "last_image": process["LastImage"],
        "checkpoint_interval": process["CheckpointInterval"] or None,
        "checkpoints_kept": process["CheckpointsKept"] or None,
        "command": process.get("CommandLine", []),
        "reason": process.get("Reason", ""),
        "output": process.get("Output", []),
        "name": process.get("Name") or None,
        "container": process.get("Container") or None,
        "slurm_step": process.get("SlurmStep") or None,
        "restarter": process.get("Restarter") or None,
        "pool": process.get("Pool") or None,
        "waits": process.get("Waits", False),
        "hollow": process.get("Hollow", False),
        "ready": process.get("Ready", False),
        "wakes": process.get("Wakes", False),
        "idle": process.get("Idle") or None,
    }
