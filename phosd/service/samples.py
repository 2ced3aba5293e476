"""What the GPUs did during the last minutes."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from phosd.engine.node.gpus import GpuInfo

PERIOD = 2.0
"""Seconds from one look at the GPUs to the next."""
_KEPT = 300


@dataclass(frozen=True)
class Sample:
    """Figures of one GPU at one time, in seconds since the epoch; None where it does not tell."""

    time: float
    utilisation: float | None
    memory_used: int | None
    temperature: float | None
    power: float | None

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        figures = (self.utilisation, self.memory_used, self.temperature, self.power)
        return all(figure is None for figure in figures)


class Samples:
    """The latest ten minutes of each GPU that tells something, in memory."""

    def __init__(self) -> None:
        self._rings: dict[str, deque[Sample]] = {}

    def take(self, gpus: Iterable[GpuInfo], now: float) -> None:
        """Remember what these GPUs, which are all that there are, tell at a time."""
        rings = {}
        for gpu in gpus:
            sample = Sample(now, gpu.utilisation, gpu.memory_used, gpu.temperature, gpu.power)
            ring = self._rings.get(gpu.uuid, deque(maxlen=_KEPT))
            if not sample.empty:
                ring.append(sample)
            rings[gpu.uuid] = ring
        self._rings = rings

    def of(self, uuid: str) -> list[Sample]:
        """Those of one GPU, oldest first."""
        return list(self._rings.get(uuid, ()))
