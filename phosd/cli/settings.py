"""What every command shares: options, output for people or programs, and exit codes."""

import enum
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phosd.bus import ERROR_PREFIX, CallError, NoBusError
from phosd.engine.errors import PhosError

_PIPE_WIDTH = 10_000


class Exit(enum.IntEnum):
    """What a command's exit status says."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_AUTHORIZED = 3
    NO_SUCH_THING = 4


_EXITS = {
    "InvalidOption": Exit.USAGE,
    "NotAuthorized": Exit.NOT_AUTHORIZED,
    "NoSuchProcess": Exit.NO_SUCH_THING,
    "NoSuchImage": Exit.NO_SUCH_THING,
    "NoSuchJob": Exit.NO_SUCH_THING,
}


class CommandError(Exception):
    """A command failed. ``code`` is the error's name as on the bus, without the prefix."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def exit(self) -> Exit:
        return _EXITS.get(self.code, Exit.FAILED)


@dataclass
class Settings:
    """The options that every command takes."""

    bus: str = "system"
    json: bool = False
    color: bool = True

    @functools.cached_property
    def out(self) -> Console:
        """Where results go. Tables are not folded for who reads them from a pipe."""
        width = None if sys.stdout.isatty() else _PIPE_WIDTH
        return Console(no_color=not self.color, highlight=False, soft_wrap=True, width=width)

    @functools.cached_property
    def err(self) -> Console:
        """Where progress and errors go."""
        return Console(stderr=True, no_color=not self.color, highlight=False, soft_wrap=True)

    def emit(self, row: dict[str, Any]) -> None:
        """One JSON object on a line."""
        print(json.dumps(row, ensure_ascii=False), flush=True)

    def rows(
        self, rows: Sequence[dict[str, Any]], columns: dict[str, Callable[[Any], str]]
    ) -> None:
        """A table: ``columns`` gives heading and text of each; in JSON a line a row, all of it."""
        if self.json:
            for row in rows:
                self.emit(row)
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        *narrow, last = columns
        for heading in narrow:
            table.add_column(heading, no_wrap=True)
        table.add_column(last, overflow="fold")
        for row in rows:
            table.add_row(*(escape(text(row)) for text in columns.values()))
        if rows:
            self.out.print(table, soft_wrap=False)

    def fail(self, code: str, text: str, status: Exit) -> NoReturn:
        """Say what went wrong and exit."""
        if self.json:
            self.emit({"error": code, "message": text})
        else:
            self.err.print("[bold red]phos:[/] ", end="")
            self.err.print(text, markup=False)
        sys.exit(status)


def _set(name: str, value_of: Callable[[Any], Any]) -> Callable[..., None]:
    def callback(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value:
            setattr(context.ensure_object(Settings), name, value_of(value))

    return callback


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--bus``, ``--json`` and ``--no-color``, before or after the command's name."""
    decorators = (
        click.option(
            "--bus",
            metavar="session|system|ADDRESS",
            envvar="PHOS_BUS",
            expose_value=False,
            callback=_set("bus", str),
            help="The bus that phosd is on (default: system; or PHOS_BUS).",
        ),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            expose_value=False,
            callback=_set("json", bool),
            help="One JSON object a line instead of text.",
        ),
        click.option(
            "--no-color",
            is_flag=True,
            expose_value=False,
            callback=_set("color", lambda off: not off),
            help="No colours (also NO_COLOR).",
        ),
    )
    return functools.reduce(lambda inner, decorate: decorate(inner), reversed(decorators), command)


def command(**attributes: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A command of ``phos``: gets the settings first; its errors become messages and exit codes."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.pass_context
        @functools.wraps(function)
        def run(context: click.Context, *args: Any, **kwargs: Any) -> None:
            settings = context.ensure_object(Settings)
            try:
                function(settings, *args, **kwargs)
            except CommandError as error:
                settings.fail(error.code, str(error), error.exit)
            except PhosError as error:
                settings.fail(error.code, str(error), _EXITS.get(error.code, Exit.FAILED))
            except NoBusError as error:
                settings.fail("NoBus", f"{error}; {error.hint}", Exit.FAILED)
            except CallError as error:
                failed = of_bus(error)
                settings.fail(failed.code, str(failed), failed.exit)
            except BrokenPipeError:
                # Whoever read our output has had enough; nothing more can be said to them.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(Exit.FAILED)

        wrapped: click.Command = click.command(**attributes)(shared_options(run))
        return wrapped

    return decorate


def of_bus(error: CallError) -> CommandError:
    """An error of the bus in the words of the command line."""
    if error.name.startswith(ERROR_PREFIX):
        return CommandError(error.name.removeprefix(ERROR_PREFIX), error.text)
    if error.name.endswith((".ServiceUnknown", ".NameHasNoOwner")):
        return CommandError(
            "NoDaemon",
            "phosd does not run on this bus; start it (`systemctl start phosd`, or `phosd &` as "
            "root), or name the bus that it is on with --bus or PHOS_BUS",
        )
    if error.name.endswith(".UnknownObject"):
        return CommandError("NoSuchJob", error.text)
    if error.name.endswith(".AccessDenied"):
        return CommandError("NotAuthorized", error.text)
    return CommandError(error.name.rpartition(".")[2], error.text)


def human_bytes(count: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
