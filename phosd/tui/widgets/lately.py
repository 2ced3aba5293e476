"""List the jobs that ended last, where the table leaves room below it."""

from datetime import datetime
from heapq import nlargest

from rich.text import Text
from textual.widget import Widget

from phosd.client.records import Job
from phosd.tui.host import Host
from phosd.tui.names import target_text
from phosd.tui.node import Node
from phosd.tui.text import cause, fit, plain, seconds
from phosd.tui.widgets.job import STYLES, result_text, state_cell

_OPERATION = 10
_TARGET = 24


class Lately(Widget):
    """The last jobs, the newest first, as many as fit."""

    DEFAULT_CSS = "Lately { height: 1fr; padding: 0 1; color: $foreground; display: none; }"
    app: Host

    def render(self) -> Text:
        width, height = self.size
        lines = [Text("── ended last ".ljust(width, "─"), "dim")]
        lines += [_line(job, self.app.node, width) for job in _last(self.app.node, height - 1)]
        return Text("\n", no_wrap=True, overflow="crop").join(lines[:height])


def _last(node: Node, most: int) -> list[Job]:
    over = (job for job in node.of(Job).values() if job.over)
    return nlargest(most, over, key=lambda job: (job.ended or 0.0, job.number))


def _line(job: Job, node: Node, width: int) -> Text:
    shown, tone = state_cell(job)
    when = datetime.fromtimestamp(job.ended).strftime("%H:%M:%S") if job.ended else " " * 8
    line = Text.assemble((f"{when} ", "dim"), no_wrap=True)
    line.append(f"{shown[0]} ", STYLES.get(tone, ""))
    line.append(f"{fit(plain(job.operation), _OPERATION)} ")
    line.append(f"{fit(target_text(job, node), _TARGET)} ")
    if job.error or job.message:
        line.append(cause(job), STYLES["bad"] if job.state == "failed" else "")
    else:
        stood = job.stop_seconds and job.operation not in ("suspend", "swap")
        stop = f"stood still for {seconds(job.stop_seconds)}" if stood else ""
        line.append("; ".join(filter(None, (result_text(job), stop))))
    line.truncate(width, overflow="ellipsis")
    return line
