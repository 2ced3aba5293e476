"""Implement ``phos rm``: delete images."""

import click

from phosd.cli.client import call
from phosd.cli.settings import Settings, command


@command()
@click.argument("images", nargs=-1, required=True)
def rm(settings: Settings, images: tuple[str, ...]) -> None:
    """Delete IMAGES for good. If one cannot be deleted, the others still are, and the exit code
    tells that one failed.

    \b
    Example:
      phos rm 20261120T153012-3fa9
    """

    def delete(image: str) -> None:
        call(settings, "DeleteImage", "sa{sv}", image, {})
        if settings.json:
            settings.emit({"image": image, "deleted": True})
        else:
            settings.say(f"{image} is deleted")

    settings.each("image", images, delete)
