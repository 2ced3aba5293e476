"""The note of an image: a line that its owner may write, change and take away.

A manifest is sealed when the image is published, and never changes for a note. The note is a file
of its own beside it, in the tier that keeps the image when the machine ends: on the disk if the
image is durable, else in memory, from where it goes to the disk with the image.
"""

import unicodedata
from pathlib import Path

from phosd.engine.image import private_files
from phosd.errors import ImageCorrupt, InvalidOption

NOTE = "note"
MOST_CHARACTERS = 200
_MOST_BYTES = 4 * MOST_CHARACTERS
_NO_TEXT = frozenset(("Zl", "Zp"))
"""Unicode categories that end a line, besides those of controls and formats, which begin with C."""


def checked_note(text: str) -> str:
    """Return a note without the spaces around it. Raises :class:`InvalidOption`."""
    text = text.strip()
    if _is_note(text):
        return text
    raise InvalidOption(
        f"{text[:40]!r}{'...' if len(text) > 40 else ''} can be no note",
        hint=f"a note is one line of at most {MOST_CHARACTERS} characters, without control "
        "characters",
    )


def read_note(folder: "int | Path") -> str:
    """Return the note in the folder of an image, which is open or a path; empty if it has none.

    Raises :class:`ImageCorrupt` if it is none that phosd has written. The image itself is whole.
    """
    at, path = (folder, Path(NOTE)) if isinstance(folder, int) else (None, folder / NOTE)
    try:
        text = private_files.read_private(path, _MOST_BYTES, dir_fd=at).decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeError) as error:
        raise _no_note(path) from error
    if not _is_note(text):
        raise _no_note(path)
    return text


def write_note(folder: Path, text: str) -> None:
    """Write the note to the folder of an image, or remove it if it is empty. The caller holds the
    store's lock. Raises :class:`~phosd.errors.OutOfSpace`; then the note is the one before.
    """
    path = folder / NOTE
    if text:
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with private_files.space_errors(str(path)):
            private_files.write_durably(partial, text.encode())
        partial.rename(path)
    else:
        path.unlink(missing_ok=True)
    private_files.sync_folder(folder)


def _no_note(path: Path) -> ImageCorrupt:
    return ImageCorrupt(
        f"{path} is no note", hint="phosd did not write it; give the image another note"
    )


def _is_note(text: str) -> bool:
    categories = {unicodedata.category(character) for character in text}
    shown = not any(each.startswith("C") or each in _NO_TEXT for each in categories)
    return shown and len(text) <= MOST_CHARACTERS
