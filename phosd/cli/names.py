"""Name images on the command line, and complete what the shell asks for.

A completion is asked of a phosd that runs; none is started for it.
"""

import os
import pwd
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from phosd.bus import CallError, NoBusError
from phosd.cli.client import call, objects, peek
from phosd.cli.parameters import ParamType
from phosd.cli.run_command.named import running, users_with
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties
from phosd.client.errors import CommandError
from phosd.client.text import human_bytes, plain
from phosd.client.users import user_name
from phosd.engine.image.name import valid_name
from phosd.engine.program.name import names_of_user
from phosd.interface.methods import IMAGE, PROCESS

LATEST = "latest"
"""Names the caller's newest image, or of the only user whose images the caller may see."""
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
    told = (
        "A process id, or the name of a program (`phos run --name`); USER/NAME for another user's."
    )
    member = "ListProcesses"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the id, or look the name up. Raises :class:`click.BadParameter`, and
        :class:`CommandError` if no program of the user has the name.
        """
        text = str(value)
        user, _, name = text.rpartition("/")
        if valid_name(name):
            settings = ctx.find_object(Settings) if ctx else None
            if (pid := _running(settings or Settings(), user, name)) is None:
                whose = user or "yours"
                raise CommandError(
                    "NoSuchProcess",
                    f"no program of {whose} named {name} runs; {_others(settings, name)}",
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
    """The id of a suspended process, or the name of a suspended program."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the suspended processes alone."""
        found = super().shell_complete(ctx, param, incomplete)
        return [item for item in found if ", suspended: " in str(item.help)]


class FileOrPid(ParamType):
    """A file, or a process: what is a number, or the name of a program and of no file."""

    name = "file or pid"
    told = "A file; or a process id, or the name of a program."

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
    told = (
        "An id, or its beginning; latest; NAME for the newest image of the program of that name, "
        "NAME@3 for its third; USER/NAME@3 for another user's."
    )
    member = "ListImages"

    def words(self, row: Row) -> tuple[str, str]:
        """Return the id, and mode and size."""
        image, _, _, total, _, mode, _ = row
        return str(image), f"{human_bytes(total)}, mode {mode}"


class Gpu(_Named):
    """A GPU, by its number."""

    name = "gpu"
    told = "A GPU's number, or the beginning of its UUID."
    member = "ListGPUs"

    def words(self, row: Row) -> tuple[str, str]:
        """Return the number, and what it is."""
        ordinal, uuid, name, memory, _, _ = row
        return str(ordinal), f"{name}, {human_bytes(memory)}, {uuid}"


class Job(_Named):
    """The number of a job."""

    name = "job"
    told = "A job's number."
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
    ``latest``, the name of a program for its newest image, or ``NAME@NUMBER``; the last three of
    another user behind ``USER/``. That an image is another user's is told.

    A text that fits no image is returned as it is: only phosd knows whether there is such an image,
    of another user. Raises :class:`CommandError` and :class:`CallError`.
    """
    if _WHOLE_ID.fullmatch(text):
        return text
    user, _, rest = text.rpartition("/")
    if user or rest == LATEST:
        return _image_of(settings, user, rest) or text
    ids = sorted(str(row[0]) for row in call(settings, "ListImages"))
    if text in ids:
        return text
    fitting = [image for image in ids if text and image.startswith(text)]
    if len(fitting) > 1:
        more = f", and {len(fitting) - _SHOWN} more" if len(fitting) > _SHOWN else ""
        raise CommandError(
            "InvalidOption",
            f"{text!r} is the beginning of {len(fitting)} images: {', '.join(fitting[:_SHOWN])}"
            f"{more}; write more of the one that you mean",
        )
    return fitting[0] if fitting else _image_of(settings, "", text) or text


def _image_of(settings: Settings, user: str, text: str) -> str:
    """Return the id of the image of a ``user`` with this name and number; of the newest without a
    number, and whatever its name is for ``latest``. Empty if there is none.

    Without a user yours come first, also for root, and then those of the only user who has any.
    """
    name, _, number = text.partition("@")
    if not valid_name(name):
        return ""
    newest = text == LATEST
    images = [
        each
        for each in objects(settings, IMAGE, "ListImages")
        if newest or each.get("Name") == name
    ]
    owners = {each["Owner"] for each in images}
    if user:
        owners &= {_user_id(user)}
    elif os.geteuid() in owners:
        owners = {os.geteuid()}
    if len(owners) > 1:
        first = min(map(user_name, owners))
        raise CommandError(
            "InvalidOption",
            f"{len(owners)} users have images{'' if newest else f' of programs named {name}'}; say "
            f"whose you mean, as in {first}/{text} (`phos images` lists them)",
        )
    found = _newest(images, owners) if newest else _numbered(images, owners, name, number)
    if newest and not found:
        whose = f" of {user}'s" if user else ""
        raise CommandError(
            "NoSuchImage", f"there is no image{whose} yet; `phos checkpoint PID` makes one"
        )
    if found and owners != {os.geteuid()}:
        settings.note(f"phos: {text} is {found}, of {user_name(*owners)}")
    return found


def _newest(images: Sequence[Properties], owners: set[int]) -> str:
    """Return the id of the newest image of an owner; ids sort by time."""
    return max((str(each["Id"]) for each in images if each["Owner"] in owners), default="")


def _numbered(images: Sequence[Properties], owners: set[int], name: str, number: str) -> str:
    """Return the id of the image of an owner with this number; of the last one without. Raises
    :class:`CommandError` for a number that none has.
    """
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


def _running(settings: Settings, user: str, name: str) -> int | None:
    """Return the first process of a user's program with this name; None if none runs. Without a
    user it is the caller's; on another node, where callers may have another id, anybody's that the
    caller may see, if it is one user's only.
    """
    if not settings.node:
        return running(name, _user_id(user) if user else None)
    found = [
        each for each in objects(settings, PROCESS, "ListProcesses") if each.get("Name") == name
    ]
    if user:
        found = [each for each in found if each["User"] == _user_id(user)]
    if len({each["User"] for each in found}) > 1:
        raise CommandError(
            "InvalidOption", f"several users have a program named {name}; say whose, as ann/{name}"
        )
    return min((int(each["Pid"]) for each in found), default=None)


def _others(settings: Settings | None, name: str) -> str:
    """Return where to look for a program with this name: root may mean another user's."""
    here = settings is None or not settings.node
    found = users_with(name) if here and os.geteuid() == 0 else []
    if not found:
        return "`phos ps` lists programs"
    return f"{', '.join(f'{user}/{name}' for user in found[:_SHOWN])} would be another user's"


def _user_id(user: str) -> int:
    """Return a user's id. Raises :class:`CommandError` if there is no such user."""
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise CommandError("InvalidOption", f"there is no user {user} on this machine") from None
