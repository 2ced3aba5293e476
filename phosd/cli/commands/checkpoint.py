"""Implement ``phos checkpoint``: save a running program."""

from collections.abc import Mapping
from typing import Any

import click

from phosd.cli import options
from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.job import CancelledHereError, summary, watch
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.interface.options import CheckpointOptions
from phosd.units import duration, duration_text


def interval(text: str) -> float:
    """Parse an interval in seconds; ``off`` is 0. Raises :class:`click.BadParameter`."""
    found = 0.0 if text == "off" else duration(text)
    if found is None or (not found and text != "off"):
        raise click.BadParameter(
            f"{text!r} is no interval; write for example 60s, 5min, 2h, or off"
        )
    return found


@command()
@click.argument("pid", type=options.PID)
@options.stated(CheckpointOptions, but=("parent", "then", "in_memory", "every", "keep", "rehearse"))
@click.option(
    "--parent",
    type=options.IMAGE,
    metavar="IMAGE|auto",
    default="",
    help="Save only what differs from this image; auto: from the latest of this process.",
)
@click.option(
    "--end",
    is_flag=True,
    help="End the program when its image is complete and on the disk; until then it stands still, "
    "so that nothing is done twice.",
)
@click.option(
    "--hold",
    is_flag=True,
    help="Let the program stand still, as it is in the image, until `phos continue PID` or Ctrl-C.",
)
@click.option(
    "--in-memory",
    is_flag=True,
    default=None,
    help="With --end: end it when its image is complete in memory. That is sooner, and a machine "
    "that ends before the image is on the disk loses it.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would stand in the way, and in which mode it would be saved.",
)
@click.option(
    "--every",
    callback=lambda _, __, text: None if text is None else interval(text),
    metavar="60s|5min|2h|off",
    help="Do it again and again until the program ends. Each image stores only what has "
    "changed of the device memory, and all else whole.",
)
@click.option(
    "--keep",
    type=click.IntRange(1, 1000),
    help="With --every: how many of these images to keep (default: 5).",
)
@click.option(
    "--rehearse",
    is_flag=True,
    default=None,  # not sent by default: an older phosd does not know it
    help="With --every: rehearse the restore of each of these images, as `phos verify --rehearse` "
    "does. `phos images` and `phos events` tell what would fail.",
)
def checkpoint(
    settings: Settings, pid: int, dry_run: bool, end: bool, hold: bool, **given: Any
) -> None:
    """Save a running program as an image. The process PID and its children are saved; the program
    then goes on, or ends with --end.

    \b
    Examples:
      phos checkpoint 4711
      phos checkpoint bert                         what `phos run --name bert` started
      phos checkpoint 4711 --mode driver
      phos checkpoint 4711 --dry-run               could it be saved?
      phos checkpoint 4711 --durable               before a reboot
      phos checkpoint 4711 --end                   and give its GPUs back
      phos checkpoint 4711 --parent auto           of device memory, only what has changed
      phos checkpoint 4711 --every 60s --keep 5    as insurance, until it ends
      phos checkpoint 4711 --every off
      phos checkpoint 4711 --json | jq -r 'select(.state == "done").result'

    Ctrl-C cancels, with --every for good; the program goes on in any case, unless it was ended.
    """
    wanted = _wanted(settings, given, end=end, hold=hold)
    if dry_run:
        from phosd.cli.dry_run import tell_checks

        tell_checks(settings, "TryCheckpoint", pid, **wanted)
        return
    every = given["every"]
    if every == 0:
        _end_schedule(settings, pid)
        return
    try:
        job = watch(settings, "Checkpoint", pid, **wanted)
    except CancelledHereError:
        if every:
            _end_schedule(settings, pid)
        raise
    except CommandError:
        if every:
            _say(
                settings, f"`phos ps` tells whether it is tried again every {duration_text(every)}"
            )
        raise
    if not settings.json:
        for note in job["Notes"]:
            settings.note(note)
        settings.note(f"saved in {summary(job)} (mode {job['Mode']})")
        if end:
            settings.note(f"process {pid} has ended; `phos restore {job['Result']}` continues it")
        settings.say(job["Result"])
    if every:
        _say(
            settings,
            f"again every {duration_text(every)}; `phos checkpoint {pid} --every off` ends that",
        )


def _wanted(
    settings: Settings, given: Mapping[str, Any], *, end: bool, hold: bool
) -> dict[str, Any]:
    """Return the options that were ``given`` by their names on D-Bus. Raises
    :class:`click.UsageError`.
    """
    if end and hold:
        raise click.UsageError("a program that is to --end cannot --hold, too; give one of them")
    all_given = {**given, "then": "end" if end else "hold" if hold else None}
    _require_possible(all_given)
    wanted = {name: value for name, value in all_given.items() if value is not None}
    if wanted["parent"] not in ("", "auto"):
        wanted["parent"] = resolve(settings, wanted["parent"])
    return wanted


def _require_possible(given: Mapping[str, Any]) -> None:
    """Raise :class:`click.UsageError` if options exclude each other, or one needs another."""
    if given["then"] and given["every"]:
        raise click.UsageError(
            "what repeats (--every) leaves the program running; leave out "
            f"--{given['then']}, or --every"
        )
    if given["in_memory"] and given["then"] != "end":
        raise click.UsageError("--in-memory says when a program is ended; give --end, too")
    if given["keep"] and not given["every"]:
        raise click.UsageError("--keep is for checkpoints that repeat; give --every, too")
    if given["rehearse"] and not given["every"]:
        raise click.UsageError(
            "--rehearse is for checkpoints that repeat; give --every, too, or use "
            "`phos verify --rehearse` when the image is there"
        )


def _end_schedule(settings: Settings, pid: int) -> None:
    call(settings, "Checkpoint", pid, every=0.0)
    if settings.json:
        settings.emit({"pid": pid, "checkpoint_interval": None})
    _say(settings, f"process {pid} has no periodic checkpoints any more; its images stay")


def _say(settings: Settings, text: str) -> None:
    if not settings.json:
        settings.note(text)
