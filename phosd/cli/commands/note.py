"""Implement ``phos note``: write and show the notes of images."""

import click

from phosd.bus import path_of
from phosd.cli import options
from phosd.cli.client import ask, if_missing, properties
from phosd.cli.command import command
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.interface.methods import IMAGE


@command()
@click.argument("image", type=options.IMAGE)
@click.argument("text", required=False)
def note(settings: Settings, image: str, text: str | None) -> None:
    """Write the note of an image, or show it. It is a line that tells the image apart, and is kept
    with the image, in place of the one before; an empty one takes that away. A user who may delete
    the image may write it. `phos images` lists it.

    \b
    Examples:
      phos note bert "before the learning rate went up"
      phos note bert                                     show it
      phos note bert ""                                  take it away
    """
    image = resolve(settings, image)
    path = path_of("image", image)
    with if_missing("NoSuchImage", f"there is no image {image}; `phos images` lists them"):
        if text is not None:
            ask(settings, path, IMAGE, "SetNote", text)
        found = properties(settings, path, IMAGE).get("Note") or None
    if settings.json:
        settings.emit({"image": image, "note": found})
    elif text is not None:
        settings.say(f"{image} has a note now" if found else f"{image} has no note any more")
    elif found:
        settings.say(found)
    else:
        settings.note(f'image {image} has no note; `phos note {image} "TEXT"` writes one')
