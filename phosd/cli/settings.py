"""What every command shares: options, output for people or programs, and exit codes."""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from phosd.client.errors import CommandError, Exit, in_words
from phosd.client.text import plain

# Every command comes by here: what draws tables is for those that use them.
if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 10_000
_T = TypeVar("_T")


@dataclass
class Settings:
    """The options that every command takes."""

    bus: str = "system"
    json: bool = False
    color: bool = True

    @functools.cached_property
    def out(self) -> "Console":
        """Where results go. Tables are not folded for who reads them from a pipe."""
        return self._console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)

    @functools.cached_property
    def err(self) -> "Console":
        """Where progress and errors go."""
        return self._console(stderr=True)

    def _console(self, **attributes: Any) -> "Console":
        from rich.console import Console

        # Nothing given, the console obeys NO_COLOR.
        no_color = None if self.color else True
        return Console(
            no_color=no_color, highlight=False, emoji=False, soft_wrap=True, **attributes
        )

    def emit(self, row: dict[str, Any]) -> None:
        """One JSON object on a line, in ASCII: exact, and nothing that a terminal obeys."""
        print(json.dumps(row), flush=True)

    def say(self, text: str, *, lines: bool = False) -> None:
        """A result, on a line of its own; with ``lines`` it may have line ends."""
        print(plain(text, lines=lines), flush=True)

    def note(self, text: str, *, lines: bool = False) -> None:
        """The same for what is not the result: progress, advice, trouble."""
        if "err" in self.__dict__:  # which may have a progress bar below
            self.err.print(plain(text, lines=lines), markup=False)
        else:
            print(plain(text, lines=lines), file=sys.stderr, flush=True)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Name and text on a line each; what has no text is left out."""
        for name, text in facts.items():
            if text:
                self.say(f"{name:<14}{text}")

    def rows(
        self,
        rows: Sequence[dict[str, Any]],
        columns: Mapping[str, Callable[[Any], str | tuple[str, ...]]],
        spare: Sequence[str] = (),
    ) -> None:
        """A table: ``columns`` gives heading and text of each; in JSON a line a row, all of it.

        A tuple of texts is one below the other. Where the terminal is too narrow, the columns
        ``spare`` are left out, the first of them first.
        """
        if self.json:
            for row in rows:
                self.emit(row)
        elif rows:
            from phosd.cli.tables import table

            texts = {head: [_cell(of(row)) for row in rows] for head, of in columns.items()}
            self.out.print(table(texts, spare, self.out.width), soft_wrap=False)

    def tell(self, error: CommandError, **about: Any) -> None:
        """Say what went wrong; ``about`` says in JSON with what."""
        if self.json:
            self.emit(about | {"error": error.code, "message": str(error)})
        else:
            self.err.print("[bold red]phos:[/] ", end="")
            self.note(str(error), lines=True)

    def each(self, what: str, things: Sequence[_T], do: Callable[[_T], object]) -> None:
        """``do`` all that can be done, and exit in the end if something could not be.

        ``what`` the things are, for JSON. Where nobody answers, the others are not tried.
        """
        failed: dict[_T, CommandError] = {}
        for thing in things:
            try:
                do(thing)
            except Exception as caught:
                error = in_words(caught)
                if error.code in ("NoDaemon", "NoBus"):
                    raise error from caught
                failed[thing] = error
                self.tell(error, **{what: thing})
        if failed:
            if len(things) > 1 and not self.json:
                names = ", ".join(map(str, failed))
                self.note(f"phos: {len(failed)} of {len(things)} failed: {names}")
            exits = {error.exit for error in failed.values()}
            sys.exit(exits.pop() if len(exits) == 1 else Exit.FAILED)


def _cell(text: str | tuple[str, ...]) -> str:
    return "\n".join(map(plain, (text,) if isinstance(text, str) else filter(None, text)))


def _set(name: str, value_of: Callable[[Any], Any]) -> Callable[..., None]:
    def callback(context: click.Context, option: click.Parameter, value: Any) -> None:
        source = context.get_parameter_source(option.name or "")
        # Of the environment, which `phos` itself has taken over before its command is looked at:
        # what was said before the command must not give way to it.
        again = source is ParameterSource.ENVIRONMENT and context.parent is not None
        if value and not again:
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
            except BrokenPipeError:
                # Whoever read our output has had enough; nothing more can be said to them.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(Exit.FAILED)
            except Exception as caught:
                error = in_words(caught)
                settings.tell(error)
                sys.exit(error.exit)

        wrapped: click.Command = click.command(**attributes)(shared_options(run))
        return wrapped

    return decorate
