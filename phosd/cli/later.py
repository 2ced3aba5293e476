"""Operations that phosd knows the name of and cannot do yet: it says so itself."""

import click

from phosd.cli.job import watch
from phosd.cli.settings import Settings, command


@command(hidden=True)
@click.argument("pid", type=click.IntRange(min=1))
@click.option("--to", "destination", required=True, help="A GPU or a host.")
def migrate(settings: Settings, pid: int, destination: str) -> None:
    """Move a process to another GPU or host (not in this version)."""
    watch(settings, "Migrate", "usa{sv}", pid, destination, {})


@command(hidden=True)
@click.argument("pid", type=click.IntRange(min=1))
def suspend(settings: Settings, pid: int) -> None:
    """Take a process off its GPU (not in this version)."""
    watch(settings, "Suspend", "ua{sv}", pid, {})


@command(hidden=True)
@click.argument("pid", type=click.IntRange(min=1))
def resume(settings: Settings, pid: int) -> None:
    """Bring a suspended process back (not in this version)."""
    watch(settings, "Resume", "ua{sv}", pid, {})
