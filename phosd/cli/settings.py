"""Share options, output for people or programs, and exit codes between the commands."""

import atexit
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from phosd.client.errors import CommandError, Exit, in_words
from phosd.client.text import plain
from phosd.errors import InvalidOption

# Every command imports this module; only some draw tables.
if TYPE_CHECKING:
    from rich.console import Console

    from phosd.client.over_ssh import Tunnel

_PIPE_WIDTH = 10_000
_ENDS_ALL = ("NoDaemon", "NoBus", "Cancelled")
_T = TypeVar("_T")


@dataclass
class Settings:
    """The options that every command takes."""

    bus: str = "system"
    json: bool = False
    color: bool = True
    nodes: tuple[str, ...] = ()
    """Other nodes on which the command is to work; without any it is this machine."""
    tunnel: "Tunnel | None" = None

    @property
    def node(self) -> str:
        """The one other node; empty: this machine."""
        return self.nodes[0] if self.nodes else ""

    def reach(self, tunnel: "Tunnel") -> None:
        """From now on phosd is the one of another node."""
        self.tunnel, self.bus = tunnel, tunnel.address

    def error_of(self, caught: Exception) -> CommandError:
        """Translate an exception; an unknown one is raised again."""
        if self.tunnel is None:
            return in_words(caught, self.bus)
        error = in_words(caught, "system")
        if error.code == "NoBus":
            return in_words(self.tunnel.why_not(), self.bus)
        return CommandError(error.code, f"{self.node}: {error}", error.reason)

    @functools.cached_property
    def out(self) -> "Console":
        """Console for results. In a pipe, tables are not folded."""
        return self._console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)

    @functools.cached_property
    def err(self) -> "Console":
        """Console for progress and errors."""
        return self._console(stderr=True)

    def _console(self, **attributes: Any) -> "Console":
        from rich.console import Console

        # With None the console obeys NO_COLOR.
        no_color = None if self.color else True
        return Console(
            no_color=no_color, highlight=False, emoji=False, soft_wrap=True, **attributes
        )

    def emit(self, row: dict[str, Any]) -> None:
        """Print one JSON object on a line, in ASCII: exact, and without terminal control
        characters.
        """
        print(json.dumps(row), flush=True)

    def say(self, text: str, *, lines: bool = False) -> None:
        """Print a result on a line of its own; ``lines`` keeps its line ends."""
        print(plain(text, lines=lines), flush=True)

    def note(self, text: str, *, lines: bool = False) -> None:
        """Print progress, advice or trouble to standard error."""
        if "err" in self.__dict__:  # the console may show a progress bar below
            self.err.print(plain(text, lines=lines), markup=False)
        else:
            print(plain(text, lines=lines), file=sys.stderr, flush=True)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print name and text, one per line; leave out names without text."""
        for name, text in facts.items():
            if text:
                self.say(f"{name:<13} {text}")

    def rows(
        self,
        rows: Sequence[dict[str, Any]],
        columns: Mapping[str, Callable[[Any], str | tuple[str, ...]]],
        spare: Sequence[str] = (),
        *,
        cut: bool = False,
        empty: str = "",
    ) -> None:
        """Print a table; ``columns`` maps headings to functions of a row. In JSON, print each row
        in full on a line.

        A tuple of texts is printed one below the other. On a narrow terminal the columns in
        ``spare`` are left out, from the first, and with ``cut`` the last column is cut to a line.
        Without rows, say ``empty`` on standard error.
        """
        if self.json:
            for row in rows:
                self.emit(row)
        elif rows:
            from phosd.cli.tables import table

            texts = {head: [_cell(of(row)) for row in rows] for head, of in columns.items()}
            out = self.out
            with out.capture() as drawn:
                out.print(table(texts, spare, out.width, cut=cut), soft_wrap=False)
            # In a pipe the last column would be filled up to its longest text.
            lines = drawn.get().removesuffix("\n").split("\n")
            print("\n".join(line.rstrip(" ") for line in lines), flush=True)
        elif empty:
            self.note(empty)

    def tell(self, error: CommandError, **about: Any) -> None:
        """Print an error; in JSON with the fields of ``about``."""
        if self.json:
            self.emit(about | error.row)
        else:
            self.err.print("[bold red]phos:[/] ", end="")
            self.note(str(error), lines=True)

    def each(self, what: str, things: Sequence[_T], do: Callable[[_T], object]) -> None:
        """Call ``do`` for each thing, continue after errors, and exit with an error if one failed,
        as :meth:`attempt` says.
        """
        exit_code = self.attempt(what, things, do)
        if exit_code is not Exit.DONE:
            sys.exit(exit_code)

    def attempt(self, what: str, things: Sequence[_T], do: Callable[[_T], object]) -> Exit:
        """Call ``do`` for each thing, continue after errors, and return the exit code.

        ``what`` is the JSON field that names the thing. Stops at once when no daemon answers, or
        the user cancels.
        """
        failed: dict[_T, CommandError] = {}
        for thing in things:
            try:
                do(thing)
            except Exception as caught:
                error = self.error_of(caught)
                if error.code in _ENDS_ALL:
                    raise error from caught
                failed[thing] = error
                self.tell(error, **{what: thing})
        if failed and len(things) > 1 and not self.json:
            names = ", ".join(map(str, failed))
            self.note(f"phos: {len(failed)} of {len(things)} failed: {names}")
        exits = {error.exit for error in failed.values()} or {Exit.DONE}
        return exits.pop() if len(exits) == 1 else Exit.FAILED


def _cell(text: str | tuple[str, ...]) -> str:
    return "\n".join(map(plain, (text,) if isinstance(text, str) else filter(None, text)))


def _set(name: str, value_of: Callable[[Any], Any]) -> Callable[..., None]:
    def callback(context: click.Context, option: click.Parameter, value: Any) -> None:
        source = context.get_parameter_source(option.name or "")
        # `phos` itself has already applied the environment before parsing the command. It must not
        # override options given before the command's name.
        again = source is ParameterSource.ENVIRONMENT and context.parent is not None
        if value and not again:
            setattr(context.ensure_object(Settings), name, value_of(value))

    return callback


def _set_bus(context: click.Context, option: click.Parameter, bus: Any) -> None:
    """Take a bus of this machine, unless the command is to work on another node."""
    settings = context.ensure_object(Settings)
    if not settings.nodes:
        _set("bus", str)(context, option, bus)
    elif bus and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--bus is a bus of this machine, and -H is another node; give one")


def _reach(context: click.Context, _: click.Parameter, nodes: tuple[str, ...]) -> None:
    """Open the way to another node, before the command looks anything up there."""
    if not nodes:
        return
    from phosd.client.over_ssh import Tunnel, require_node

    settings = context.ensure_object(Settings)
    settings.nodes = tuple(dict.fromkeys((*settings.nodes, *nodes)))
    try:
        for node in settings.nodes:
            require_node(node)
    except InvalidOption as error:
        raise in_words(error, "") from error
    if len(settings.nodes) == 1:
        tunnel = context.with_resource(Tunnel(settings.node))
        atexit.register(tunnel.close)  # wrong usage that is found from now on closes no context
        settings.reach(tunnel)


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--bus``, ``--host``, ``--json`` and ``--no-color``, before or after the command's
    name.
    """
    decorators = (
        click.option(
            "--bus",
            metavar="session|system|ADDRESS",
            envvar="PHOS_BUS",
            expose_value=False,
            callback=_set_bus,
            help="The bus that phosd is on (default: system; or PHOS_BUS).",
        ),
        click.option(
            "--host",
            "-H",
            metavar="NODE",
            multiple=True,
            is_eager=True,
            expose_value=False,
            callback=_reach,
            help="Another node, as ssh names it; several for a list.",
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
