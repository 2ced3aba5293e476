"""Implement ``phos rm``: delete images."""

import functools
import sys
from collections.abc import Sequence

import click

from phosd.cli import options
from phosd.cli.client import call, objects
from phosd.cli.command import command
from phosd.cli.names import LATEST, resolve
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.client.text import human_bytes
from phosd.client.times import local_time, time_text
from phosd.client.users import user_name
from phosd.interface.methods import IMAGE


@command()
@click.argument("images", type=options.IMAGE, nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask. Without a terminal nothing is asked.")
def rm(settings: Settings, images: tuple[str, ...], yes: bool) -> None:
    """Delete images for good. On a terminal a question says first what they are. If one cannot be
    deleted, the others still are, and the exit code tells that one failed. latest will not do here,
    since a new image may take that name before you have typed it.

    \b
    Examples:
      phos rm 20261120T153012-3fa9
      phos rm bert 20261120 --yes
    """

    @functools.cache
    def id_of(image: str) -> str:
        if image.rpartition("/")[2] == LATEST:
            raise CommandError(
                "InvalidOption", "name the image to delete; `phos images latest` has its id"
            )
        return resolve(settings, image)

    if not (yes or settings.json) and sys.stdin.isatty():
        _ask(settings, [id_of(image) for image in images])

    def delete(image: str) -> None:
        image = id_of(image)
        call(settings, "DeleteImage", image)
        if settings.json:
            settings.emit({"image": image, "deleted": True})
        else:
            settings.say(f"{image} is deleted")

    settings.each("image", images, delete)


def _ask(settings: Settings, ids: Sequence[str]) -> None:
    """Show what would be deleted, and ask the user for consent; abort without it."""
    known = {image["Id"]: image for image in objects(settings, IMAGE, "ListImages")}
    for image in (known[each] for each in ids if each in known):
        name = f"{image['Name']}@{image['Number']}, " if image.get("Name") else ""
        settings.note(
            f"{image['Id']}: {name}of {user_name(image['Owner'])}, made "
            f"{local_time(time_text(image['Created']))}, {human_bytes(image['StoredBytes'])}"
        )
    what = "this image" if len(ids) == 1 else f"these {len(ids)} images"
    if ids:
        click.confirm(f"delete {what} for good?", abort=True, err=True)
