"""Implement ``phos import``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import click

from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import summary
from phosd.cli.settings import Settings
from phosd.cli.transferring import (
    STANDARD,
    dry_run,
    import_options,
    require_no_terminal,
    run,
    tell,
    wanted,
)
from phosd.client.errors import CommandError


@command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@import_options
def import_(
    settings: Settings,
    file: Path,
    trust: bool,
    owner: str | None,
    anyway: bool,
    again: bool,
    dry_run_only: bool,
) -> None:
    """Store an image from a file. `phos export` wrote FILE on another machine; - is standard input.
    The image then belongs to you, has an id of this machine, and can be restored as if it had been
    made here. One that is here already is not stored again. What this machine is missing to restore
    it is said before anything is stored.

    \b
    Examples:
      phos import bert.phos --dry-run
      phos import bert.phos
      ssh node1 phos export latest - --sign ~/.ssh/id_ed25519 | phos import -
    """
    from phosd.client.transfer import Link, Sent, head_of, send_from

    name = "standard input" if file == STANDARD else str(file)
    given = wanted(owner, anyway=anyway, again=again, trust=trust)
    with _open(file) as source:
        head = head_of(source, name)
        if dry_run_only:
            dry_run(settings, head, given)
            return

        def work(link: Link) -> Sent:
            return send_from(link, head, source, name)

        job, sent = run(settings, name, work, "Import", **given)
    tell(settings, job["Result"], sent)
    if not settings.json:
        tell_notes(settings, job)
        settings.note(f"image {job['Result']} is here, after {summary(job)}")
        settings.say(job["Result"])


@contextmanager
def _open(file: Path) -> Iterator[FileIO]:
    if file == STANDARD:
        require_no_terminal(sys.stdin)
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as source:
            yield source
        return
    try:
        with file.open("rb", buffering=0) as source:
            yield source
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise CommandError(
            "InvalidOption", f"{file} cannot be read: {error.strerror}; name another file"
        ) from error
