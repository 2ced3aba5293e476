"""Implement ``phos restore``: run a program again from an image."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.commands.images import output_of
from phosd.cli.following import Output
from phosd.cli.job import summary, watch
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.interface.options import RestoreOptions

_MOST_CLONES = 1000


@command()
@click.argument("image", type=options.IMAGE)
@options.stated(
    RestoreOptions,
    but=("output", "end", "pid_namespace", "clone", "gpu", "cgroups_of", "follower"),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the program's output goes if it was a pipe or a terminal; of several clones, to "
    "FILE.clone-NAME.",
)
@click.option(
    "--pidns",
    is_flag=True,
    help="In a pid namespace of its own, where its pids are free, as is always done with a program "
    "that was in one.",
)
@click.option(
    "--clone",
    "clones",
    type=click.IntRange(1, _MOST_CLONES),
    is_flag=False,
    flag_value=1,
    metavar="[N]",
    help="Restore N clones (1), each in a pid namespace of its own, while the original runs or "
    "after it has ended. One after the other; if one fails, the others are made all the same.",
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    type=options.GPU,
    metavar="GPU|OLD:NEW,...",
    help="A GPU of this node, by its number or the beginning of its UUID; for a program that used "
    "several, OLD:NEW for each, OLD being as it was numbered (default: the same GPU, if it is here "
    "and has room, or another one of the same chip).",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Print what the program writes to its output from then on, until it ends; Ctrl-C leaves "
    "it running.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would stand in the way of a restore here and now.",
)
def restore(
    settings: Settings,
    image: str,
    output: Path | None,
    pidns: bool,
    clones: int | None,
    gpus: tuple[str, ...],
    hollow: bool | None,
    follow: bool,
    dry_run: bool,
    **policies: str | None,
) -> None:
    """Run a program again from its image. It goes on from where it was, under its old pid. In a pid
    namespace it has its old pid for itself, and another one outside.

    \b
    Examples:
      phos restore latest
      phos restore latest --dry-run        could it be restored here and now?
      phos restore bert --follow           and show what it prints
      phos restore bert@3                  from an older image of bert's
      phos restore 20261120T153012-3fa9
      phos restore 20261120T153012-3fa9 --output /tmp/train.log
      phos restore latest --clone 4        four copies, beside the original
      phos restore latest --gpu 1          on another GPU of the same chip
      phos restore latest --gpu 0:2,1:3    what was on GPUs 0 and 1 comes to 2 and 3
      phos restore latest --clone 2 --hollow   two that `phos resume` starts in a moment
    """
    if clones is None and (policies["clone_files"] or policies["clone_ports"]):
        raise click.UsageError("--clone-files and --clone-ports say how to --clone")
    if follow and (clones is not None or dry_run or hollow or settings.json):
        raise click.UsageError("--follow is for one program that goes on, and for people")
    given: dict[str, str | bool] = {key: value for key, value in policies.items() if value}
    if output:
        given["output"] = str(output.absolute())
    if pidns:
        given["pid_namespace"] = True
    if gpus:
        given["gpu"] = ",".join(gpus)
    if hollow:
        given["hollow"] = True
    image = resolve(settings, image)
    names = _names(clones) if clones is not None else ()
    if dry_run:
        from phosd.cli.dry_run import tell_checks

        if names:
            given["clone"] = names[0]
        if len(names) > 1:
            settings.note(
                f"one clone is checked; {len(names)} need {len(names)} times its memory and GPU"
            )
        tell_checks(settings, "TryRestore", image, **given)
        return
    if not names:
        places = [str(output)] if output else output_of(settings, image)
        written = Output(places) if follow else None
        pid = _restore(settings, image, given, ", ".join(places))
        if written is not None:
            written.show(settings, pid)
        return

    def clone(name: str) -> None:
        wanted = given | {"clone": name}
        if output and len(names) > 1:
            wanted["output"] = f"{given['output']}.clone-{name}"
        _restore(settings, image, wanted, str(wanted.get("output", "")))

    settings.each("clone", names, clone)


def _names(count: int) -> tuple[str, ...]:
    """Return names for so many clones, which no others have."""
    common = secrets.token_hex(3)
    return tuple(f"{common}-{number}" for number in range(1, count + 1))


def _restore(settings: Settings, image: str, wanted: Mapping[str, str | bool], place: str) -> int:
    """Restore the program; return its pid."""
    job = watch(settings, "Restore", image, **wanted)
    if settings.json:
        return int(job["Result"])
    for note in job["Notes"]:
        settings.note(note)
    name = f"clone {wanted['clone']}: " if "clone" in wanted else ""
    runs = "runs" if name else "runs again"
    if wanted.get("hollow"):
        runs = f"is suspended and hollow (`phos resume {job['Result']}` starts it)"
    settings.note(f"{name}process {job['Result']} {runs}, after {summary(job)}")
    if place:
        settings.note(f"its output goes on in {place}")
    settings.say(job["Result"])
    return int(job["Result"])
