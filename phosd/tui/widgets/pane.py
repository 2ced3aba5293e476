"""Show what matters of one program, beside the table: its images, schedule and output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text
from textual.widget import Widget

from phosd.client.records import Image, Job, Process
from phosd.client.text import container_text
from phosd.protection import Program, Protection
from phosd.tui.names import image_name, target_text
from phosd.tui.node import Node
from phosd.tui.programs import TONES, next_cell, trouble_cell
from phosd.tui.text import command_line, fit, human_bytes, plain, seconds, since, spark
from phosd.tui.widgets.job import STYLES, job_line
from phosd.units import duration_text

_NAME = 10
"""Width in cells of the names of facts."""
_MOST_STOPS = 24
_MOST_LINES = 3
"""Most lines that a fact takes."""
Fact = tuple[str, str, str]
"""Name, text and tone."""


@dataclass(frozen=True)
class Content:
    """What the pane shows at the time ``now``; ``lines`` are the end of the file ``output``."""

    process: Process
    program: Program
    images: Sequence[Image]
    hints: Sequence[str] = ()
    job: Job | None = None
    output: str = ""
    lines: Sequence[str] = ()
    now: float = 0.0


class ProgramPane(Widget):
    """The pane; empty without a program."""

    DEFAULT_CSS = """
    ProgramPane {
        display: none; padding: 0 1; background: $boost; color: $foreground;
        border-left: solid $primary;
    }
    """

    def __init__(self, node: Callable[[], Node]) -> None:
        super().__init__()
        self._node = node
        self._content: Content | None = None

    def show(self, content: Content | None) -> None:
        """Redraw it, if that changes anything."""
        if content != self._content:
            self._content = content
            self.refresh()

    def render(self) -> Text:
        if self._content is None:
            return Text("no program is chosen", "dim")
        width, height = self.size
        lines = draw(self._content, self._node(), max(20, width))
        tail = _tail(self._content, max(20, width), height - len(lines))
        return Text("\n", no_wrap=True, overflow="crop").join([*lines, *tail][:height])


def draw(content: Content, node: Node, width: int) -> list[Text]:
    """Return the lines about a program."""
    process = content.process
    title = plain(process.name) or f"pid {process.pid}"
    about = f"{plain(process.user_name)}, pid {process.pid}"
    lines = [Text.assemble((fit(title, max(1, width - len(about) - 1)), "bold"), " ", about)]
    command = command_line(process.command) or "command not told"
    lines += [Text(line, "dim") for line in wrap(command, width)[:2]]
    lines.append(
        Text(
            _protected(program := content.program, content.now),
            STYLES.get(TONES[program.protection], ""),
        )
    )
    for name, text, tone in _facts(content, node):
        for number, line in enumerate(wrap(text, max(10, width - _NAME))[:_MOST_LINES]):
            entry = Text.assemble((f"{name if not number else '':<{_NAME}}", "bold"))
            lines.append(entry.append(line, STYLES.get(tone, "")))
    if (job := content.job) is not None:
        lines.append(job_line(job, content.now, target_text(job, node)))
    lines += [Text(line, STYLES["warn"]) for hint in content.hints for line in wrap(hint, width)]
    return lines


def _facts(content: Content, node: Node) -> list[Fact]:
    process, program, now = content.process, content.program, content.now
    gpus = ", ".join(str(gpu.ordinal) for gpu in node.gpus_of(process))
    trouble = trouble_cell(program, process, now)
    text, tone = (trouble, "") if isinstance(trouble, str) else trouble
    hook = "" if process.hook == "hooked" else plain(f"{process.hook}: {process.reason}")
    facts = [
        ("schedule", _schedule(program, process, now), ""),
        ("restarted", *_restarted(program)),
        ("images", _images(content.images), ""),
        ("stops", _stops(content.images), ""),
        ("memory", f"{human_bytes(process.device_bytes)}{f' on GPU {gpus}' if gpus else ''}", ""),
        ("container", plain(container_text(process.container)), ""),
        ("Slurm", plain(process.slurm_step), ""),
        ("hook", hook, "warn"),
        ("trouble", text if text != process.reason else "", tone),
    ]
    return [fact for fact in facts if fact[1]]


def _protected(program: Program, now: float) -> str:
    kind, image = program.protection, program.image
    if kind is Protection.WAITING:
        pool = plain(program.processes[0].pool) or "of another user"
        return f"{kind.sign} {kind} in pool {pool} to be started"
    if image is None or not image.created:
        what = "; c saves it" if program.processes[0].hook != "unsupported" else ""
        return f"{kind.sign} {kind}: it has no image{what}"
    return f"{kind.sign} {kind}: newest image {since(image.created, now)} old"


def _schedule(program: Program, process: Process, now: float) -> str:
    if not program.every:
        return "none; A makes one"
    due = next_cell(program, now)
    due = due if isinstance(due, str) else due[0]
    when = f", {due}" if due in ("late", "due") else f", next in {due}" if due else ""
    return f"every {duration_text(program.every)}{when}, {process.keep} kept"


def _restarted(program: Program) -> tuple[str, str]:
    if program.restarter:
        return f"by {plain(program.restarter)}", ""
    saved = program.protection in (Protection.SAVED, Protection.PROTECTED, Protection.LATE)
    return "by nobody that phosd knows of", "warn" if saved else "dim"


def _images(images: Sequence[Image]) -> str:
    if not images:
        return "none"
    stored = human_bytes(sum(image.stored_bytes for image in images))
    newest = image_name(images[-1]) or plain(images[-1].id)
    return f"{len(images)}, {stored}; newest {newest}"


def _stops(images: Sequence[Image]) -> str:
    """Draw for how long the program stood still for each of the last images."""
    stops = [image.stop_seconds for image in images[-_MOST_STOPS:] if image.stop_seconds]
    if not stops:
        return ""
    most = max(stops)
    drawn = spark([stop / most for stop in stops], len(stops)) + " " if len(stops) > 1 else ""
    longest = f", at most {seconds(most)}" if len(stops) > 1 else ""
    return f"{drawn}{seconds(stops[-1])}{longest}"


def _tail(content: Content, width: int, height: int) -> list[Text]:
    """Return the last lines of the output that fit, below the name of the file."""
    if not content.output or height < 3:
        return []
    name = plain(content.output)
    cut = name if len(name) <= width - 4 else "…" + name[-(width - 5) :]
    rule = Text(f"── {cut} ".ljust(width, "─"), "dim")
    last = content.lines[-(height - 2) :] if content.lines else ()
    return [Text(), rule, *(Text(fit(line, width)) for line in last)]
