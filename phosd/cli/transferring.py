"""Run a transfer of an image: the job of phosd, and beside it the thread that has the bytes."""

import dataclasses
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from phosd.cli.job import watch
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties
from phosd.client.errors import CommandError
from phosd.client.transfer import Link, PhosdHasLeft, Sent, Transfer, as_error, send_head
from phosd.portable import Head

STANDARD = Path("-")
"""Standard input or output in place of a file."""

sign = click.option(
    "--sign",
    "key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="KEY",
    help="Sign it with this SSH key, or with that of ssh-agent whose public one this is.",
)


def import_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that imports an image."""
    for option in (
        click.option(
            "--dry-run",
            "dry_run_only",
            is_flag=True,
            help="Import nothing; list what stands in the way of an import and a restore here.",
        ),
        click.option(
            "--anyway",
            is_flag=True,
            help="Also if it could not be restored here now: its files are missing, for one.",
        ),
        click.option(
            "--again", is_flag=True, help="Also if it is here already: it is stored a second time."
        ),
        click.option("--owner", metavar="USER", help="Whose image it is going to be (for root)."),
        click.option(
            "--trust",
            is_flag=True,
            help="Though nobody has signed it (for root): its programs may then do as they like.",
        ),
    ):
        command = option(command)
    return command


def wanted(owner: str | None, **flags: bool) -> dict[str, bool | int]:
    """Return the options for phosd. Raises :class:`CommandError` for an unknown user."""
    given: dict[str, bool | int] = {name: True for name, is_set in flags.items() if is_set}
    if owner is not None:
        given["owner"] = _uid(owner)
    return given


def _uid(owner: str) -> int:
    if owner.isdecimal():
        return int(owner)
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError as error:
        raise CommandError(
            "InvalidOption", f"there is no user {owner!r}; name one, or a uid"
        ) from error


def run(
    settings: Settings,
    what: str,
    work: Callable[[Link], Sent],
    member: str,
    /,
    *args: Any,
    **options: Any,
) -> tuple[Properties, Sent]:
    """Run a job that calls ``member`` with ``args``, the name of a socket and options, while
    ``work`` has the bytes. ``what`` names where they come from or go to.
    """
    with Transfer(work) as transfer:
        try:
            job = watch(settings, member, *args, transfer.name, **options)
        except CommandError as error:
            if transfer.failure is not None:
                raise as_error(transfer.failure, what) from error
            raise
        try:
            return job, transfer.result()
        except PhosdHasLeft as error:
            raise CommandError("Internal", f"phosd took {what} before its end") from error
        except Exception as error:
            raise as_error(error, what) from error


def dry_run(settings: Settings, head: Head, given: dict[str, bool | int]) -> None:
    """Show what would stand in the way of an import."""
    from phosd.cli.dry_run import tell_checks

    with Transfer(lambda link: send_head(link, head)) as transfer:
        tell_checks(settings, "TryImport", transfer.name, **given)


def tell(settings: Settings, image: str, sent: Sent) -> None:
    """In JSON say which image it was, and what of it was sent."""
    if settings.json:
        settings.emit({"image": image} | dataclasses.asdict(sent))


def require_no_terminal(stream: Any) -> None:
    """Raise :class:`CommandError` rather than write an image to a terminal, or wait for one."""
    if os.isatty(stream.fileno()):
        raise CommandError("Usage", "an image is no text for a terminal; name a file, or a pipe")
