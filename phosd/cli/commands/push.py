"""Implement ``phos push``."""

from pathlib import Path

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.job import summary
from phosd.cli.names import resolve
from phosd.cli.settings import Settings
from phosd.cli.transferring import run, sign, tell
from phosd.client.text import human_bytes


@command()
@click.argument("image", type=options.IMAGE)
@click.argument("url")
@sign
def push(settings: Settings, image: str, url: str, key: Path | None) -> None:
    """Bring an image to a bucket or a folder. `phos pull` takes it from URL to another machine. URL
    is anything that fsspec knows. Only what is not there yet is sent. A push that was interrupted
    goes on where it was. Your own credentials are used, as the tools of the place take them.

    \b
    Examples:
      phos push bert s3://training/images --sign ~/.ssh/id_ed25519
      phos push latest file:///mnt/shared/images
    """
    from phosd.client.remote import Remote

    image = resolve(settings, image)
    remote = Remote(url)
    try:
        job, sent = run(settings, url, lambda link: remote.push(link, key), "Export", image)
    except Exception:
        if remote.begun and not settings.json:
            settings.note("what has come there as a whole stays, and the next push goes on from it")
        raise
    tell(settings, image, sent)
    if not settings.json:
        new = f"{human_bytes(sent.sent_bytes)} of {human_bytes(sent.bytes)} were sent"
        settings.say(f"{image} is at {url}: {new}, in {summary(job)}")
