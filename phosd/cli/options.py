"""Define options that several commands share."""

import click

from phosd.cli import names

PID = names.Pid()
SUSPENDED_PID = names.SuspendedPid()
IMAGE = names.Image()
GPU = names.Gpu()
JOB = names.Job()
PROGRAM = names.Program()
deadline = click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long the program may take to come to rest, before it goes on as it was.",
)
queue = click.option("--queue", is_flag=True, help="Wait if another job works on the process.")
where = click.option(
    "--where",
    type=click.Choice(["auto", "memory", "disk"]),
    default="auto",
    show_default=True,
    help="Where the device memory of the suspended process goes; auto: to host memory, as long as "
    "there is enough.",
)
