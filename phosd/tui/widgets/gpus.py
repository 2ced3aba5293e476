"""Draw the GPUs in a line each: memory by program, load, temperature and power."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from phosd.client.records import Gpu, Process
from phosd.client.text import NO_GPU
from phosd.tui.node import Node, Sample
from phosd.tui.text import fit, human_bytes, plain, spark
from phosd.tui.widgets.job import STYLES
from phosd.tui.widgets.lines import Lines

_HOT, _WARM = 85.0, 75.0
"""Degrees Celsius from which a GPU is marked as hot, and drawn as a warning."""
_WIDE = 90
"""Width in cells from which GPU names are shown in full."""
_ROOMY = 70
"""Width in cells from which there is a bar, and the figures of several GPUs are aligned."""
_LEAST_BAR, _MOST_BAR = 10, 40
_LEAST_HISTORY, _MOST_HISTORY = 4, 12
"""Least and most width in cells of the sparkline of the load."""
_LEAST_LEGEND = 26
"""Least cells for the names of the programs on a GPU."""
_FILLS = (("█", "cyan"), ("▓", "blue"), ("▒", "cyan"), ("█", "blue"), ("▓", "cyan"))
"""Pieces of a bar, in turn: two that are next to each other differ also without colour."""
_OTHERS = ("░", "")


@dataclass(frozen=True)
class Piece:
    """What a program holds of a GPU's memory; ``about``: an equal part of what it holds of several
    GPUs.
    """

    name: str
    size: float
    about: bool = False

    @property
    def text(self) -> str:
        return f"{self.name} {'≈' if self.about else ''}{human_bytes(self.size)}"


class GpuLines(Lines):
    """One line for each GPU, at most ``most``; the last line says how many are left out."""

    DEFAULT_CSS = """
    GpuLines { background: $boost; color: $foreground; }
    """

    def show(self, node: Node, most: int) -> None:
        """Redraw the lines."""
        gpus = node.gpus
        width = max(10, self.app.size.width - 2)
        lines = [
            gpu_line(
                gpu,
                node.memory_used(gpu),
                pieces(node.holders(gpu)),
                list(node.samples.get(gpu.path, ())),
                width,
            )
            for gpu in gpus[:most]
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        if len(gpus) > most:
            lines.append(Text(f"and {len(gpus) - most} more GPUs (5)", "dim"))
        if not gpus:
            lines = [Text(NO_GPU if node.heard else "GPUs: not known yet", "dim")]
        self.say(lines)


def pieces(holders: Iterable[Process]) -> list[Piece]:
    """Return what programs hold of a GPU, the largest first; processes of one name are one."""
    found: dict[tuple[int, str], Piece] = {}
    for process in holders:
        key = (process.user, process.name or f"/{process.pid}")
        parts = max(1, len(process.gpus))
        before = found.get(key)
        found[key] = Piece(
            plain(process.name) or str(process.pid),
            process.device_bytes / parts + (before.size if before else 0.0),
            parts > 1 or (before is not None and before.about),
        )
    return sorted((each for each in found.values() if each.size), key=lambda each: -each.size)


def gpu_line(
    gpu: Gpu, used: int, held: Sequence[Piece], samples: Sequence[Sample], width: int
) -> Text:
    """Draw one GPU, with ``used`` bytes of memory in use. What it does not tell takes no room."""
    named = 18 if width >= _WIDE else 14 if width >= _ROOMY else 12
    line = Text(no_wrap=True, overflow="crop")
    line.append(fit(f"{gpu.ordinal} {plain(gpu.name).removeprefix('NVIDIA ')}", named), "bold")
    total = gpu.memory_total or 1
    figures = _figures(gpu)
    if width < _ROOMY:
        line.append(f" {human_bytes(used)} ({used / total:.0%})")
        line.append_text(figures)
        return line
    memory = f" {of_total(used, gpu.memory_total):>18}"
    spare = width - named - len(memory) - figures.cell_len - 2
    bar, history = _shared_out(spare)
    line.append(" ")
    line.append_text(memory_bar(held, used, total, bar))
    line.append(memory)
    if gpu.utilisation is not None and history >= _LEAST_HISTORY:
        line.append(f" {spark([s.utilisation for s in samples], history)}", "cyan")
    line.append_text(figures)
    room = width - line.cell_len - 3
    if room >= _LEAST_LEGEND:
        line.append("   ")
        line.append_text(_legend(held, used, room))
    return line


def _shared_out(spare: int) -> tuple[int, int]:
    """Return the cells of the bar and of the sparkline; what is left is for names."""
    if spare - _LEAST_LEGEND < _LEAST_BAR + _MOST_HISTORY:
        bar = max(_LEAST_BAR, spare - 1 - _MOST_HISTORY)
        return bar, min(_MOST_HISTORY, spare - bar - 1)
    return min(_MOST_BAR, spare // 4), min(_MOST_HISTORY, spare // 6)


def of_total(used: float, total: float) -> str:
    """Format a part of a memory, with the unit once if it is that of both."""
    part, whole = human_bytes(used), human_bytes(total)
    unit = whole.partition(" ")[2]
    return f"{part.removesuffix(f' {unit}')} of {whole}"


def memory_bar(held: Sequence[Piece], used: int, total: int, width: int) -> Text:
    """Draw a bar of ``width`` cells in which each program has a piece; what others hold comes last,
    and what is free is dotted.
    """
    bar, begun, cells = Text(no_wrap=True), 0.0, 0
    for number, piece in enumerate(held):
        begun += piece.size
        end = min(width, max(cells + 1, round(begun / total * width)))
        fill, style = _FILLS[number % len(_FILLS)]
        bar.append(fill * (end - cells), style)
        cells = end
    end = max(cells, min(width, round(used / total * width)))
    bar.append(_OTHERS[0] * (end - cells), _OTHERS[1])
    bar.append("·" * (width - end), "dim")
    return bar


def _legend(held: Sequence[Piece], used: int, room: int) -> Text:
    """Name the pieces of the bar, as far as there is room."""
    legend = Text(no_wrap=True)
    rest = used - sum(piece.size for piece in held)
    entries = [(*_FILLS[n % len(_FILLS)], piece.text) for n, piece in enumerate(held)]
    if rest >= _LEAST_REST * max(1, used):
        entries.append((*_OTHERS, f"others {human_bytes(rest)}"))
    for number, (fill, style, text) in enumerate(entries):
        left = len(entries) - number
        more = f"  +{left}" if left > 1 else ""
        if legend.cell_len + len(text) + 4 + len(more) > room:
            legend.append(f"  +{left}"[2 * (not number) :], "dim")
            break
        legend.append(f"{'  ' if number else ''}{fill} ", style)
        legend.append(text)
    return legend


_LEAST_REST = 0.02
"""Part of the used memory that nobody visible holds, below which it is not named."""


def _figures(gpu: Gpu) -> Text:
    """Return load, temperature and power, as far as the GPU tells them."""
    text = Text()
    if gpu.utilisation is not None:
        text.append(f" {gpu.utilisation:>4.0%}")
    if gpu.temperature is not None:
        heat = gpu.temperature
        style = STYLES["bad"] if heat >= _HOT else STYLES["warn"] if heat >= _WARM else ""
        hot = "!" if heat >= _HOT else ""
        text.append(f" {f'{hot}{heat:.0f} °C':>7}", style)
    if gpu.power is not None:
        text.append(f" {f'{gpu.power:.0f} W':>6}")
    return text
