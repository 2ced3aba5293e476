"""Implement ``phos prune``: delete what nothing needs: output folders, images, newer files."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.run_command.program import runs_folder
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError, Exit
from phosd.client.text import human_bytes
from phosd.client.times import local_time, time_text
from phosd.units import duration

_AT_ONCE = 7 << 10
"""Bytes of names in a call, with those around each on D-Bus; phosd takes 8 KiB."""
_AROUND = 8
_LEAST_SECONDS = 60.0


def _age(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Parse an age in seconds. Raises :class:`click.BadParameter`."""
    found = None if text is None else duration(text)
    if text is not None and found is None:
        raise click.BadParameter(f"{text!r} is no age; write for example 12h, 30d or 4w")
    return found


def _age_of_output(
    context: click.Context, option: click.Parameter, text: str | None
) -> float | None:
    """Parse an age: the program of a newer output may not have opened it yet."""
    found = _age(context, option, text)
    if found is not None and found < _LEAST_SECONDS:
        raise click.BadParameter(f"{text!r} is less than a minute; write for example 10m or 1d")
    return found


@command()
@click.option(
    "--older",
    callback=_age_of_output,
    default="1d",
    show_default=True,
    metavar="AGE",
    help="Only output that was not written to for so long, at least a minute.",
)
@click.option(
    "--images",
    callback=_age,
    metavar="AGE",
    help="Also images that are older than this. The last good one of a process that runs or is "
    "suspended stays, and so does one that a job works with.",
)
@click.option(
    "--keep",
    type=click.IntRange(0, 1000),
    default=1,
    show_default=True,
    help="With --images: how many good images of each program stay, the newest ones. A program "
    "with a name (`phos run --name`) is one, as often as it was restored; of others each restored "
    "process is another one.",
)
@click.option(
    "--files",
    callback=_age,
    metavar="AGE",
    help="Also what restores have left beside the files of images for longer than this: newer "
    "versions of those that they have put back, and ends of those that they have cut.",
)
@click.option("--dry-run", is_flag=True, help="List what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Delete it without asking.")
def prune(settings: Settings, dry_run: bool, yes: bool, **given: Any) -> None:
    """Delete what nothing needs any more. That is output of `phos run`, with --images old images,
    and with --files what restores have left of a program's files.

    An output folder is needed as long as a program has it open, running or suspended, or an image
    would open it in a restore. Only what is yours is deleted, also if you are root. It is listed
    first.

    \b
    Examples:
      phos prune --dry-run
      phos prune --older 7d
      phos prune --images 30d --keep 2 --yes
      phos prune --files 7d
    """
    folder = str(runs_folder().absolute())
    options = {name: value for name, value in given.items() if value is not None}
    found = call(settings, "PlanPruning", folder, **options)
    rows = [_row(folder, *thing) for thing in found]
    settings.rows(
        rows,
        {
            "WHAT": lambda row: row["kind"],
            "SIZE": lambda row: human_bytes(row["bytes"]),
            "TIME": lambda row: local_time(row["time"]),
            "WHY": lambda row: row["why"],
            "NAME": lambda row: row["name"],
        },
        spare=("WHY", "TIME"),
        empty="there is nothing to delete: no output"
        + (" and no image" if given["images"] is not None else "")
        + (" and no file" if given["files"] is not None else "")
        + " that is old enough and that nothing needs",
    )
    if dry_run or not rows:
        return
    if not yes:
        _ask(settings, rows)
    images = [row["name"] for row in rows if row["kind"] == "image"]
    exit_code = settings.attempt("name", images, lambda image: _delete(settings, image))
    outputs = [thing[1] for thing in found if thing[0] == "output"]
    files = [row["name"] for row in rows if row["kind"] == "file"]
    gone = _remove(settings, folder, outputs, given["older"])
    if not (_remove_files(settings, files, given["files"]) and gone) and exit_code is Exit.DONE:
        exit_code = Exit.BUSY
    if exit_code is not Exit.DONE:
        sys.exit(exit_code)


def _row(folder: str, kind: str, name: str, size: int, time: int, why: str) -> dict[str, Any]:
    path = f"{folder}/{name}" if kind == "output" else name
    return {"kind": kind, "name": path, "bytes": size, "time": time_text(time), "why": why}


def _ask(settings: Settings, rows: list[dict[str, Any]]) -> None:
    """Ask the user for consent, and abort without it. Raises :class:`CommandError` without a
    terminal.
    """
    if settings.json or not sys.stdin.isatty():
        raise CommandError(
            "InvalidOption",
            "to delete this needs your consent, and there is no terminal to ask at; repeat the "
            "command with --yes",
        )
    size = human_bytes(sum(row["bytes"] for row in rows))
    what = "this" if len(rows) == 1 else f"these {len(rows)}"
    click.confirm(f"delete {what} for good, {size} at most?", abort=True, err=True)


def _delete(settings: Settings, image: str) -> None:
    call(settings, "DeleteImage", image)
    _say(settings, "image", image)


def _remove(settings: Settings, folder: str, names: list[str], older: float) -> bool:
    """Remove output folders, and return whether all are gone. phosd looks again whether they are
    needed: those of an image that could not be deleted are.
    """
    gone: list[str] = []
    for some in _parts(names):
        gone += call(settings, "RemoveOutputs", folder, some, older=older)
    return _told(settings, "output", {f"{folder}/{name}": name in gone for name in names})


def _remove_files(settings: Settings, paths: list[str], older: float | None) -> bool:
    """Remove files that restores have left, and return whether all are gone."""
    gone: list[str] = []
    for some in _parts(paths):
        gone += call(settings, "RemoveFiles", some, older=older)
    return _told(settings, "file", {path: path in gone for path in paths})


def _parts(names: list[str]) -> Iterator[list[str]]:
    """Yield the names in parts that a call may have."""
    part: list[str] = []
    size = 0
    for name in names:
        its = len(os.fsencode(name)) + _AROUND
        if part and size + its > _AT_ONCE:
            yield part
            part, size = [], 0
        part.append(name)
        size += its
    if part:
        yield part


def _told(settings: Settings, kind: str, removed: dict[str, bool]) -> bool:
    """Tell for each path whether it was removed; return whether all were."""
    for path, gone in removed.items():
        if gone:
            _say(settings, kind, path)
        else:
            text = f"{path} is needed meanwhile, and stays"
            settings.tell(CommandError("Busy", text), name=path)
    return all(removed.values())


def _say(settings: Settings, kind: str, name: str) -> None:
    if settings.json:
        settings.emit({"kind": kind, "name": name, "deleted": True})
    else:
        settings.say(f"{name} is deleted")
