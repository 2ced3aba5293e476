"""Implement ``phos verify``: compare every byte of images with their digests."""

import click

from phosd.cli import options
from phosd.cli.job import summary, watch
from phosd.cli.names import resolve
from phosd.cli.settings import Settings, command


@command()
@click.argument("images", type=options.IMAGE, nargs=-1, required=True)
def verify(settings: Settings, images: tuple[str, ...]) -> None:
    """Read all of IMAGES and compare them with their digests. If one is damaged, the others are
    still read, and the exit code tells that one failed.

    \b
    Examples:
      phos verify 20261120T153012-3fa9 && echo whole
      phos verify latest
      phos verify $(phos images --json | jq -r .id)
    """

    def verify_one(image: str) -> None:
        image = resolve(settings, image)
        job = watch(settings, "VerifyImage", "sa{sv}", image, {})
        if not settings.json:
            settings.say(f"{image} is whole ({summary(job)})")

    settings.each("image", images, verify_one)
