"""Format jobs as text: one line of progress, and a page with all details."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from textwrap import wrap

from rich.text import Text

from phosd.client.records import Job, Phase
from phosd.client.text import figure
from phosd.tui.text import bar, cause, fit, human_bytes, plain, rate, seconds, since, when

_STATES: dict[str, tuple[str, str]] = {
    "queued": ("◌", "dim"),
    "running": ("▶", "accent"),
    "done": ("✓", "good"),
    "failed": ("✗", "bad"),
    "cancelled": ("-", "warn"),
    "interrupted": ("✗", "bad"),
}
_ORANGE = "dark_orange3"
"""Yellow is illegible on a light screen."""
STYLES = {
    "dim": "dim", "good": "green", "warn": _ORANGE, "bad": "bold red", "accent": "cyan",
    "stop": f"bold {_ORANGE} reverse",
}  # fmt: skip
_PLACES = {"memory": "in host memory", "disk": "on disk"}
"""Places of a suspended process's device memory."""
_RUNNING_FILLS = "▒░"
_BAR = 10
_NAME = 14
"""Width in cells of the names of facts."""
_WIDE = 72
"""Width in cells from which all columns of the phases fit."""


def state_cell(job: Job) -> tuple[str, str]:
    """Return the state with its sign; that the program is stopped takes precedence."""
    if job.state == "running" and job.stopped:
        return "■ stopped", "stop"
    sign, tone = _STATES.get(job.state, ("?", ""))
    place = f" {job.position}" if job.position else ""
    return f"{sign} {plain(job.state)}{place}", tone


def progress_text(job: Job) -> str:
    """Draw bar and percentage of the phase; empty if unknown."""
    if job.over or job.progress is None:
        return ""
    return f"{bar(job.progress, 6)} {job.progress:4.0%}"


def time_left(job: Job, now: float) -> str:
    """Format the time left in the phase; empty if unknown."""
    if job.over or job.expected_end is None:
        return ""
    return f"{seconds(max(0.0, job.expected_end - now))} left"


def result_text(job: Job) -> str:
    """Format the result of a finished job, in words unless it is an image or a pid."""
    if job.operation in ("migrate", "resume") and job.result:
        new = [part.rpartition(":")[2] for part in job.result.split(",")]
        return plain(f"on GPU{'s' * (len(new) > 1)} {', '.join(new)}")
    if job.operation == "suspend":
        return _PLACES.get(job.result, plain(job.result))
    return plain(f"{job.result} runs" if job.operation == "swap" and job.result else job.result)


def result_cell(job: Job) -> tuple[str, str]:
    """Return the result of a job, or why it has none."""
    if job.error:
        return cause(job), "bad" if job.state == "failed" else ""
    return result_text(job), ""


def job_line(job: Job, now: float, target: str) -> Text:
    """Format the present work of a job on ``target`` in one line."""
    shown, tone = state_cell(job)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(shown if job.stopped else shown[0], STYLES.get(tone, ""))
    line.append(f" job {job.number}: {plain(job.operation)} {target}  ")
    if job.state == "queued":
        line.append("others must end first", "dim")
        return line
    line.append(fit(plain(job.phase), 9) + " ", "bold")
    if job.progress is not None:
        line.append(f"{bar(job.progress, _BAR)} {job.progress:4.0%}  ")
    parts = [rate(job.rate), time_left(job, now)]
    line.append("  ".join(part for part in parts if part))
    return line


def job_page(job: Job, now: float, width: int) -> Text:
    """Format all details of a job: facts, time line, phases and notes."""
    page = Text()

    def say(name: str, value: str, tone: str = "") -> None:
        page.append(f"{name:<{_NAME}}", "bold")
        lines = wrap(value, max(width - _NAME, _NAME), break_on_hyphens=False) or [""]
        page.append(f"\n{'':<{_NAME}}".join(lines) + "\n", STYLES.get(tone, ""))

    for fact in _facts(job, now):
        say(*fact)
    if job.phases:
        page.append("\n")
        page.append_text(time_line(job.phases, width))
        page.append("\n\n")
        page.append_text(_phases(job, width))
    if job.notes or job.details:
        page.append("\n")
    for note in job.notes:
        say("note", plain(note))
    for name, number in job.details:
        say("figure", figure(name, number))
    return page


def _facts(job: Job, now: float) -> list[tuple[str, str, str]]:
    """Return name, text and tone of each fact."""
    text, tone = state_cell(job)
    mode = f"{job.mode}: {job.why}" if job.why else job.mode
    drained = f"{human_bytes(job.drained_bytes)} at {rate(job.drain_rate)}"
    wrong = f"{job.wrong_guesses} (the program wrote where nobody expected it)"
    started = f"{when(job.started)}, {since(job.started, now)} ago"
    taken = job.ended - job.started if job.ended and job.started else None
    facts = [
        ("state", text + (", by a schedule" if job.scheduled else ""), tone),
        ("now", _now(job, now), ""),
        ("started", started if job.started else "", ""),
        ("took", seconds(taken) if taken is not None else "", ""),
        ("mode", plain(mode), ""),
        ("destination", plain(job.destination), ""),
        ("stopped for", seconds(job.stop_seconds) if job.stop_seconds else "", ""),
        ("saved", drained if job.drained_bytes else "", ""),
        ("wrong guesses", wrong if job.wrong_guesses else "", "warn"),
        ("suspects", ", ".join(map(plain, job.suspects)), "warn"),
        ("result", result_text(job), "good"),
        ("error", plain(f"{job.error}: {job.message}") if job.error else "", "bad"),
    ]
    return [fact for fact in facts if fact[1]]


def _now(job: Job, now: float) -> str:
    if job.state != "running":
        return ""
    share = "" if job.progress is None else f"{bar(job.progress, _BAR)} {job.progress:.0%}"
    size = f"{human_bytes(job.bytes_done)} of {human_bytes(job.bytes_total)}"
    parts = [job.phase, share, size if job.bytes_total else "", rate(job.rate), time_left(job, now)]
    return plain("  ".join(part for part in parts if part))


def time_line(phases: Sequence[Phase], width: int) -> Text:
    """Draw a bar in which each phase has a piece proportional to its duration; stopped phases are
    solid.

    Below it are the names of the phases, cut to the room that they have.
    """
    whole = sum(phase.seconds for phase in phases) or 1.0
    width = max(width, len(phases))
    passed = accumulate(phase.seconds for phase in phases)
    ends = [n + round(t / whole * (width - len(phases))) for n, t in enumerate(passed, 1)]
    lengths = [end - begin for begin, end in pairwise([0, *ends])]
    line, names = Text(no_wrap=True), Text(no_wrap=True)
    for number, (phase, length) in enumerate(zip(phases, lengths, strict=True)):
        fill = "█" if phase.stopped else _RUNNING_FILLS[number % 2]
        line.append(fill * length, f"bold {_ORANGE}" if phase.stopped else "cyan")
        names.append(fit(plain(phase.name), length) if length > 3 else " " * length, "dim")
    stopped = sum(phase.seconds for phase in phases if phase.stopped)
    line.append("\n")
    line.append_text(names)
    line.append(f"\n█ the program stood still, {seconds(stopped)}", f"bold {_ORANGE}")
    line.append(f"   ▒░ it ran, {seconds(whole - stopped)}", "cyan")
    return line


def _phases(job: Job, width: int) -> Text:
    """Format one line per phase; a narrow page omits the rates."""
    whole = sum(phase.seconds for phase in job.phases) or 1.0
    wide = width >= _WIDE
    rates, here = (f"{'RATE':>13}", " ◀ now") if wide else ("", " ◀")
    head = f"{'PHASE':<10}{'SECONDS':>10}{'SHARE':>7}{'BYTES':>11}{rates}  PROGRAM\n"
    text = Text.assemble((head, "bold"))
    last = len(job.phases) - 1
    for number, phase in enumerate(job.phases):
        going = number == last and not job.over
        size = human_bytes(phase.bytes_done) if phase.bytes_done else ""
        speed = rate(phase.bytes_done / phase.seconds) if phase.seconds > 0 else ""
        style = f"bold {_ORANGE}" if phase.stopped else "bold" if going else ""
        program = "■ stood still" if phase.stopped else "ran"
        text.append(
            f"{fit(plain(phase.name), 10)}{phase.seconds:>10.3f}{phase.seconds / whole:>7.1%}"
            f"{size:>11}{f'{speed:>13}' if wide else ''}  {program}{here if going else ''}\n",
            style,
        )
    return text
