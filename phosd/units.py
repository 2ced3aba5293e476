"""Read and write durations, sizes, shares and numbers of things, as people write them."""

import re

_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "w": 604_800.0,
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PART = rf"({_NUMBER})({'|'.join(sorted(_SECONDS, key=len, reverse=True))})"
DURATION = rf"{_NUMBER}|\s*(?:{_PART}\s*)+"
"""Pattern of the texts that :func:`duration` reads; those of the others follow."""
_BYTES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)},
}
SIZE = rf"\s*({_NUMBER})\s*([KMGT]i?)?B?\s*"
SHARE = r"\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*%\s*"


def duration(text: str) -> float | None:
    """Return the seconds of ``90``, ``90s``, ``5m``, ``5min``, ``1h30min`` or ``1min 30s``; None
    for other text. The units are ``us ms s m min h d w``.
    """
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if not re.fullmatch(DURATION, text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text))


def duration_text(seconds: float) -> str:
    """Format a duration, to be read by :func:`duration` without the space: ``90 s``, ``10 min``,
    ``1 d``.
    """
    for unit in ("w", "d", "h", "min"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"


def size(text: str) -> int | None:
    """Return the bytes of ``16 GiB``, ``500M`` or ``4096``; None for other text. ``G`` is 10^9,
    ``Gi`` is 2^30; ``B`` may follow.
    """
    found = re.fullmatch(SIZE, text)
    return int(float(found[1]) * _BYTES[found[2] or ""]) if found else None


def human_bytes(count: float) -> str:
    """Format a number of bytes, e.g. ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def counted(number: int, thing: str, things: str = "") -> str:
    """Format a number of things: ``1 kernel``, ``2,000 kernels``, ``3 processes`` (``things``)."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def age_text(seconds: float) -> str:
    """Format the time that has passed in one unit: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    passed = max(0, int(seconds))
    for unit in ("d", "h", "min"):
        if passed >= _SECONDS[unit]:
            return f"{passed // int(_SECONDS[unit])} {unit}"
    return f"{passed} s"


def share(text: str) -> float | None:
    """Return the part of 1 that ``5%`` stands for; None for other text, and from ``100%`` on."""
    found = re.fullmatch(SHARE, text)
    return float(found[1]) / 100 if found else None
