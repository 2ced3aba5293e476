"""Say of each process how its program is protected, as ``phos status`` does."""

from collections import Counter
from collections.abc import Iterable

from phosd.client.records import Image, Job, Process
from phosd.client.text import since
from phosd.protection import Program, Protection, ended, programs
from phosd.tui.node import Node
from phosd.tui.text import Cell, cause, plain

TONES = {
    Protection.FAILED: "bad",
    Protection.NEVER: "bad",
    Protection.LATE: "warn",
    Protection.SAVED: "",
    Protection.PROTECTED: "good",
    Protection.WAITING: "dim",
    Protection.ENDED: "",
}
_HEADLINES = {Protection.NEVER: "never saved"}


class Programs:
    """The programs of the node, those that need somebody first, and which process is of which."""

    def __init__(self) -> None:
        self.all: list[Program] = []
        self.of: dict[str, Program] = {}
        """The program of each process, by the path of the process."""
        self.urgency: dict[str, int] = {}
        """The place of each process in their order, by its path."""
        self._seen: object = None

    def look(self, node: Node, *, again: bool = False) -> bool:
        """Judge them, if anything has changed on which that depends; ``again``: in any case, as
        time has passed. Return whether it was done.
        """
        seen = _basis(node)
        if seen == self._seen and not again:
            return False
        self._seen = seen
        processes, jobs = node.of(Process).values(), node.of(Job).values()
        results = (job.result for job in jobs if job.operation == "checkpoint")
        ids = dict.fromkeys([*(process.last_image for process in processes), *results])
        images = (node.image(each) for each in ids if each)
        records = processes, [image for image in images if image is not None], jobs, node.now()
        self.all = [*programs(*records), *ended(*records)]
        self.of = {process.path: each for each in self.all for process in each.processes}
        self.urgency = {path: number for number, path in enumerate(self.of)}
        return True


def _basis(node: Node) -> object:
    """Return what tells whether something has changed on which the judgement depends."""
    processes = [
        (each.path, each.name, each.last_image, each.every, each.restarter)
        for each in node.of(Process).values()
    ]
    over = [path for path, job in node.of(Job).items() if job.over]
    return processes, over, node.changes[Image], node.contact


def protected_cell(program: Program, now: float) -> Cell:
    """Return how well a program is protected, and the age of its newest image."""
    kind, image = program.protection, program.image
    if kind is Protection.WAITING:
        return f"{kind.sign} {kind}", TONES[kind]
    age = f" {since(image.created, now)}" if image is not None and image.created else ""
    return f"{kind.sign} {kind}{age}", TONES[kind]


def next_cell(program: Program, now: float) -> Cell:
    """Return the time until the next periodic checkpoint, or that it is late."""
    if program.due is None:
        return ""
    if program.protection is Protection.LATE:
        return "late", "warn"
    return since(0.0, program.due - now) if program.due > now else "due"


def trouble_cell(program: Program, process: Process, now: float) -> Cell:
    """Return what failed last, or else what stands in the way of a checkpoint."""
    job, image = program.trouble, program.image
    if job is not None:
        bad = program.protection is Protection.FAILED
        when = f"{since(job.ended, now)} ago" if job.ended else ""
        what = "" if job.operation == "checkpoint" else plain(job.operation)
        parts = ", ".join(filter(None, (when, what)))
        return f"{parts}: {cause(job)}", "bad" if bad else "warn"
    if process.hook == "unsupported":
        return f"cannot be saved: {plain(process.reason) or 'it is not supported'}", "bad"
    if image is not None and image.whole is False:
        return "its newest image is damaged", "bad"
    if image is not None and image.crashes:
        return f"crashed after its restore, {image.crashes} times in a row", "bad"
    if process.hook == "driver":
        return plain(process.reason) or "it has no hook", "dim"
    return ""


def headline(found: Iterable[Program]) -> list[tuple[str, str]]:
    """Return texts and tones that say how many programs are how well protected, the worst first."""
    counts = Counter(each.protection for each in found)
    del counts[Protection.WAITING]  # of pools, which have a screen of their own
    if len(counts) == 1 and (number := counts[Protection.PROTECTED]) > 1:
        return [(f"{Protection.PROTECTED.sign} all {number} protected", "good")]
    return [
        (f"{kind.sign} {counts[kind]} {_HEADLINES.get(kind, kind)}", TONES[kind])
        for kind in Protection
        if counts[kind]
    ]
