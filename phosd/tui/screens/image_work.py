"""Run actions on images from any screen that shows them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from phosd.client.records import Image
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import Cell, command_line, human_bytes, plain, since
from phosd.tui.widgets.dialogs import Choice, Field, Form, Question

_MOST_NAMED = 5
"""Most images that a question names; beyond, it gives their number."""


def restore(screen: NodeScreen, images: Sequence[Image]) -> None:
    """Restore each image."""
    for image in images:
        screen.ask(f"Restore {image.id}", screen.node.call("Restore", image.id))


def restore_with(screen: NodeScreen, image: Image) -> None:
    """Restore one image, asking for options first."""
    choices: list[Choice | Field] = [
        Choice("files", "Files that have changed since",
               [("put those back that the image has; the newer stay beside", "rollback"),
                ("cut those that have grown to their length; the rest is put beside", "cut"),
                ("keep them: the restore is refused", "keep"),
                ("go on with them as they are", "as-is")]),
        *_places(),
    ]  # fmt: skip
    _restore_so(screen, image, "Restore", choices)


def clone(screen: NodeScreen, image: Image) -> None:
    """Restore one image beside the program, asking for a name and options first."""
    choices: list[Choice | Field] = [
        Field("clone", "What its files end with: FILE.clone-...",
              f"{image.name}-2" if image.name else "",
              "up to 32 letters, digits, and any of _ -", _name_trouble),
        Choice("clone_files", "Files on the disk that it writes to",
               [("it gets a copy of each", "copy"),
                ("it may share those that it appends to", "share"),
                ("refuse it if there are any", "refuse")]),
        Choice("clone_ports", "TCP ports that another program has by now",
               [("it listens on others", ""),
                ("refuse it if there are any", "refuse")]),
        *_places(),
    ]  # fmt: skip
    _restore_so(screen, image, "Clone", choices)


def _places() -> list[Field]:
    """Return the questions where a program goes on."""
    return [
        Field("output", "Where its output goes, if that was a pipe or a terminal",
              hint="/path/of/a/file", check=_output_trouble),
        Field("gpu", "On which GPU; OLD:NEW,... if it used several",
              hint="the same, or one like it"),
    ]  # fmt: skip


def _restore_so(
    screen: NodeScreen, image: Image, what: str, choices: Sequence[Choice | Field]
) -> None:
    """Ask, and restore the image with the answers as options."""

    def given(options: dict[str, str] | None) -> None:
        if options is not None:
            work = screen.node.call("Restore", image.id, **{k: v for k, v in options.items() if v})
            screen.ask(f"{what} {image.id}", work)

    gone = partial(_gone, screen, [image])
    screen.app.push_screen(Form(f"{what} {_named(image)}", choices, what, gone), given)


def _name_trouble(text: str) -> str:
    return "" if text else "a clone needs a name for its files; without, it would be a restore"


def _output_trouble(text: str) -> str:
    if not text or Path(text).is_absolute():
        return ""
    return f"{text!r} is no absolute path; phosd writes the file, and has another folder"


def verify(screen: NodeScreen, images: Sequence[Image]) -> None:
    """Verify each image."""
    for image in images:
        screen.ask(f"Verify {image.id}", screen.node.call("VerifyImage", image.id))


def rehearse(screen: NodeScreen, images: Sequence[Image]) -> None:
    """Rehearse the restore of each image."""
    for image in images:
        work = screen.node.call("VerifyImage", image.id, rehearse=True)
        screen.ask(f"Rehearse {image.id}", work)


def write_note(screen: NodeScreen, image: Image) -> None:
    """Write a note of an image, or take it away."""

    def given(answers: dict[str, str] | None) -> None:
        if answers is not None and answers["note"] != image.note:
            screen.ask(f"Note of {image.id}", _write_note(screen, image, answers["note"]))

    field = Field("note", "A line of your own; empty: none", image.note, "before the new rate")
    gone = partial(_gone, screen, [image])
    screen.app.push_screen(Form(f"Note of {_named(image)}", [field], "Write", gone), given)


async def _write_note(screen: NodeScreen, image: Image, note: str) -> str:
    await screen.node.ask(image, "SetNote", note)
    return "it is written" if note else "it has none any more"


def delete(screen: NodeScreen, images: Sequence[Image]) -> None:
    """Delete the images after a confirmation."""
    there = partial(_there, screen, images)
    now = screen.node.now()
    if len(images) == 1:
        age = f"made {since(images[0].created, now)} ago" if images[0].created else ""
        size = f"{human_bytes(images[0].stored_bytes)} on disk"
        what = f"image {_named(images[0])}, {', '.join(filter(None, (size, age)))}"
    else:
        names = [plain(image.id) for image in images[:_MOST_NAMED]]
        more = f" and {len(images) - _MOST_NAMED} more" if len(images) > _MOST_NAMED else ""
        size = human_bytes(sum(image.stored_bytes for image in images))
        what = f"{len(images)} images, {size} on disk: {', '.join(names)}{more}"

    def answered(yes: bool | None) -> None:
        for image in there() if yes else ():
            screen.ask(f"Delete {image.id}", _delete(screen, image))

    question = f"Delete {what}?\n\nWhat it holds cannot be brought back."
    screen.app.push_screen(Question(question, "Delete", partial(_gone, screen, images)), answered)


def _gone(screen: NodeScreen, images: Sequence[Image]) -> str:
    """Return why the action is void: all the images are gone; an empty string otherwise."""
    if _there(screen, images):
        return ""
    return "It is not there any more." if len(images) == 1 else "None is there any more."


def _there(screen: NodeScreen, images: Sequence[Image]) -> list[Image]:
    """Return the images that phosd still has."""
    known = screen.node.of(Image)
    return [image for image in images if image.path in known]


async def _delete(screen: NodeScreen, image: Image) -> str:
    await screen.node.call("DeleteImage", image.id)
    return "it is deleted"


def verified_cell(screen: NodeScreen, image: Image) -> Cell:
    """Return the result and age of the last verification or rehearsal, or the progress of a job on
    the image.
    """
    job = screen.node.job_of(image.id)
    if job is not None:
        share = "" if job.progress is None else f" {job.progress:.0%}"
        if job.state == "queued":
            return "◌ queued", "dim"
        return f"▶ {plain(job.operation)}{share}", "accent"
    now = screen.node.now()
    if image.whole is False:
        return f"✗ DAMAGED {since(image.verified, now)}", "bad"
    if image.rehearsed is not None and image.rehearsed >= (image.verified or 0.0):
        age = since(image.rehearsed, now)
        failed = (f"✗ no restore {age}", "bad")
        return failed if image.rehearsal_error else (f"✓ rehearsed {age}", "good")
    if image.whole is None:
        return "never", "dim"
    return f"✓ {since(image.verified, now)} ago", "good"


def _named(image: Image) -> str:
    return f"{plain(image.id)} of {image.pid} ({command_line(image.command)})"
