"""Draw the GPUs in a few lines: load, memory, temperature and power over the last minutes."""

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import Static

from phosd.client.records import Gpu
from phosd.tui.node import Node, Sample
from phosd.tui.text import fit, human_bytes, plain, spark

_HOT = 85.0
"""Degrees Celsius from which a GPU is marked as hot."""
_BUSY = 0.9
_MOST_WATTS = 1000.0
"""Top of the power sparkline in watts, until a GPU draws more."""
_WIDE = 90
"""Width in cells from which GPU names are shown in full."""
_LEAST_HISTORY = 4
"""Least width in cells of a useful sparkline."""
_ROOMY = 70
"""Width in cells from which the figures of several GPUs are aligned in columns."""
_FIGURES = 56
"""Width in cells of the figures, without name and sparklines."""


class GpuLines(Static):
    """One line for each GPU, at most ``most``; the last line says how many are left out."""

    DEFAULT_CSS = """
    GpuLines {
        height: auto; padding: 0 1; background: $boost; color: $foreground; text-wrap: nowrap;
    }
    """

    def show(self, node: Node, most: int) -> None:
        """Redraw the lines."""
        gpus = node.gpus
        width = max(10, self.app.size.width - 2)
        lines = [
            gpu_line(gpu, node.memory_used(gpu), list(node.samples.get(gpu.path, ())), width)
            for gpu in gpus[:most]
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        if len(gpus) > most:
            lines.append(Text(f"and {len(gpus) - most} more GPUs", "dim"))
        if not gpus:
            lines = [Text("no GPUs" if node.heard else "GPUs: not known yet", "dim")]
        self.update(Text("\n").join(lines))


def gpu_line(gpu: Gpu, used: int, samples: Sequence[Sample], width: int) -> Text:
    """Draw one GPU, with ``used`` bytes of memory in use. As far as there is room, all sparklines
    are drawn, else only that of the load, else none.
    """
    named = 20 if width >= _WIDE else 16 if width >= _ROOMY else 13
    name = fit(f"{gpu.ordinal} {plain(gpu.name)}", named)
    spare = width - named - _FIGURES
    cells = min(20, spare // 4) if spare >= 4 * _LEAST_HISTORY else 0
    first = cells or (spare if spare >= _LEAST_HISTORY else 0)
    line = Text.assemble((name, "bold"), no_wrap=True, overflow="crop")
    total = gpu.memory_total or 1
    told = (gpu.utilisation, gpu.temperature, gpu.power) != (None, None, None)
    if told:
        _figure(line, spark([s.utilisation for s in samples], first), _load(gpu), 5)
    memory, room = f"{human_bytes(used)} of {human_bytes(gpu.memory_total)}", 23
    if width < _ROOMY:
        memory, room = f"{human_bytes(used)} ({used / total:.0%})", 0
    _figure(line, spark([s.memory_used / total for s in samples], cells), memory, room)
    if not told:
        line.append("  load, heat and power not told", "dim")
        return line
    temperatures = [None if s.temperature is None else s.temperature / 100 for s in samples]
    heat = "" if gpu.temperature is None else f"{gpu.temperature:.0f} °C"
    hot = gpu.temperature is not None and gpu.temperature >= _HOT
    _figure(line, spark(temperatures, cells), heat + (" hot!" if hot else ""), 6, hot)
    watts = [s.power for s in samples]
    most = max([_MOST_WATTS, *(w for w in watts if w is not None)])
    power = "" if gpu.power is None else f"{gpu.power:.0f} W"
    _figure(line, spark([None if w is None else w / most for w in watts], cells), power, 6)
    return line


def _load(gpu: Gpu) -> str:
    return "" if gpu.utilisation is None else f"{gpu.utilisation:.0%}"


def _figure(line: Text, history: str, figure: str, width: int, alarm: bool = False) -> None:
    line.append(f" {history}", "cyan")
    line.append(f" {figure:>{width}}", "bold red" if alarm else "")
