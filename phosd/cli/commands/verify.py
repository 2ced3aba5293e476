"""Implement ``phos verify``: compare images with their digests, or rehearse their restores."""

from typing import get_args

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.job import summary, watch
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties
from phosd.interface.options import Files


@command()
@click.argument("images", type=options.IMAGE, nargs=-1, required=True)
@click.option(
    "--rehearse",
    is_flag=True,
    help="Rehearse the restore of each: all is read, device memory is loaded on its GPU, and the "
    "processes are made, in namespaces of their own; they are ended before anything of them runs. "
    "The program that was saved may run meanwhile.",
)
@click.option(
    "--files",
    type=click.Choice(get_args(Files)),
    help="With --rehearse: as of `phos restore`.",
)
def verify(settings: Settings, images: tuple[str, ...], rehearse: bool, files: str | None) -> None:
    """Check that images are whole. All of them is read and compared with their digests; with
    --rehearse their restores are rehearsed. If one is damaged, the others are still read, and the
    exit code tells that one failed.

    \b
    Examples:
      phos verify 20261120T153012-3fa9 && echo whole
      phos verify latest
      phos verify latest --rehearse        would it come back, here and now?
      phos verify $(phos images --json | jq -r .id)
    """
    if files and not rehearse:
        raise click.UsageError("--files says how to --rehearse")
    given: dict[str, bool | str] = {}
    if rehearse:  # an older phosd knows neither
        given = {"rehearse": True, **({"files": files} if files else {})}

    def verify_one(image: str) -> None:
        image = resolve(settings, image)
        job = watch(settings, "VerifyImage", image, **given)
        if settings.json:
            return
        if rehearse:
            for text in (*job["Notes"], _phases(job)):
                settings.note(text)
            settings.say(f"{image} could be restored ({summary(job)})")
        else:
            settings.say(f"{image} is whole ({summary(job)})")

    settings.each("image", images, verify_one)


def _phases(job: Properties) -> str:
    """Say how long each phase took."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, _, seconds, *_ in job["Phases"])
