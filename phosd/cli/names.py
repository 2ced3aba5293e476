"""Name images on the command line, and complete what the shell asks for.

A completion is asked of a phosd that runs; none is started for it.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from phosd.bus import CallError, NoBusError
from phosd.cli.client import call, objects, peek
from phosd.cli.parameters import ParamType
from phosd.cli.run_command.named import running
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.client.text import human_bytes, plain
from phosd.engine.image.name import valid_name
from phosd.engine.program.name import names_of_user
from phosd.interface.methods import IMAGE

LATEST = "latest"
"""Names the newest image that the caller may see."""
_WHOLE_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}")
_SHOWN = 5
"""Images that an error names."""

Row = Sequence[Any]


class _Named(ParamType):
    """Something that phosd lists, completed by the shell."""

    member = ""
    """The method of Manager1 that lists it."""

    def words(self, row: Row) -> tuple[str, str]:
        """Return what is typed for a row of the list, and what helps to choose."""
        raise NotImplementedError

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return what fits the beginning. When phosd cannot tell there is nothing to choose from,
        and no place on the line for the reason, which the command itself gives when it is run.
        """
        settings = ctx.find_object(Settings) or Settings()
        try:
            words = [self.words(row) for row in peek(settings, self.member)]
        except (CallError, NoBusError):
            return []
        return [
            CompletionItem(word, help=plain(text))
            for word, text in words
            if word.startswith(incomplete)
        ]


class Pid(_Named):
    """A process id (Linux has none greater than 4,194,304), or the name of a program that runs."""

    name = "pid"
    member = "ListProcesses"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the id, or look the name up. Raises :class:`click.BadParameter`, and
        :class:`CommandError` if no program of the user has the name.
        """
        text = str(value)
        if valid_name(text):
            if (pid := running(text)) is None:
                raise CommandError(
                    "NoSuchProcess",
                    f"no program of yours named {text} runs; `phos ps` lists programs",
                )
            return pid
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 2**22):
            self.fail(
                f"{text!r} is neither a process id, 1 to {2**22}, nor a program's name; `phos ps` "
                "lists them",
                param,
                ctx,
            )
        return int(text)

    def words(self, row: Row) -> tuple[str, str]:
        """Return the pid, and the command behind its state."""
        pid, _, command, _, hook, state, _ = row
        return str(pid), f"{hook}, {state}: {command}"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the processes that fit the beginning, and the names of your programs."""
        named = sorted(name for name in names_of_user(os.geteuid()) if name.startswith(incomplete))
        return [*super().shell_complete(ctx, param, incomplete), *map(CompletionItem, named)]


class SuspendedPid(Pid):
    """The id of a suspended process."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the suspended processes alone."""
        found = super().shell_complete(ctx, param, incomplete)
        return [item for item in found if ", suspended: " in str(item.help)]


class FileOrPid(ParamType):
    """A file, or a process: what is a number, or the name of a program and of no file."""

    name = "file or pid"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | int:
        """Return the path or the pid. Raises :class:`click.BadParameter`."""
        text = str(value)
        if text.isdecimal() or (not Path(text).exists() and valid_name(text) and running(text)):
            return Pid().convert(value, param, ctx)
        if not Path(text).is_file():
            self.fail(f"{text!r} is neither a file nor a program of yours", param, ctx)
        return Path(text)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave files to the shell."""
        return [CompletionItem(incomplete, type="file")]


class Image(_Named):
    """An image, to be looked up by :func:`resolve`."""

    name = "image"
    member = "ListImages"

    def words(self, row: Row) -> tuple[str, str]:
        """Return the id, and mode and size."""
        image, _, _, total, _, mode, _ = row
        return str(image), f"{human_bytes(total)}, mode {mode}"


class Gpu(_Named):
    """A GPU, by its number."""

    name = "gpu"
    member = "ListGPUs"

    def words(self, row: Row) -> tuple[str, str]:
        """Return the number, and what it is."""
        ordinal, uuid, name, memory, _, _ = row
        return str(ordinal), f"{name}, {human_bytes(memory)}, {uuid}"


class Job(_Named):
    """The number of a job."""

    name = "job"
    member = "ListJobs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the number. Raises :class:`click.BadParameter`."""
        text = str(value)
        if not (text.isascii() and text.isdecimal() and int(text) >= 1):
            self.fail(f"{text!r} is no number of a job; `phos jobs` lists them", param, ctx)
        return int(text)

    def words(self, row: Row) -> tuple[str, str]:
        """Return the number, and what the job does."""
        number, operation, target, state, _ = row
        return str(number), f"{operation} {target}, {state}"


def resolve(settings: Settings, text: str) -> str:
    """Return the id of the image that ``text`` names: its id, a beginning that no other image has,
    ``latest``, the name of a program for its newest image, or ``NAME@NUMBER``.

    A text that fits no image is returned as it is: only phosd knows whether there is such an image,
    of another user. Raises :class:`CommandError` and :class:`CallError`.
    """
    if _WHOLE_ID.fullmatch(text):
        return text
    found = call(settings, "ListImages")
    ids = sorted(str(row[0]) for row in found)  # by time
    if text in ids:
        return text
    if text == LATEST:
        if not ids:
            raise CommandError(
                "NoSuchImage", "there is no image yet; `phos checkpoint PID` makes one"
            )
        return ids[-1]
    fitting = [image for image in ids if text and image.startswith(text)]
    if len(fitting) > 1:
        more = f", and {len(fitting) - _SHOWN} more" if len(fitting) > _SHOWN else ""
        raise CommandError(
            "InvalidOption",
            f"{text!r} is the beginning of {len(fitting)} images: {', '.join(fitting[:_SHOWN])}"
            f"{more}; write more of the one that you mean",
        )
    if fitting:
        return fitting[0]
    name, _, number = text.partition("@")
    return _image_of(settings, name, number) or text if valid_name(name) else text


def _image_of(settings: Settings, name: str, number: str) -> str:
    """Return the id of the image of a program with this number, or of its newest image; empty if it
    has none.

    Programs of several users may have the same name: yours come first, also for root.
    """
    images = [each for each in objects(settings, IMAGE, "ListImages") if each.get("Name") == name]
    owners = {each["Owner"] for each in images}
    if os.geteuid() in owners:
        owners = {os.geteuid()}
    if len(owners) > 1:
        raise CommandError(
            "InvalidOption",
            f"programs of {len(owners)} users are named {name}; give the id of an image "
            "(`phos images`)",
        )
    own = {each["Number"]: str(each["Id"]) for each in images if each["Owner"] in owners}
    if not own:
        return ""
    if not number:
        return own[max(own)]
    if not (number.isdecimal() and int(number) in own):
        known = ", ".join(f"{name}@{each}" for each in sorted(own)[-_SHOWN:])
        raise CommandError(
            "NoSuchImage", f"there is no image {name}@{number}; the newest are {known}"
        )
    return own[int(number)]
