"""Format figures and text for people."""

from collections.abc import Mapping

from phosd.plain_text import plain

__all__ = ["container_text", "figure", "human_bytes", "plain", "rate"]


def human_bytes(count: float) -> str:
    """Format a number of bytes, e.g. ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def rate(value: float | None) -> str:
    """Format a rate in bytes per second, e.g. ``1.5 GiB/s``; an empty string for None or 0."""
    return f"{human_bytes(value)}/s" if value else ""


def figure(name: str, number: float) -> str:
    """Format a measurement, whose name ends with its unit, e.g. ``drain bytes 2.0 MiB``."""
    words = plain(name).replace("_", " ")
    if name.endswith("bytes"):
        return f"{words} {human_bytes(number)}"
    return f"{words} {number:.3g} s" if name.endswith("seconds") else f"{words} {number:g}"


def container_text(container: Mapping[str, str]) -> str:
    """Say which container this is: by its pod and name, or by its id as runtimes shorten it."""
    known = "/".join(filter(None, (container.get("pod"), container.get("name"))))
    return f"{container['runtime']}:{known or container['id'][:12]}" if container else ""


def since(moment: float | None, now: float) -> str:
    """Format the time passed in one unit: ``12 s``, ``5 min``, ``3 h``, ``2 d``; empty for None."""
    if moment is None:
        return ""
    passed = max(0, int(now - moment))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= size:
            return f"{passed // size} {unit}"
    return f"{passed} s"
