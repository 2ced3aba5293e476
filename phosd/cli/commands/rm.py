"""Implement ``phos rm``: delete images."""

import click

from phosd.cli import options
from phosd.cli.client import call
from phosd.cli.names import LATEST, resolve
from phosd.cli.settings import Settings, command
from phosd.client.errors import CommandError


@command()
@click.argument("images", type=options.IMAGE, nargs=-1, required=True)
def rm(settings: Settings, images: tuple[str, ...]) -> None:
    """Delete IMAGES for good. If one cannot be deleted, the others still are, and the exit code
    tells that one failed. The beginning of an id will do; latest will not, since a new image may
    take that name before you have typed it.

    \b
    Example:
      phos rm 20261120T153012-3fa9
    """

    def delete(image: str) -> None:
        if image == LATEST:
            raise CommandError(
                "InvalidOption", "name the image to delete; `phos images latest` has its id"
            )
        image = resolve(settings, image)
        call(settings, "DeleteImage", image)
        if settings.json:
            settings.emit({"image": image, "deleted": True})
        else:
            settings.say(f"{image} is deleted")

    settings.each("image", images, delete)
