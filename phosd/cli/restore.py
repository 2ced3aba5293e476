"""Implement ``phos restore``: run a program again from an image."""

from pathlib import Path

import click

from phosd.bus import variants
from phosd.cli import options
from phosd.cli.images import output_of
from phosd.cli.job import summary, watch
from phosd.cli.names import resolve
from phosd.cli.settings import Settings, command


@command()
@click.argument("image", type=options.IMAGE)
@click.option(
    "--files",
    type=click.Choice(["keep", "cut"]),
    default="keep",
    show_default=True,
    help="Files that the program only wrote and that grew since: keep refuses the restore, "
    "cut brings them back to their length and puts the rest beside. Append-only logs are fine "
    "with both.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the program's output goes if it was a pipe or a terminal.",
)
@click.option(
    "--pidns",
    is_flag=True,
    help="In a pid namespace of its own, where its pids are free, as is always done with a program "
    "that was in one.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would stand in the way of a restore here and now.",
)
def restore(
    settings: Settings, image: str, files: str, output: Path | None, pidns: bool, dry_run: bool
) -> None:
    """Run the program of IMAGE again from where it was, under its old pid. IMAGE is an id, the
    beginning of one, or latest. In a pid namespace it has its old pid for itself, and another one
    outside.

    \b
    Examples:
      phos restore latest
      phos restore latest --dry-run        could it be restored here and now?
      phos restore 20261120T153012-3fa9
      phos restore 20261120T153012-3fa9 --output /tmp/train.log
    """
    given: dict[str, str | bool] = {"files": files}
    if output:
        given["output"] = str(output.absolute())
    if pidns:
        given["pid_namespace"] = True
    image = resolve(settings, image)
    if dry_run:
        from phosd.cli.dry_run import tell_checks

        tell_checks(settings, "TryRestore", "sa{sv}", image, variants(given))
        return
    job = watch(settings, "Restore", "sa{sv}", image, variants(given))
    if not settings.json:
        for note in job["Notes"]:
            settings.note(note)
        settings.note(f"process {job['Result']} runs again, after {summary(job)}")
        if place := str(output or "") or output_of(settings, image):
            settings.note(f"its output goes on in {place}")
        settings.say(job["Result"])
