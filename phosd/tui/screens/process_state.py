"""Say of a process what needs more words than a row has."""

from collections.abc import Iterable

from phosd.client.records import Image, Process
from phosd.client.text import container_text, level_of
from phosd.tui.node import Node
from phosd.tui.screens import moving
from phosd.tui.text import command_line
from phosd.units import duration_text

_STANDING = ("locked", "checkpointed", "closed", "parked")
"""States that only a running job should cause."""


def there(processes: Iterable[Process], node: Node) -> list[Process]:
    """Return the present records of the processes that have not ended."""
    return [now for each in processes if (now := node.of(Process).get(each.path))]


def standing(processes: Iterable[Process], node: Node) -> list[Process]:
    """Return the processes that were left stopped and on which no job works."""
    now = there(processes, node)
    return [each for each in now if each.state in _STANDING and not node.job_of(str(each.pid))]


def hints(process: Process, node: Node) -> list[str]:
    """Return what the user may do about its state."""
    if process.state == moving.SUSPENDED:
        called = " or a call" if process.wakes else ""
        state = level_of(process)
        return [f"{state}: {process.reason}; s{called} resumes it"]
    if standing([process], node):
        return ["stopped, and no job works on it: press b to resume it"]
    return []


def said_of(process: Process, node: Node) -> list[str]:
    """Return what does not fit into the row of a process."""
    parts = hints(process, node)
    if process.reason and process.state != moving.SUSPENDED:
        parts.append(f"{process.hook}: {process.reason}")
    if process.container:
        parts.append(f"in container {container_text(process.container)}")
    if process.slurm_step:
        parts.append(f"Slurm step {process.slurm_step}")
    if process.every:
        every = duration_text(process.every)
        parts.append(f"saved every {every}, the last {process.keep} are kept")
    if process.last_image:
        parts.append(f"last image {process.last_image}")
    if process.restarter:
        parts.append(f"restarted by {process.restarter}")
    if process.command:
        parts.append(command_line(process.command))
    return parts


def images_of(process: Process, node: Node) -> list[Image]:
    """Return the images of the program, oldest first."""
    if process.name:
        found = (
            image
            for image in node.of(Image).values()
            if image.name == process.name and image.owner == process.user
        )
    else:
        found = (image for image in node.of(Image).values() if image.pid == process.pid)
    return sorted(found, key=lambda image: image.id)
