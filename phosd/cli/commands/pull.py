"""Implement ``phos pull``."""

import click

from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import summary
from phosd.cli.settings import Settings
from phosd.cli.transferring import dry_run, import_options, run, tell, wanted
from phosd.client.remote import Remote
from phosd.client.text import human_bytes


@command()
@click.argument("url")
@click.argument("image", default="latest")
@import_options
@click.option("--list", "list_only", is_flag=True, help="Pull nothing; list the images there.")
def pull(
    settings: Settings,
    url: str,
    image: str,
    trust: bool,
    owner: str | None,
    anyway: bool,
    again: bool,
    dry_run_only: bool,
    list_only: bool,
) -> None:
    """Store an image that was pushed. `phos push` has brought it to URL. IMAGE is the id that it
    has there, the beginning of that, or the name of a program for its newest image (default: the
    newest image of all). It is yours then, with an id of this machine, as after `phos import`.
    An image that is here already, as it was pushed from here or pulled before, is not stored again.

    \b
    Examples:
      phos pull s3://training/images --list
      phos pull s3://training/images --dry-run
      phos pull s3://training/images bert
      phos pull s3://training/images 20261120T153012
    """
    remote = Remote(url, settings.note)
    if list_only:
        _list(settings, remote)
        return
    given = wanted(owner, anyway=anyway, again=again, trust=trust)
    head = remote.find(image)
    if dry_run_only:
        dry_run(settings, head, given)
        return
    job, sent = run(settings, url, remote.source(head).pull, "Import", **given)
    tell(settings, job["Result"], sent)
    if not settings.json:
        tell_notes(settings, job)
        there = head.contents.image
        of = f"{there.id}, made at {there.created}, of {url}"
        settings.note(f"image {of} is here as {job['Result']}, after {summary(job)}")
        settings.say(job["Result"])


def _list(settings: Settings, remote: Remote) -> None:
    rows = []
    for head in remote.heads(remote.images()):
        contents = head.contents
        rows.append(
            {
                "image": contents.image.id,
                "name": contents.image.name or None,
                "bytes": contents.size,
                "signed": bool(head.signature),
            }
        )
    settings.rows(
        rows,
        {
            "IMAGE": lambda row: row["image"],
            "NAME": lambda row: row["name"] or "",
            "SIZE": lambda row: human_bytes(row["bytes"]),
            "SIGNED": lambda row: "yes" if row["signed"] else "no",
        },
        empty=f"there are no images at {remote.url}; `phos push IMAGE URL` brings them there",
    )
