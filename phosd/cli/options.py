"""Define options that several commands share."""

from collections.abc import Callable
from typing import Any

import click

from phosd.cli import names
from phosd.cli.parameters import Duration

PID = names.Pid()
FILE_OR_PID = names.FileOrPid()
SUSPENDED_PID = names.SuspendedPid()
IMAGE = names.Image()
GPU = names.Gpu()
JOB = names.Job()
deadline = click.option(
    "--deadline",
    type=Duration(),
    help="How long the program may take to come to rest, before it goes on as it was.",
)
_callback_deadline = click.option(
    "--callback-deadline",
    type=Duration(),
    help="How long a program with safe points of its own may take to come to one.",
)
_without_callbacks = click.option(
    "--without-callbacks",
    is_flag=True,
    default=None,  # not sent by default: an older phosd does not know it
    help="Stop it wherever it is then, instead of failing.",
)


def safe_points(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that stops a program with safe points."""
    return _callback_deadline(_without_callbacks(function))


queue = click.option("--queue", is_flag=True, help="Wait if another job works on the process.")
where = click.option(
    "--where",
    type=click.Choice(["auto", "memory", "disk"]),
    default="auto",
    show_default=True,
    help="Where the device memory of the suspended process goes; auto: to host memory, as long as "
    "there is enough.",
)
