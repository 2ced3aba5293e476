"""Implement ``phos gpus``: list the GPUs of this node."""

from typing import Any

from phosd.cli.client import managed
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.client.daemon import Managed
from phosd.client.text import NO_GPU, human_bytes
from phosd.interface.methods import GPU, PROCESS


@command()
def gpus(settings: Settings) -> None:
    """List the GPUs, and who uses them. You see your processes; root sees everybody's.

    GPU is the number by which commands name it; the beginning of its UUID does as well. LOAD, TEMP
    and POWER are empty where a GPU does not report them. Behind your processes stands phosd, if its
    data mover uses the GPU, and how many others do that you may not see.

    \b
    Examples:
      phos gpus
      phos gpus --json | jq 'select(.memory_used < 1e9).ordinal'
    """
    found = managed(settings, "ListGPUs", "ListProcesses")
    rows = [_row(gpu, found) for gpu in found.of(GPU)]
    settings.rows(
        sorted(rows, key=lambda row: int(row["ordinal"])),
        {
            "GPU": lambda row: str(row["ordinal"]),
            "NAME": lambda row: row["name"],
            "MEMORY": lambda row: (
                f"{human_bytes(row['memory_used'])} of {human_bytes(row['memory_total'])}"
            ),
            "LOAD": lambda row: _figure(row["utilisation"], "{:.0%}"),
            "TEMP": lambda row: _figure(row["temperature"], "{:.0f} \N{DEGREE SIGN}C"),
            "POWER": lambda row: _figure(row["power"], "{:.0f} W"),
            "UUID": lambda row: row["uuid"],
            "PROCESSES": _processes,
        },
        spare=("POWER", "TEMP", "UUID", "LOAD", "NAME"),
        empty=NO_GPU,
    )


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _processes(row: dict[str, Any]) -> str:
    pids = ", ".join(map(str, row["processes"]))
    others = len(row["other_processes"])
    known = ", ".join(filter(None, (pids, "phosd" if row["movers"] else "")))
    return " ".join(filter(None, (known, f"+{others}" if others else "")))


def _row(gpu: dict[str, Any], found: Managed) -> dict[str, Any]:
    here = {each["Pid"] for each in found.of(PROCESS) if gpu in found.gpus_of(each)}
    movers = {*gpu.get("Movers", ())}
    return {
        "ordinal": gpu["Ordinal"],
        "uuid": gpu["UUID"],
        "name": gpu["Name"],
        "memory_total": gpu["MemoryTotal"],
        "memory_used": gpu["MemoryUsed"],
        "utilisation": _told(gpu["Utilisation"]),
        "temperature": _told(gpu["Temperature"]),
        "power": _told(gpu["Power"]),
        "processes": sorted(here),
        "movers": sorted(movers),
        "other_processes": sorted({*gpu["Processes"]} - here - movers),
    }


def _told(value: float) -> float | None:
    """Return a figure, which is negative on the bus where the GPU does not report it."""
    return None if value < 0 else value
