"""Say how programs, images and the targets of jobs are called: by their names, where they have
one.
"""

from collections.abc import Iterable, Mapping

from phosd.client.records import Image, Job, Process
from phosd.tui.node import Node
from phosd.tui.text import Cell, command_line, plain


def program_cell(process: Process) -> Cell:
    """Return the name of a program, or else its command line."""
    if process.name:
        return plain(process.name)
    return (command_line(process.command) or "not told", "dim")


def image_cell(image: Image) -> Cell:
    """Return name and number of an image, or else the command line of its program."""
    return image_name(image) or (command_line(image.command), "dim")


def image_name(image: Image) -> str:
    """Return name and number of an image; empty if it has none."""
    return f"{plain(image.name)}@{image.number}" if image.name else ""


def names_by_pid(jobs: Iterable[Job], node: Node) -> dict[str, str]:
    """Return the names of programs by the pids that jobs were about, as far as images that the jobs
    made tell them.
    """
    made = ((job, node.image(job.result)) for job in jobs)
    return {
        target: image.name for job, image in made if image and image.name for target in job.targets
    }


def target_name(job: Job, node: Node, known: Mapping[str, str] | None = None) -> str:
    """Return how what a job is about is called; empty if nothing of it is known to have a name.
    ``known`` are names by pid; without, the processes are asked that run now.
    """
    names = [_name(target, job, node, known) for target in job.targets]
    return " ".join(plain(name) for name in names if name) or plain(job.name)


def _name(target: str, job: Job, node: Node, known: Mapping[str, str] | None) -> str:
    if not target.isdecimal():
        image = node.image(target)
        return image_name(image) if image else ""
    made = node.image(job.result) if job.operation == "checkpoint" else None
    if made is not None:
        return made.name
    if known is not None and job.path not in node.of(Job):
        return known.get(target, "")
    process = node.process(int(target))
    return process.name if process is not None else ""


def target_text(job: Job, node: Node, known: Mapping[str, str] | None = None) -> str:
    """Return the name of what a job is about, and its pid or id; without a name these alone."""
    name = target_name(job, node, known)
    return f"{name} ({plain(job.target)})" if name else plain(job.target)
