"""Implement ``phos images``: list and show images."""

import os
import shlex
from typing import Any

import click

from phosd.bus import CallError, path_of
from phosd.cli import options
from phosd.cli.client import ask, if_missing, objects, properties
from phosd.cli.command import command
from phosd.cli.names import resolve
from phosd.cli.run_command.crashes import MOST, SOON
from phosd.cli.settings import Settings
from phosd.client.text import WITHIN, human_bytes
from phosd.client.times import local_time, time_text
from phosd.client.users import of_yours, user_name
from phosd.interface.methods import IMAGE

_BLOCK = ("pid", "id", "address", "size", "gpu", "chunks", "stored_bytes", "shared_bytes")
_TO_THE_MINUTE = len("2026-11-20 15:30")
_NOTE = 30
"""Characters of a note in the list."""
_PAGE = 5_000
"""Blocks per call."""


@command()
@click.argument("image", type=options.IMAGE, required=False)
def images(settings: Settings, image: str | None) -> None:
    """List the images, or show one. The list begins with the oldest image. With IMAGE it tells all
    about one: the device memory that it holds, in the order in which it is loaded, and its files,
    with what restores have LEFT beside them. SHARED is what of STORED an older image holds, too. An
    image in memory is being written to the disk; until it is durable, it is lost if the machine
    ends.

    \b
    Examples:
      phos images
      phos images 20261120T153012-3fa9
      phos images latest
    """
    if image is not None:
        _show(settings, resolve(settings, image))
        return
    rows = [_row(image) for image in objects(settings, IMAGE, "ListImages")]
    # The owner of all that a user has is the first to be left out.
    own = all(row["owner"] == os.geteuid() for row in rows)
    noted = any(row["note"] for row in rows)
    rehearsed = any(row["rehearsed"] is not None for row in rows)
    least = ["SHARED", "VERIFIED", "MODE", "STORED", "STATE", "SIZE"]
    least += ["REHEARSED"] * rehearsed + [WITHIN] + ["NOTE"] * noted
    settings.rows(
        sorted(rows, key=lambda row: str(row["id"])),
        {
            "IMAGE": lambda row: row["id"],
            **({"NAME": _name} if any(row["name"] for row in rows) else {}),
            "CREATED": lambda row: local_time(row["created"])[:_TO_THE_MINUTE],
            **({WITHIN: _within} if any(row["within"] for row in rows) else {}),
            "OWNER": lambda row: row["owner_name"],
            "PID": lambda row: str(row["pid"]),
            "SIZE": lambda row: human_bytes(row["total_bytes"]),
            "STORED": lambda row: human_bytes(row["stored_bytes"]),
            "SHARED": lambda row: human_bytes(row["shared_bytes"]) if row["shared_bytes"] else "",
            "MODE": lambda row: row["mode"],
            "STATE": _state,
            "VERIFIED": _verified,
            **({"REHEARSED": _rehearsed} if rehearsed else {}),
            **({"NOTE": _short_note} if noted else {}),
            "COMMAND": lambda row: (shlex.join(row["command"]), _damage(row)),
        },
        spare=("OWNER", *least, "CREATED") if own else (*least, "OWNER", "CREATED"),
        cut=True,
        empty=f"there are no images{of_yours()}; `phos checkpoint PID` makes one, and `phos ps` "
        "lists what can be saved",
    )


def _show(settings: Settings, image: str) -> None:
    path = path_of("image", image)
    with if_missing("NoSuchImage", f"there is no image {image}; `phos images` lists them"):
        row = _row(properties(settings, path, IMAGE))
        row["blocks"] = _blocks(settings, path)
        row["files"] = _files(settings, path)
    if settings.json:
        settings.emit(row)
        return
    shared = f", {human_bytes(row['shared_bytes'])} of it shared" if row["shared_bytes"] else ""
    settings.facts(
        {
            "image": row["id"],
            "name": _name(row),
            "created": local_time(row["created"]),
            "program": f"{row['pid']} of {row['owner_name']}: {shlex.join(row['command'])}",
            "in": _within(row),
            "mode": f"{row['mode']}: {row['why']}" if row["why"] else row["mode"],
            "stopped": f"{row['stop_seconds']:.2f} s",
            "size": human_bytes(row["total_bytes"]),
            "stored": human_bytes(row["stored_bytes"]) + shared,
            "parent": row["parent"] or "",
            "state": row["state"],
            "verified": _verified(row),
            "rehearsed": _rehearsal(row),
            "crashes": _crashes(row),
            "note": _note(row),
            "output": ", ".join(row["output"]),
        }
    )
    settings.rows(
        row["blocks"],
        {
            "PID": lambda block: str(block["pid"]),
            "BLOCK": lambda block: str(block["id"]),
            "ADDRESS": lambda block: f"{block['address']:#x}",
            "SIZE": lambda block: human_bytes(block["size"]),
            "GPU": lambda block: "host" if block["gpu"] < 0 else str(block["gpu"]),
            "STORED": lambda block: human_bytes(block["stored_bytes"]),
            "SHARED": lambda block: human_bytes(block["shared_bytes"]),
        },
        spare=("SHARED", "STORED"),
    )
    _show_files(settings, row["files"])


def _show_files(settings: Settings, files: list[dict[str, Any]]) -> None:
    """Show the files that an image holds, if any, and what restores have left of each."""
    if not files:
        return
    settings.rows(
        files,
        {
            "FILE": lambda file: file["path"],
            "SIZE": lambda file: human_bytes(file["bytes"]),
            "LEFT": lambda file: str(len(file["left"]) or ""),
            "TAKES": lambda file: human_bytes(_left_bytes(file)) if file["left"] else "",
            "LAST": lambda file: local_time(file["left"][-1]["time"]) if file["left"] else "",
        },
    )
    if left := sum(_left_bytes(file) for file in files):
        settings.say(
            f"restores have left newer versions beside them, {human_bytes(left)}; "
            "`phos prune --files 7d` deletes those that were left more than a week ago"
        )


def _files(settings: Settings, path: str) -> list[dict[str, Any]]:
    """Return the files of an image. Without them all else is shown, too: their file system may not
    answer, or their user be gone.
    """
    try:
        return [_file(*each) for each in ask(settings, path, IMAGE, "ListFiles")]
    except CallError as error:
        if error.name.endswith((".UnknownObject", ".NoSuchImage")):
            raise
        settings.note(f"phos: the files of the image are not listed: {error}")
        return []


def _file(path: str, size: int, left: list[tuple[str, int, int]]) -> dict[str, Any]:
    versions = [
        {"path": path, "bytes": size, "time": time_text(time)}
        for path, size, time in sorted(left, key=lambda each: each[2])
    ]
    return {"path": path, "bytes": size, "left": versions}


def _left_bytes(file: dict[str, Any]) -> int:
    return sum(int(each["bytes"]) for each in file["left"])


def _blocks(settings: Settings, path: str) -> list[dict[str, Any]]:
    """Return all blocks of an image, page by page."""
    blocks: list[dict[str, Any]] = []
    while True:
        page = ask(settings, path, IMAGE, "ListBlocks", limit=_PAGE, offset=len(blocks))
        blocks += (dict(zip(_BLOCK, block, strict=True)) for block in page)
        if len(page) < _PAGE:
            return blocks


def output_of(settings: Settings, image: str) -> list[str]:
    """Return the files to which the program of an image writes its output; none if there are none,
    or the image was deleted meanwhile.
    """
    try:
        found = properties(settings, path_of("image", image), IMAGE)
    except CallError as error:
        if not error.name.endswith(".UnknownObject"):
            raise
        return []
    return list(found.get("Output", []))


def _state(row: dict[str, Any]) -> str:
    return f"crashes ({row['crashes']})" if row["crashes"] else str(row["state"])


def _crashes(row: dict[str, Any]) -> str:
    """Return what came of the last restores by ``phos run --resume``; nothing if all was well."""
    if not row["crashes"]:
        return ""
    left = "; `phos run --resume` takes the one before it" if row["crashes"] >= MOST else ""
    return f"{row['crashes']} times in a row within {SOON:.0f} s of its restore{left}"


def _damage(row: dict[str, Any]) -> str:
    return "" if row["whole"] in (None, True) else "  (DAMAGED: it cannot be restored)"


def _name(row: dict[str, Any]) -> str:
    return f"{row['name']}@{row['number']}" if row["name"] else ""


def _note(row: dict[str, Any]) -> str:
    return row["note"] or ""


def _within(row: dict[str, Any]) -> str:
    return row["within"] or ""


def _short_note(row: dict[str, Any]) -> str:
    note = _note(row)
    return note if len(note) <= _NOTE else f"{note[: _NOTE - 1]}…"


def _verified(row: dict[str, Any]) -> str:
    if row["verified"] is None:
        return "never"
    return "whole" if row["whole"] else "DAMAGED"


def _rehearsed(row: dict[str, Any]) -> str:
    if row["rehearsed"] is None:
        return ""
    return "FAILED" if row["rehearsal_error"] else "done"


def _rehearsal(row: dict[str, Any]) -> str:
    """Return when the restore was rehearsed last, and what came of it."""
    if row["rehearsed"] is None:
        return ""
    done = "all of it was made, and nothing ran"
    return f"{local_time(row['rehearsed'])}: {row['rehearsal_error'] or done}"


def _row(image: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": image["Id"],
        "created": time_text(image["Created"]),
        "owner": image["Owner"],
        "owner_name": user_name(image["Owner"]),
        "pid": image["Pid"],
        "total_bytes": image["TotalBytes"],
        "device_bytes": image["DeviceBytes"],
        "stored_bytes": image["StoredBytes"],
        "shared_bytes": image["SharedBytes"],
        "mode": image["Mode"],
        "state": image.get("State", "durable"),  # an older phosd has no other
        "why": image.get("Why", ""),
        "wrong_guesses": image["WrongGuesses"],
        "parent": image["Parent"] or None,
        "gpus": [{"uuid": uuid, "chip": chip} for uuid, chip in image["GPUs"]],
        "stop_seconds": image["StopSeconds"],
        "verified": time_text(image["Verified"]) if image["Verified"] else None,
        "whole": image["VerifiedWhole"] if image["Verified"] else None,
        "command": image.get("CommandLine", []),
        "output": image.get("Output", []),
        "name": image.get("Name") or None,
        "number": image.get("Number") or None,
        "within": image.get("Within") or None,
        "note": image.get("Note") or None,
        "rehearsed": time_text(image["Rehearsed"]) if image.get("Rehearsed") else None,
        "rehearsal_error": image.get("RehearsalError") or None,
        "crashes": image.get("Crashes", 0),
    }
