"""Implement ``phos status``: is everything protected, and what needs me?"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from phosd.bus import ERROR_PREFIX, CallError
from phosd.cli.client import call, managed, no_process
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.client.daemon import Managed, Properties
from phosd.client.errors import Exit
from phosd.client.past import past_job
from phosd.client.records import Image, Job, Process, records_of
from phosd.client.storage import Storage
from phosd.client.text import human_bytes, level_of, since
from phosd.client.times import time_text
from phosd.client.users import user_name
from phosd.errors import Internal
from phosd.interface.methods import GPU, POOL, PROCESS
from phosd.protection import TOLD, Program, Protection, ended, programs, running, without_program
from phosd.units import counted, duration_text

_MOST = 2000
"""Jobs of the history that are looked at."""


@command()
def status(settings: Settings) -> None:
    """Say what is protected, and what needs you. The programs that need you come first. You see
    yours; root sees everybody's.

    PROTECTED is protected (its schedule is kept), saved (it has an image, and nobody makes the next
    one: `phos checkpoint PID --every 10m`), late (its newest image is older than one and a half
    intervals), never (it has no image), or failed (its last checkpoint, since when there is none).
    Programs that wait in a pool have nothing to lose, and are not listed: see `phos pool`.
    A program with a schedule that has ended within a day of its newest image is ended: phosd does
    not know whether it had done its work.
    AGE is that of its newest image, NEXT when the next one is due. STOP is for how long it stood
    still for that. RESTARTED says who starts it again if it, or the node, fails: a unit of systemd
    with Restart= (also if the unit's `phos run --resume` has restored it), a Kubernetes pod, a
    Slurm job; `by hand` if phosd knows of nobody. TROUBLE is its last job that failed, unless such
    a job has succeeded since; `phos jobs JOB` tells all about it.

    The exit code is 1 if a program is late, or failed, or was never saved, if a pool cannot be
    filled, or if the images cannot be looked at.

    \b
    Examples:
      phos status
      phos status > /dev/null || echo "look at phos status"
      phos status --json | jq -r 'select(.protection == "late").name'
    """
    found, unreachable = _everything(settings)
    now = time.time()
    all_programs = _judged(settings, found, now)
    if not settings.json:
        _summarise(settings, all_programs, found)
    settings.rows(
        [_row(each, found, now) for each in all_programs],
        {
            "NAME": _called,
            "USER": lambda row: row["user_name"],
            "GPU": lambda row: ", ".join(map(str, row["gpus"])),
            "MEMORY": lambda row: human_bytes(row["device_bytes"]),
            "PROTECTED": lambda row: f"{row['protection'].sign} {row['protection']}",
            "AGE": lambda row: "" if row["age"] is None else since(now - row["age"], now),
            "EVERY": lambda row: (
                duration_text(row["checkpoint_interval"]) if row["checkpoint_interval"] else ""
            ),
            "NEXT": lambda row: _next(row["next_in"], row["protection"]),
            "STOP": lambda row: f"{row['stop_seconds']:.2f} s" if row["stop_seconds"] else "",
            "RESTARTED": lambda row: f"by {row['restarter'] or 'hand'}" if row["pids"] else "",
            "STATE": lambda row: ", ".join(row["levels"]),
            "TROUBLE": lambda row: row["trouble"] or ("" if row["pids"] else _to_go_on(row)),
        },
        spare=("STOP", "EVERY", "USER", "MEMORY", "RESTARTED", "NEXT"),
        cut=True,
        empty=no_process(found),
    )
    if unreachable:
        settings.note(f"phos: {unreachable}; what is shown of images is what was known before")
    troubled = any(each.protection.needs_attention for each in all_programs)
    if unreachable or troubled or any(map(_lacks, found.of(POOL))):
        sys.exit(Exit.FAILED)


def _everything(settings: Settings) -> tuple[Managed, str]:
    """Return all objects, and why the images cannot be looked at; empty: they can."""
    try:
        return managed(settings, "ListProcesses", "ListImages", "ListJobs", "ListGPUs"), ""
    except CallError as error:
        if error.name != f"{ERROR_PREFIX}{Internal.__name__}":
            raise
        return managed(settings, "ListProcesses", "ListJobs", "ListGPUs"), error.text


def _past_checkpoints(settings: Settings, now: float) -> list[Job]:
    """Return the checkpoints in the history that :func:`ended` may tell of: phosd itself knows only
    those since its start, and not all of them.
    """
    since = int((now - TOLD) * 1e6)
    rows = call(
        settings, "ListHistory", operation="checkpoint", state="done", since=since, limit=_MOST
    )
    return [past_job(row) for row in rows]


def _judged(settings: Settings, found: Managed, now: float) -> list[Program]:
    """Return the programs of which we may know, those that need somebody first."""
    known = records_of(found, user_name).values()
    processes = [each for each in known if isinstance(each, Process) and _is_told(each, found)]
    images = [each for each in known if isinstance(each, Image)]
    jobs = [each for each in known if isinstance(each, Job)]
    judged = programs(processes, images, jobs, now)
    judged = [each for each in judged if each.protection is not Protection.WAITING]
    if without_program(processes, images, now):
        judged += ended(processes, images, [*_past_checkpoints(settings, now), *jobs], now)
    return judged


def _is_told(process: Process, found: Managed) -> bool:
    """Return whether we may know of its images: it is ours, or we are root."""
    return "LastImage" in found.at(process.path, PROCESS)


def _summarise(settings: Settings, found: list[Program], managed: Managed) -> None:
    """Print the node in few words."""
    counts = Counter(each.protection for each in found)
    parts = ", ".join(f"{counts[each]} {each}" for each in Protection if counts[each])
    gpus = managed.of(GPU)
    used, total = (sum(gpu[name] for gpu in gpus) for name in ("MemoryUsed", "MemoryTotal"))
    settings.facts(
        {
            "programs": f"{running(found)}: {parts}" if found else "none",
            "gpus": f"{len(gpus)}, {human_bytes(used)} of {human_bytes(total)} used",
            "disk": _disk(Storage(*call(settings, "GetStorage"))),
            **({"pools": _pools(pools)} if (pools := managed.of(POOL)) else {}),
        }
    )
    settings.say("")


def _pools(pools: Sequence[Properties]) -> str:
    waiting = sum(pool["Waiting"] for pool in pools)
    parts = [f"{counted(len(pools), 'pool')}, {counted(waiting, 'program')} waiting"]
    parts += [
        f"{pool['Name']} cannot be filled: {pool['Trouble']}" for pool in pools if _lacks(pool)
    ]
    return "; ".join(parts)


def _lacks(pool: Properties) -> bool:
    """Whether a pool has fewer programs that wait than it is to have, and phosd says why."""
    wanted = min(pool["Hollow"] + pool["Ready"], pool["Max"] - pool["Running"])
    return bool(pool["Trouble"]) and pool["Waiting"] < wanted


def _disk(storage: Storage) -> str:
    free = f"{human_bytes(storage.free)} of {human_bytes(storage.total)} free"
    if not storage.quota:
        return f"{free}, images take {human_bytes(storage.used)}"
    quota = f"{human_bytes(storage.quota)} that you may have"
    return f"{free}, images and suspended programs take {human_bytes(storage.used)} of {quota}"


def _to_go_on(row: Mapping[str, Any]) -> str:
    return f"`phos restore {row['image']}` goes on, unless it had done its work"


def _next(seconds: float | None, protection: Protection) -> str:
    if seconds is None:
        return ""
    return "late" if protection is Protection.LATE else f"in {since(0.0, max(0.0, seconds))}"


def _called(row: Mapping[str, Any]) -> str:
    """Return the name of a program; one without a name has a pid, and perhaps a pool."""
    if row["name"] or not row["pids"]:
        return row["name"] or "-"
    pid = f"pid {row['pids'][0]}"
    return f"{row['pool']}, {pid}" if row["pool"] else pid


def _row(program: Program, found: Managed, now: float) -> dict[str, Any]:
    pids = {each.pid for each in program.processes}
    gpus = {
        gpu["Ordinal"]
        for process in found.of(PROCESS)
        if process["Pid"] in pids
        for gpu in found.gpus_of(process)
    }
    image, trouble = program.image, program.trouble
    made = image.created if image is not None else None
    return {
        "name": program.name or None,
        "pool": next((each.pool for each in program.processes if each.pool), None),
        "user_name": program.user_name,
        "pids": sorted(pids),
        "gpus": sorted(gpus),
        "device_bytes": program.device_bytes,
        "state": program.state,
        "levels": sorted({level_of(each) for each in program.processes}),
        "restarter": program.restarter or None,
        "protection": program.protection,
        "image": image.id if image is not None else None,
        "image_created": time_text(int(made * 1e6)) if made is not None else None,
        "age": max(0.0, now - made) if made is not None else None,
        "checkpoint_interval": program.every or None,
        "next_in": program.due - now if program.due is not None else None,
        "stop_seconds": image.stop_seconds if image is not None else None,
        "trouble": f"{trouble.operation}: {trouble.message}" if trouble is not None else None,
        "trouble_job": trouble.number if trouble is not None else None,
    }
