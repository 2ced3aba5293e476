"""Say in a line or two whether all is well on the node."""

from collections.abc import Iterable, Sequence

from rich.text import Text

from phosd.client.storage import Storage
from phosd.protection import Program, running
from phosd.tui.node import Node
from phosd.tui.programs import headline
from phosd.tui.text import human_bytes
from phosd.tui.widgets.job import STYLES
from phosd.tui.widgets.lines import Lines

_FULL, _FULLER = 0.8, 0.9
"""Shares of a disk in use from which it is drawn as a warning, and as an alarm."""
_GAP = 3
"""Cells between parts."""


class NodeLine(Lines):
    """GPUs, programs by protection; disk, jobs and failures: on one line where there is room, else
    on two.
    """

    DEFAULT_CSS = """
    NodeLine { background: $boost; color: $foreground; }
    """

    def show(self, node: Node, programs: Sequence[Program]) -> None:
        """Redraw it."""
        if not node.heard:
            self.say([])
            return
        width = max(10, self.app.size.width - 2)
        left, right = _joined(_programs(node, programs)), _joined(_rest(node))
        room = width - left.cell_len - right.cell_len
        if room >= _GAP:
            self.say([Text.assemble(left, " " * room, right, no_wrap=True)])
            return
        for line in (left, right):
            line.truncate(width, overflow="ellipsis")
        self.say([left, right])


def _programs(node: Node, programs: Sequence[Program]) -> list[Text]:
    gpus = len(node.gpus)
    parts = [Text(f"{gpus} GPU{'s' * (gpus != 1)}", "bold")] if gpus else []
    if not programs:
        return [*parts, Text("no programs", "dim")]
    number = running(programs)
    count = Text(f"{number} program{'s' * (number != 1)}:", "bold")
    found = [Text(text, STYLES.get(tone, "")) for text, tone in headline(programs)]
    return [*parts, Text("  ").join([count, *found])]


def _rest(node: Node) -> list[Text]:
    parts = []
    if node.storage is not None and node.storage.total:
        parts.append(_disk(node.storage))
    going = [job for job in node.active_jobs if job.state == "running"]
    waiting = len(node.active_jobs) - len(going)
    if going or waiting:
        more = f", {waiting} waiting" if waiting else ""
        jobs = f"▶ {len(going)} job{'s' * (len(going) != 1)}{more}"
        parts.append(Text(jobs, STYLES["accent"]))
    if failed := node.failures:
        parts.append(Text(f"✗ {failed} failed in 24 h", STYLES["bad"]))
    else:
        parts.append(Text("none failed in 24 h", "dim"))
    return parts


def disk_cell(storage: Storage) -> tuple[str, str]:
    """Return how full the disk of the images is, as a warning where it is."""
    share = storage.share
    tone = "bad" if share >= _FULLER else "warn" if share >= _FULL else ""
    return f"{'! ' if tone else ''}disk {share:.0%}, {human_bytes(storage.free)} free", tone


def _disk(storage: Storage) -> Text:
    free, tone = disk_cell(storage)
    quota = f" of your {human_bytes(storage.quota)}" if storage.quota else ""
    what = "images and suspended" if storage.quota else "images"
    images = f", {what} {human_bytes(storage.used)}{quota}"
    return Text.assemble((free, STYLES.get(tone, "")), images)


def _joined(parts: Iterable[Text]) -> Text:
    return Text(" " * _GAP, no_wrap=True).join(parts)
