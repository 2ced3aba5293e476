"""Say of each process on the first screen what its columns say."""

from collections.abc import Callable

from phosd.client.records import Process
from phosd.client.text import WITHIN, container_text, level_of
from phosd.protection import Program
from phosd.tui.names import program_cell
from phosd.tui.node import Node
from phosd.tui.programs import Programs, next_cell, protected_cell, trouble_cell
from phosd.tui.text import Cell, command_line, human_bytes, plain, seconds
from phosd.tui.widgets.table import Column
from phosd.units import duration_text

_STATES: dict[str, tuple[str, str]] = {
    "running": ("running", ""),
    "suspended": ("suspended", "accent"),
    "hollow": ("hollow", "accent"),
    "ready": ("ready", "accent"),
    "asleep": ("asleep", "accent"),
}
PROTECTED = 5
"""Number of the column by which the table is sorted at first: what needs somebody comes first."""


class ProcessColumns:
    """The columns; ``programs`` says which program a process is of."""

    def __init__(self, node: Node, programs: Programs) -> None:
        self._node = node
        self._programs = programs

    def all(self) -> list[Column[Process]]:
        return [
            Column("NAME", 12, program_cell, lambda p: (not p.name, p.name, p.command), grow=14),
            Column("PID", 7, lambda p: str(p.pid), lambda p: p.pid, right=True),
            Column("USER", 8, lambda p: plain(p.user_name), lambda p: p.user_name, rank=8),
            Column("GPU", 3, self._gpus, self._gpus, rank=6),
            Column("MEMORY", 9, lambda p: human_bytes(p.device_bytes), lambda p: p.device_bytes,
                   right=True, rank=7),
            Column("PROTECTED", 18, self._by(protected_cell), self._urgency),
            Column("EVERY", 6, lambda p: duration_text(p.every) if p.every else "",
                   lambda p: p.every, right=True, rank=11, sparse=True),
            Column("NEXT", 6, self._by(next_cell), self._due, right=True, rank=4,
                   sparse=True),
            Column("STOP", 7, self._stop, self._stopped, right=True, rank=9),
            Column("RESTARTED", 9, _restarter, lambda p: p.restarter, rank=12),
            Column("STATE", 13, self._state, self._state, rank=2),
            Column(WITHIN, 12, _surroundings, _surroundings, rank=13, grow=20,
                   sparse=True),
            Column("LAST TROUBLE", 30, self._trouble, self._trouble, rank=3, grow=40,
                   sparse=True),
            Column("COMMAND", 0, _command, lambda p: p.command, rank=14),
        ]  # fmt: skip

    def _by(self, cell: Callable[[Program, float], Cell]) -> Callable[[Process], Cell]:
        """Return the cell of a process that says something of its program."""
        return lambda process: cell(self._programs.of[process.path], self._node.now())

    def _urgency(self, process: Process) -> int:
        return self._programs.urgency[process.path]

    def _gpus(self, process: Process) -> str:
        return ",".join(str(gpu.ordinal) for gpu in self._node.gpus_of(process))

    def _due(self, process: Process) -> float:
        return self._programs.of[process.path].due or float("inf")

    def _stopped(self, process: Process) -> float:
        image = self._programs.of[process.path].image
        return image.stop_seconds if image is not None else 0.0

    def _stop(self, process: Process) -> str:
        stopped = self._stopped(process)
        return seconds(stopped) if stopped else ""

    def _trouble(self, process: Process) -> Cell:
        return trouble_cell(self._programs.of[process.path], process, self._node.now())

    def _state(self, process: Process) -> Cell:
        job = self._node.job_of(str(process.pid))
        if job is None:
            state = level_of(process)
            return _STATES.get(state, (plain(state), "warn"))
        if job.state == "queued":
            return "◌ queued", "dim"
        share = "" if job.progress is None else f" {job.progress:.0%}"
        if job.stopped:
            return f"■ {plain(job.phase)}{share}", "stop"
        return f"▶ {plain(job.phase)}{share}", "accent"


def _restarter(process: Process) -> Cell:
    """Return the kind of what would start the program again."""
    return plain(process.restarter.rpartition(" ")[0]) or ("by hand", "dim")


def _surroundings(process: Process) -> str:
    """Return the container, with its pod, the step of a Slurm job, and the pool that it is in."""
    if not (process.container or process.slurm_step or process.pool):  # as most are
        return ""
    pool = f"pool {process.pool}" if process.pool else ""
    within = (container_text(process.container), process.slurm_step, pool)
    return plain(" ".join(filter(None, within)))


def _command(process: Process) -> Cell:
    return command_line(process.command) if process.command else ("not told", "dim")
