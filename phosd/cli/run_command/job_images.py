"""Bring the images of a Slurm job to where its other nodes find them (``--phos-images``).

Where a program of a job was saved last is written to a file in the home directory, which all nodes
have: the node, and the image at the URL once it is there.
"""

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phosd.cli.run_command.program import runs_folder
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError, in_words
from phosd.errors import InvalidOption, NoSuchImage

if TYPE_CHECKING:
    from phosd.client import Client, Image

_KEPT_DAYS = 90


@dataclass(frozen=True)
class Saved:
    """Where a program was saved last: on which ``node``, and as which ``image`` at the URL; empty
    if it is on the node alone. ``ended``: it has come to its end since, with 0.
    """

    node: str
    image: str = ""
    ended: bool = False


def folder() -> Path:
    """Return the folder of what is known of the user's jobs, without what is too old."""
    found = runs_folder().parent / "slurm"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = time.time() - _KEPT_DAYS * 86_400
    for path in found.iterdir():
        try:
            if path.stat().st_mtime < before:
                path.unlink()
        except FileNotFoundError:  # another job has removed it
            continue
    return found


def saved(name: str) -> Saved | None:
    """Return where the program ``name`` was saved last; None if it was not."""
    try:
        node, image, ended = [*_record(name).read_text().split("\n"), "", ""][:3]
    except FileNotFoundError:
        return None
    return Saved(node, image, bool(ended))


def keep(name: str, where: Saved) -> None:
    """Write down where the program ``name`` was saved."""
    record = _record(name)
    new = record.with_suffix(f".{os.getpid()}")
    new.write_text(f"{where.node}\n{where.image}\n{'ended' if where.ended else ''}\n")
    new.replace(record)


def on_one_node(job: str) -> bool:
    """Return whether a program of a job is on the node alone where it was saved."""
    names = (path.stem for path in folder().glob(f"slurm-{job}-*.node"))
    return any(not (where.image or where.ended) for name in names if (where := saved(name)))


def _record(name: str) -> Path:
    return folder() / f"{name}.node"


def is_newer(client: "Client", name: str) -> bool:
    """Return whether an image of the program ``name`` came to this machine after it was saved."""
    since = _record(name).stat().st_mtime
    return any((image.created or 0.0) > since for image in _own(client, name))


def _own(client: "Client", name: str) -> "list[Image]":
    """Return the user's images of the program ``name`` on this machine."""
    return [each for each in client.images() if each.name == name and each.owner == os.geteuid()]


@dataclass(frozen=True)
class JobImages:
    """Where the images of a job go: a ``url``, signed with a ``key``."""

    url: str
    key: Path | None

    def require_possible(self) -> None:
        """Raise :class:`PhosError` for what would be in the way of every image: a package that is
        missing, no such kind of URL, no such key.
        """
        from phosd.client.remote import Remote

        Remote(self.url)
        if self.key is not None and not self.key.is_file():
            raise InvalidOption(
                f"there is no SSH key {self.key} on this node", hint="name another (`--phos-key`)"
            )

    def push(self, settings: Settings, name: str, node: str) -> bool:
        """Bring the newest image of the program ``name`` there; say so, or why it cannot be.
        Returns whether it is there.
        """
        from phosd.cli.transferring import run
        from phosd.client import Client
        from phosd.client.remote import Remote

        quiet = dataclasses.replace(settings, json=False)
        try:
            with Client(settings.bus) as client:
                own = _own(client, name)
            if not own:
                raise NoSuchImage(f"there is no image of {name}", hint="it was deleted meanwhile")
            image = max(own, key=lambda each: each.number).id
            remote = Remote(self.url)
            run(quiet, self.url, lambda link: remote.push(link, self.key), "Export", image)
        except Exception as error:  # whatever it is, the job goes on where the image is
            said = in_words(error, settings.bus)
            settings.note(f"phos: the image of {name} is on node {node} alone: {said}")
            return False
        keep(name, Saved(node, image))
        settings.note(f"phos: image {image} is at {self.url}; any node may go on with it")
        return True

    def pull(self, settings: Settings, name: str, image: str) -> None:
        """Bring an image of the program ``name`` here. Raises :class:`CommandError`."""
        from phosd.cli.transferring import run, wanted
        from phosd.client.remote import Remote

        quiet = dataclasses.replace(settings, json=False)
        try:
            remote = Remote(self.url)
            source = remote.source(remote.head(image))
            run(quiet, self.url, source.pull, "Import", **wanted(None))
        except Exception as error:
            caught = in_words(error, settings.bus)
            raise CommandError(
                caught.code,
                f"the program was not started, as {name} was saved, and its image {image} cannot "
                f"be had from {self.url}: {caught}; mend that, and run the job again "
                "(`scontrol requeue`)",
            ) from error
        settings.note(f"phos: image {image} of {name} was brought here from {self.url}")
