"""Define the arguments of commands, and their options by what phosd says of them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from phosd.cli import names
from phosd.cli.parameters import Duration
from phosd.interface.model import Option
from phosd.interface.options import own_first

_Command = TypeVar("_Command", bound=Callable[..., Any])

PID = names.Pid()
FILE_OR_PID = names.FileOrPid()
SUSPENDED_PID = names.SuspendedPid()
IMAGE = names.Image()
GPU = names.Gpu()
JOB = names.Job()
_KINDS: Mapping[str, Any] = {
    "s": click.STRING,
    "u": click.INT,
    "d": Duration(),
}
"""Kinds of parameters by the signature of an option; all figures on D-Bus are seconds."""


def stated(kind: type, *, but: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Add the options of a call to a command, as :mod:`phosd.interface` says them, but those that
    the command has in words of its own, or has not.

    What the user does not give is None, and not to be sent: an older phosd may not know it.
    """

    def add(command: _Command) -> _Command:
        for option in reversed(own_first(kind)):
            if option.name not in (*but, "token"):
                command = _option(option)(command)
        return command

    return add


def _option(option: Option) -> Callable[[_Command], _Command]:
    words = (f"--{option.name.replace('_', '-')}", option.name)
    told = option.doc
    for word in option.choices:
        told = told.replace(f"`{word}`", word)
    if option.signature == "b":
        return click.option(*words, is_flag=True, default=None, help=told)
    kind = click.Choice(option.choices) if option.choices else _KINDS[option.signature]
    if default := option.otherwise or option.default:
        shown = default if isinstance(default, str) else f"{default:g}"
        told = f"{told}  [default: {shown}]"
    return click.option(*words, type=kind, help=told)
