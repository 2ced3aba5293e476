"""Implement ``phos pool``: keep programs of an image ready to be started."""

from typing import Any

import click

from phosd.cli import options
from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.client.pools import Pool
from phosd.client.users import user_name
from phosd.interface.options import PoolOptions


@command()
@click.argument("action", type=click.Choice(["create", "ls", "scale", "rm"]), default="ls")
@click.argument("name", required=False)
@click.argument("image", type=options.IMAGE, required=False)
@options.stated(PoolOptions)
def pool(
    settings: Settings, action: str, name: str | None, image: str | None, **given: int | None
) -> None:
    """Keep programs ready for `phos start`. Each is a clone of an image, has its contexts on a GPU
    and its memory in host memory, which all of them share. When one is started, the next is made.
    Without an action the pools are listed.

    \b
    Examples:
      phos pool create chat bert              one waits, and there are at most eight
      phos pool create chat bert --hollow 3 --max 20
      phos pool                               how many wait, and how many run?
      phos pool scale chat --hollow 1
      phos pool rm chat                       those that were started run on

    Pools outlive phosd. After a reboot their programs are made anew.
    """
    _require_words(action, name, image)
    wanted = {key: value for key, value in given.items() if value is not None}
    if action == "ls":
        _list(settings)
    elif action == "create":
        of = resolve(settings, str(image))
        call(settings, "CreatePool", name, of, **wanted)
        _tell(settings, f"{name} is a pool now, and its programs are made of image {of}")
    elif action == "scale":
        if not wanted:
            raise click.UsageError("say how many, with --hollow or --max")
        call(settings, "ScalePool", name, **wanted)
        _tell(settings, f"{name} has its new size")
    else:
        call(settings, "RemovePool", name)
        _tell(settings, f"{name} is no pool any more, and its programs that waited have ended")


def _require_words(action: str, name: str | None, image: str | None) -> None:
    """Raise if an action lacks a word, or has one too many."""
    words = {"ls": 0, "create": 2}.get(action, 1)
    given = [word for word in (name, image) if word is not None]
    if len(given) < words:
        raise click.UsageError(f"{action} wants " + ("NAME and IMAGE" if words == 2 else "NAME"))
    if len(given) > words:
        raise click.UsageError(f"{action} does not take {given[-1]!r}")


def _list(settings: Settings) -> None:
    rows: list[dict[str, Any]] = [
        Pool(*row)._asdict() | {"trouble": row[-1] or None} for row in call(settings, "ListPools")
    ]
    settings.rows(
        rows,
        {
            "NAME": lambda row: row["name"],
            "OWNER": lambda row: user_name(row["owner"]),
            "IMAGE": lambda row: row["image"],
            "WAITING": lambda row: f"{row['waiting']} of {row['hollow']}",
            "RUNNING": lambda row: str(row["running"]),
            "MAX": lambda row: str(row["max"]),
            "TROUBLE": lambda row: row["trouble"] or "",
        },
        spare=("OWNER", "MAX"),
        empty="no pool; `phos pool create NAME IMAGE` makes one",
    )


def _tell(settings: Settings, text: str) -> None:
    if not settings.json:
        settings.say(text)
