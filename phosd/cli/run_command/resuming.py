"""Run a named program again from its last image, in the foreground."""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from phosd.cli.run_command.crashes import MOST, SOON, Crashes
from phosd.cli.run_command.early_signals import EarlySignals
from phosd.cli.run_command.named import COMMAND, keep_command, kept_command, told
from phosd.cli.run_command.program import END, RestoredProgram, output_folder, read_end, runs_folder
from phosd.cli.settings import Settings
from phosd.client import Client, Image, RestoreOptions
from phosd.client.errors import CommandError
from phosd.errors import Cancelled, PhosError

_OUTPUT_FOLDER = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
"""The names of folders that ``phos run`` makes."""
_NOBODY = 1 << 22
"""A pid that Linux gives nobody."""
_PASSES = ("Busy", "Timeout", "OutOfMemory")
"""Errors of what stands in the way now, and not for good."""


class NamedImages:
    """The images of the user's program ``name``, newest first."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        name: str,
        uid: int,
        options: Callable[[Image], RestoreOptions],
    ) -> None:
        """``options`` returns those that an image is to be restored with."""
        self._options = options
        self._settings = settings
        self._client = client
        self._name = name
        found = (i for i in client.images() if i.name == name and i.owner == uid)
        self._images = sorted(found, key=lambda image: image.number, reverse=True)

    def __bool__(self) -> bool:
        return bool(self._images)

    @property
    def finished(self) -> bool:
        """Whether the program has come to its end since the last of them: it has ended with 0."""
        image = self._images[0]
        folder = folder_of(image)
        if folder is None:
            return False
        end = folder / END
        with suppress(OSError):
            return end.stat().st_mtime > (image.created or 0.0) and read_end(end) == 0
        return False

    def restorable(self, words: Sequence[str]) -> Image:
        """Return the newest image that can be restored here and now.

        Raises :class:`CommandError` if there is none, or if the program was started by other words.
        """
        whys: list[str] = []
        for image in self._images:
            self._require_same_command(image, words)
            if Crashes(folder_of(image)).of(image.id) >= MOST:
                whys.append(
                    f"{label(image)}: restored from it, the program has crashed {MOST} times "
                    f"within {SOON:.0f} s"
                )
                continue
            try:
                checks = self._client.try_restore(image.id, **self._options(image))
            except PhosError as error:
                whys.append(f"{label(image)}: {error}")
                continue
            hindrances = [check for check in checks if check.error]
            if not hindrances:
                for why in whys:
                    self._settings.note(f"phos: an older image is taken, since {why}")
                return image
            first = hindrances[0]
            if first.error in _PASSES:
                raise CommandError(first.error, f"{label(image)} cannot be restored: {first.text}")
            whys.append(f"{label(image)}: {first.text}")
        raise CommandError(
            "Unsupported",
            f"no image of {self._name} can be restored here, so it is not started, which would "
            f"lose what it has done: {'; '.join(whys)}; mend that, or start it anew under another "
            f"name, or delete its images (`phos rm`)",
        )

    def _require_same_command(self, image: Image, words: Sequence[str]) -> None:
        folder = folder_of(image)
        command = kept_command(folder) if folder is not None else None
        if command is None:
            self._settings.note(
                f"phos: with which command {label(image)} was started is not known any more"
            )
        elif command != list(words):
            raise CommandError(
                "Unsupported",
                f"{label(image)} was started by another command: {told(command)}; give that "
                f"one, take another name, or delete the images of {self._name} (`phos rm`)",
            )


def label(image: Image) -> str:
    """Return what an image is called in messages."""
    return f"{image.name}@{image.number} ({image.id})"


def folder_of(image: Image) -> Path | None:
    """Return the folder that ``phos run`` made for the program of an image; None if its output went
    elsewhere: in no other folder are files of ours.
    """
    folder = Path(image.output[0]).parent if image.output else None
    return folder if folder is not None and (folder / COMMAND).is_file() else None


def make_folder(image: Image, words: Sequence[str]) -> None:
    """Make the output folder of a program that was saved on another machine, where it is missing:
    the same as ``phos run`` made there. Does nothing for output that went elsewhere.
    """
    folder = Path(image.output[0]).parent if image.output else None
    if folder is None or folder.exists() or folder.parent != runs_folder():
        return
    if not _OUTPUT_FOLDER.fullmatch(folder.name):
        return
    folder.mkdir(mode=0o700, parents=True)
    keep_command(folder, words)
    for path in map(Path, image.output):
        if path.parent == folder:
            path.touch(mode=0o600)


def changed_since(image: Image, words: Sequence[str]) -> list[str]:
    """Return the files of a command line that were changed after the image was made: the restored
    program has them as they were when it read them.
    """
    changed = []
    for word in words:
        with suppress(OSError, ValueError):
            path = Path(word)
            if path.is_file() and path.stat().st_mtime > (image.created or 0.0):
                changed.append(word)
    return changed


def resumed(
    settings: Settings, client: Client, image: Image, options: RestoreOptions, early: EarlySignals
) -> RestoredProgram:
    """Restore the program of an image.

    A signal meanwhile cancels that, and ends this program: the image is still there. A program that
    ended by itself at once, having been saved in its last moments, is returned as one that has.
    """
    end = (folder_of(image) or output_folder()) / END
    end.unlink(missing_ok=True)
    outputs = [(Path(path), number) for number, path in enumerate(image.output[:2], 1)]
    known = [(path, number, path.stat().st_size) for path, number in outputs if path.is_file()]
    early.begin()
    try:
        handle = client.restore(image.id, **(options | {"end": str(end)}))
        with early.cancelling(handle):
            job = handle.wait()
    except PhosError as error:
        if not early.asked:
            status = read_end(end)
            if status is None or status < 0:
                raise
            settings.note(f"phos: {label(image)} ended by itself as soon as it was restored")
            return RestoredProgram(_NOBODY, known, end)
        if not isinstance(error, Cancelled):  # the signal may have come to the program first
            settings.note(f"phos: {error}")
        settings.note(f"phos: {label(image)} is still there; the same command goes on from it")
        sys.exit(early.exit_code)
    for note in job.notes:
        settings.note(f"phos: {note}")
    settings.note(f"phos: {label(image)} goes on as process {job.result}")
    return RestoredProgram(int(job.result), known, end)
