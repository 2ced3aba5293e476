"""``phos rm``: delete images."""

import click

from phosd.cli.client import call
from phosd.cli.settings import Settings, command


@command()
@click.argument("images", nargs=-1, required=True)
def rm(settings: Settings, images: tuple[str, ...]) -> None:
    """Delete IMAGES for good.

    \b
    Example:
      phos rm 20261120T153012-3fa9
    """
    for image in images:
        call(settings, "DeleteImage", "sa{sv}", image, {})
        if settings.json:
            settings.emit({"image": image, "deleted": True})
        else:
            settings.out.print(f"{image} is deleted", markup=False)
