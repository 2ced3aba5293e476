"""Implement ``phos pool``: keep programs of an image ready to be started."""

from collections.abc import Mapping
from typing import Any

import click

from phosd.cli import options
from phosd.cli.client import call, objects
from phosd.cli.command import command
from phosd.cli.commands.ps import list_processes
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties
from phosd.client.errors import CommandError
from phosd.client.text import full_text
from phosd.client.users import user_name
from phosd.interface.methods import POOL
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
    Without an action the pools are listed; `ls NAME` lists the programs of one.

    \b
    Examples:
      phos pool create chat bert              one waits, and there are at most eight
      phos pool create chat bert --hollow 3 --max 20
      phos pool create chat bert --ready 1    one more waits with its memory on the GPU
      phos pool                               how many wait, and how many run?
      phos pool ls chat                       which processes are these?
      phos pool scale chat --hollow 1
      phos pool rm chat                       those that were started run on

    Pools outlive phosd. After a reboot their programs are made anew.
    """
    _require_words(action, name, image)
    wanted = {key: value for key, value in given.items() if value is not None}
    if wanted and action in ("ls", "rm"):
        raise click.UsageError(f"{action} takes no --{next(iter(wanted))}")
    if action == "ls":
        if name is None:
            _list(settings)
        else:
            _list_programs(settings, name)
    elif action == "create":
        of = resolve(settings, str(image))
        call(settings, "CreatePool", name, of, **wanted)
        _tell(settings, f"{name} is a pool now, and its programs are made of image {of}")
    elif action == "scale":
        if not wanted:
            raise click.UsageError("say how many, with --hollow, --ready or --max")
        call(settings, "ScalePool", name, **wanted)
        _tell(settings, f"{name} has its new size")
    else:
        call(settings, "RemovePool", name)
        _tell(settings, f"{name} is no pool any more, and its programs that waited have ended")


def _require_words(action: str, name: str | None, image: str | None) -> None:
    """Raise if an action lacks a word, or has one too many."""
    least, most = {"ls": (0, 1), "create": (2, 2)}.get(action, (1, 1))
    given = [word for word in (name, image) if word is not None]
    if len(given) < least:
        raise click.UsageError(f"{action} wants " + ("NAME and IMAGE" if least == 2 else "NAME"))
    if len(given) > most:
        raise click.UsageError(f"{action} does not take {given[-1]!r}")


def _list(settings: Settings) -> None:
    settings.rows(
        sorted(map(_row, objects(settings, POOL, "ListPools")), key=lambda row: str(row["name"])),
        {
            "NAME": lambda row: row["name"],
            "OWNER": lambda row: user_name(row["owner"]),
            "IMAGE": lambda row: row["image"],
            "WAITING": lambda row: f"{row['waiting']} of {row['hollow'] + row['ready']}",
            "READY": lambda row: (
                f"{row['waiting_ready']} of {row['ready']}" if row["ready"] else ""
            ),
            "RUNNING": lambda row: str(row["running"]),
            "MAX": lambda row: str(row["max"]),
            "TROUBLE": _trouble,
        },
        spare=("OWNER", "MAX"),
        empty="no pool; `phos pool create NAME IMAGE` makes one",
    )


def _trouble(row: Mapping[str, Any]) -> str:
    """Return why fewer wait than are to."""
    return row["trouble"] or full_text(
        waiting=row["waiting"],
        wanted=row["hollow"] + row["ready"],
        running=row["running"],
        most=row["max"],
    )


def _row(pool: Properties) -> dict[str, Any]:
    return {
        "name": pool["Name"],
        "owner": pool["Owner"],
        "image": pool["Image"],
        "hollow": pool["Hollow"],
        "ready": pool["Ready"],
        "max": pool["Max"],
        "waiting": pool["Waiting"],
        "waiting_ready": pool["WaitingReady"],
        "running": pool["Running"],
        "trouble": pool["Trouble"] or None,
        "stated": pool.get("Stated", False),
    }


def _list_programs(settings: Settings, name: str) -> None:
    if name not in (row[0] for row in call(settings, "ListPools")):
        raise CommandError("NoSuchProcess", f"there is no pool {name}; `phos pool` lists them")
    list_processes(settings, name)


def _tell(settings: Settings, text: str) -> None:
    if not settings.json:
        settings.say(text)
