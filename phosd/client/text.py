"""Format figures and text for people."""

from collections.abc import Mapping

from phosd.client.records import Process
from phosd.plain_text import plain
from phosd.units import age_text, human_bytes

__all__ = [
    "NO_GPU",
    "WITHIN",
    "container_text",
    "figure",
    "full_text",
    "human_bytes",
    "level_of",
    "plain",
    "rate",
    "state_text",
]

NO_GPU = "phosd sees no GPU; `phos doctor` says what is missing"

WITHIN = "POD OR JOB"
"""Heading of what a program is in."""


def rate(value: float | None) -> str:
    """Format a rate in bytes per second, e.g. ``1.5 GiB/s``; an empty string for None or 0."""
    return f"{human_bytes(value)}/s" if value else ""


def figure(name: str, number: float) -> str:
    """Format a measurement, whose name ends with its unit, e.g. ``drain bytes 2.0 MiB``."""
    words = plain(name).replace("_", " ")
    if name.endswith("bytes"):
        return f"{words} {human_bytes(number)}"
    return f"{words} {number:.3g} s" if name.endswith("seconds") else f"{words} {number:g}"


def state_text(state: str, *, hollow: bool, ready: bool, wakes: bool) -> str:
    """Return a process's state in a word: one that is suspended may be more than that."""
    if not hollow:
        return state
    if wakes:
        return "asleep"
    return "ready" if ready else "hollow"


def level_of(process: Process) -> str:
    """Return what :func:`state_text` says of a process."""
    return state_text(
        process.state, hollow=process.hollow, ready=process.ready, wakes=process.wakes
    )


def full_text(*, waiting: int, wanted: int, running: int, most: int) -> str:
    """Say why fewer programs of a pool wait than are to, if its size is why; else nothing."""
    if waiting >= wanted or waiting + running < most:
        return ""
    return f"it has {most}, as many as it may"


def container_text(container: Mapping[str, str]) -> str:
    """Say which container this is: by its pod and name, or by its id as runtimes shorten it."""
    known = "/".join(filter(None, (container.get("pod"), container.get("name"))))
    return f"{container['runtime']}:{known or container['id'][:12]}" if container else ""


def since(moment: float | None, now: float) -> str:
    """Format the time passed in one unit: ``12 s``, ``5 min``, ``3 h``, ``2 d``; empty for None."""
    if moment is None:
        return ""
    return age_text(now - moment)
