"""Define a command of ``phos``: what it is given, and what becomes of its errors."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from phosd.cli.settings import Settings, shared_options
from phosd.client.errors import Exit


def command(**attributes: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Define a command of ``phos``. It gets the settings first; its errors become messages and exit
    codes.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.pass_context
        @functools.wraps(function)
        def run(context: click.Context, *args: Any, **kwargs: Any) -> None:
            settings = context.ensure_object(Settings)
            try:
                if settings.nodes:
                    _elsewhere(context, settings, lambda its: function(its, *args, **kwargs))
                else:
                    function(settings, *args, **kwargs)
            except BrokenPipeError:
                # The reader has closed the pipe; discard further output.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(Exit.FAILED)
            except Exception as caught:
                error = settings.error_of(caught)
                settings.tell(error)
                sys.exit(error.exit)

        wrapped: click.Command = click.command(cls=_Command, **attributes)(shared_options(run))
        return wrapped

    return decorate


def arguments(command: click.Command) -> list[tuple[str, str]]:
    """Return the arguments of a command whose kinds say what may be written for them, with that."""
    found = [each for each in command.params if isinstance(each, click.Argument)]
    told = [(each.human_readable_name, getattr(each.type, "told", "")) for each in found]
    return [(name, text) for name, text in told if text]


class _Command(click.Command):
    """A command whose help also says what may be written for its arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if told := arguments(self):
            with formatter.section("Arguments"):
                formatter.write_dl(told)
        super().format_options(ctx, formatter)


def _elsewhere(context: click.Context, settings: Settings, act: Callable[[Settings], None]) -> None:
    """Run a command on the nodes that the settings name."""
    from phosd.cli.nodes import on_each, require_possible

    given: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(parameter, click.Argument) and value:
            given += map(str, value if isinstance(value, tuple) else (value,))
    require_possible(context.info_name or "", given, settings.nodes)
    if len(settings.nodes) > 1:
        on_each(settings, act)
    else:
        act(settings)
