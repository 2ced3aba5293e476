"""Make text of users' safe to show: on terminals, and in phosd's log.

Command lines, paths, kernel names and errors come from users' programs. Shown verbatim, they could
control the terminal of the reader, who may be root, or pass for another line.
"""

import unicodedata

_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that are shown as escapes: controls, formats, surrogates."""


def plain(text: str, *, lines: bool = False) -> str:
    """Return the text with control characters escaped; ``lines`` keeps line ends and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character, lines) for character in text)


def _shown(character: str, lines: bool) -> str:
    if lines and character in "\n\t":
        return character
    if unicodedata.category(character) in _HIDDEN:
        return character.encode("unicode_escape").decode()
    return character
