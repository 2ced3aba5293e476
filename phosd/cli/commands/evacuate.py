"""Implement ``phos evacuate``: move all processes off a GPU."""

import os
import sys
from dataclasses import asdict

import click

from phosd.bus import CallError
from phosd.cli import options
from phosd.cli.client import call, objects
from phosd.cli.command import command
from phosd.cli.job import summary, watch
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError, Exit, in_words
from phosd.client.evacuation import Step
from phosd.client.text import human_bytes
from phosd.interface.methods import GPU

_ENDS_ALL = ("Cancelled", "NoDaemon")
"""Errors of one step after which the other steps are not tried."""


@command()
@click.argument("gpu", type=options.GPU)
@click.option("--dry-run", is_flag=True, help="Show the plan, and do nothing.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
def evacuate(settings: Settings, gpu: str, dry_run: bool, yes: bool) -> None:
    """Clear a GPU of its programs. Your processes on GPU, or as root everybody's, move to the GPUs
    of the same chip with most memory free. What fits nowhere is suspended. The plan is shown first.

    \b
    Examples:
      phos evacuate 0 --dry-run
      phos evacuate 0
      phos evacuate GPU-5f3a --yes --json

    One process after the other is moved. If one cannot be moved, the others still are. The exit
    code is 1 if a process of yours is on the GPU afterwards: because it could not be moved, because
    the plan lets it stay, or because it has come meanwhile. Programs that were not started with
    `phos run` stay: `phos migrate --mode driver` moves them, but they stand still meanwhile. What
    others have there is listed as far as the GPU names it, and is no failure.
    """
    steps = _plan(settings, gpu)
    if settings.json:
        for step in steps:
            settings.emit({"gpu": gpu} | asdict(step))
    elif steps:
        _show(settings, steps)
    else:
        settings.say(f"nothing that you may move is on GPU {gpu}")
    if dry_run or not steps:
        return
    todo = [step for step in steps if step.action != "stay"]
    if todo and not yes:
        _ask(settings, gpu)
    _do(settings, gpu, todo)
    left = sorted(step.pid for step in _plan(settings, gpu))
    others = _others(settings, gpu, {*left, *(step.pid for step in steps)})
    if settings.json:
        settings.emit({"gpu": gpu, "left": left, "others": others})
    elif left:
        settings.note(f"GPU {gpu} is not clear: {_pids(left)} still there")
    elif others:
        settings.say(f"nothing of yours is left on GPU {gpu}; {_pids(others)} there, of others")
    elif _sees_all():
        settings.say(f"GPU {gpu} is clear")
    else:
        settings.say(f"nothing of yours is left on GPU {gpu}")
    if left:
        sys.exit(Exit.FAILED)


def _plan(settings: Settings, gpu: str) -> list[Step]:
    rows = call(settings, "PlanEvacuation", gpu)
    return [Step(*row) for row in rows]


def _show(settings: Settings, steps: list[Step]) -> None:
    settings.rows(
        [asdict(step) | {"text": step.text} for step in steps],
        {
            "PID": lambda row: str(row["pid"]),
            "MEMORY": lambda row: human_bytes(row["device_bytes"]),
            "PLAN": lambda row: row["text"],
            "WHY": lambda row: row["why"],
            "COMMAND": lambda row: row["command"],
        },
        spare=("MEMORY",),
    )


def _ask(settings: Settings, gpu: str) -> None:
    """Ask the user for consent, and abort without it. Raises :class:`CommandError` without a
    terminal.
    """
    if settings.json or not sys.stdin.isatty():
        raise CommandError(
            "InvalidOption",
            f"to clear GPU {gpu} needs your consent, and there is no terminal to ask at; look at "
            "the plan with --dry-run, then repeat the command with --yes",
        )
    click.confirm(f"evacuate GPU {gpu} as planned?", abort=True, err=True)


def _sees_all() -> bool:
    """Whether the plan includes other users' processes. Only polkit knows whether others than root
    may see them, so this checks for root alone.
    """
    return os.geteuid() == 0


def _others(settings: Settings, gpu: str, known: set[int]) -> list[int]:
    """Return further processes that the GPU reports; none where it does not (the software GPU)."""
    if _sees_all():
        return []
    pids = {
        pid
        for device in objects(settings, GPU, "ListGPUs")
        if str(device["Ordinal"]) == gpu.strip() or device["UUID"].startswith(gpu.strip())
        for pid in device["Processes"]
    }
    return sorted(pids - known)


def _do(settings: Settings, gpu: str, todo: list[Step]) -> None:
    """Run the steps, and report the result of each."""
    for step in todo:
        if step.pid not in [each.pid for each in _plan(settings, gpu)]:
            _say(settings, f"process {step.pid} has left GPU {gpu} already")  # with its group
            continue
        try:
            _say(settings, _done(settings, step))
        except (CommandError, CallError) as caught:
            error = in_words(caught, settings.bus)
            _tell(settings, step, error)
            if error.code in _ENDS_ALL:
                return


def _done(settings: Settings, step: Step) -> str:
    if step.action == "migrate":
        job = watch(settings, "Migrate", step.pid, step.destination)
        return f"process {step.pid} moved {step.text}, in {summary(job)}"
    watch(settings, "Suspend", step.pid)
    return f"process {step.pid} is suspended; `phos resume {step.pid}` brings it back"


def _say(settings: Settings, text: str) -> None:
    if not settings.json:
        settings.say(text)


def _tell(settings: Settings, step: Step, error: CommandError) -> None:
    if settings.json:
        settings.emit({"pid": step.pid} | error.row)
    else:
        settings.note(f"process {step.pid} is where it was: {error}", lines=True)


def _pids(pids: list[int]) -> str:
    one = len(pids) == 1
    return f"process{'' if one else 'es'} {', '.join(map(str, pids))} {'is' if one else 'are'}"
