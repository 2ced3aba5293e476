"""Implement ``phos export``."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.job import summary
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.cli.transferring import STANDARD, require_no_terminal, run, sign, tell
from phosd.client.errors import CommandError
from phosd.client.text import human_bytes


@command()
@click.argument("image", type=options.IMAGE)
@click.argument("file", type=click.Path(path_type=Path))
@sign
def export(settings: Settings, image: str, file: Path, key: Path | None) -> None:
    """Write an image to a file. `phos import` reads FILE on another machine; - is standard output.
    The file has all of the program: its memory, and what is secret in it. Users may import an image
    that is signed by a key that the other machine trusts; root may import any.

    \b
    Examples:
      phos export bert bert.phos
      phos export latest - --sign ~/.ssh/id_ed25519 | ssh node2 phos import -
    """
    from phosd.client.transfer import Link, Sent, write_to

    name = "standard output" if file == STANDARD else str(file)
    image = resolve(settings, image)
    with _open(file) as (out, finish):

        def work(link: Link) -> Sent:
            return write_to(link, out, key, finish)

        job, sent = run(settings, name, work, "Export", image)
    tell(settings, image, sent)
    if file == STANDARD:
        settings.note(f"image {image} was exported in {summary(job)}")
    elif not settings.json:
        size = human_bytes(file.stat().st_size)
        settings.say(f"{image} is in {file}, {size}, after {summary(job)}")


@contextmanager
def _open(file: Path) -> Iterator[tuple[FileIO, Callable[[], None]]]:
    """Yield a file to write to, and what makes it whole: it gets its name then."""
    if file == STANDARD:
        require_no_terminal(sys.stdout)
        with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as out:
            yield out, _nothing
        return
    try:
        folder = file.is_dir()
    except OSError as error:
        raise CommandError("InvalidOption", f"{file} cannot be written to: {error}") from error
    if folder:
        raise CommandError("InvalidOption", f"{file} is a folder; name a file in it")
    if file.exists() and not file.is_file():  # a tape, or a pipe
        with file.open("wb", buffering=0) as out:
            yield out, _nothing
        return
    if file.exists():
        raise CommandError("InvalidOption", f"{file} exists; remove it, or name another file")
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        with _new(partial) as out:

            def finish() -> None:
                os.fsync(out.fileno())
                partial.rename(file)

            yield out, finish
    finally:
        partial.unlink(missing_ok=True)


def _nothing() -> None:
    """Nothing makes it whole but its last byte."""


def _new(path: Path) -> Any:
    """Open a new file for its owner alone: an image has what is secret in a program."""
    try:
        return os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0
        )
    except OSError as error:
        raise CommandError(
            "Internal", f"no file can be made in {path.parent} ({error.strerror}); name another"
        ) from error
