"""Implement ``phos verify``: compare every byte of an image with its digests."""

import click

from phosd.cli.job import summary, watch
from phosd.cli.settings import Settings, command


@command()
@click.argument("image")
def verify(settings: Settings, image: str) -> None:
    """Read all of IMAGE and compare it with its digests.

    \b
    Example:
      phos verify 20261120T153012-3fa9 && echo whole
    """
    job = watch(settings, "VerifyImage", "sa{sv}", image, {})
    if not settings.json:
        settings.say(f"{image} is whole ({summary(job)})")
