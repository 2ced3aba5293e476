"""Keep figures of each GPU for the last ten minutes."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from phosd.engine.node.gpus import GpuInfo

PERIOD = 2.0
"""Seconds between two samples."""
_KEPT = 300


@dataclass(frozen=True)
class Sample:
    """Figures of one GPU at ``time`` (seconds since the epoch); None where the GPU reports
    nothing.
    """

    time: float
    utilisation: float | None
    memory_used: int | None
    temperature: float | None
    power: float | None

    @property
    def empty(self) -> bool:
        """Whether the GPU reported no figure at all."""
        figures = (self.utilisation, self.memory_used, self.temperature, self.power)
        return all(figure is None for figure in figures)


class Samples:
    """The samples of the last ten minutes of each GPU that reports figures, in memory."""

    def __init__(self) -> None:
        self._rings: dict[str, deque[Sample]] = {}

    def take(self, gpus: Iterable[GpuInfo], now: float) -> None:
        """Add a sample of each GPU at ``now`` and forget GPUs that are not in ``gpus``."""
        rings = {}
        for gpu in gpus:
            sample = Sample(now, gpu.utilisation, gpu.memory_used, gpu.temperature, gpu.power)
            ring = self._rings.get(gpu.uuid, deque(maxlen=_KEPT))
            if not sample.empty:
                ring.append(sample)
            rings[gpu.uuid] = ring
        self._rings = rings

    def of(self, uuid: str) -> list[Sample]:
        """Return the samples of one GPU, oldest first."""
        return list(self._rings.get(uuid, ()))
