"""Text for the terminal: what programs, users and the bus say, made harmless; and figures.

Command lines, names of kernels and errors come from users' programs. Printed as they are, they
could have the terminal of whoever looks (root, say) do what they want.
"""

import unicodedata

_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Categories of characters that are shown as escapes: controls, formats, surrogates."""


def plain(text: str, *, lines: bool = False) -> str:
    """The text without anything that a terminal obeys; ``lines`` keeps line ends and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character, lines) for character in text)


def _shown(character: str, lines: bool) -> str:
    if lines and character in "\n\t":
        return character
    if unicodedata.category(character) in _HIDDEN:
        return character.encode("unicode_escape").decode()
    return character


def human_bytes(count: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def rate(value: float | None) -> str:
    """``1.5 GiB/s``; nothing for none."""
    return f"{human_bytes(value)}/s" if value else ""
