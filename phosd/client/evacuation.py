"""Describe the plan that clears a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A row of ``PlanEvacuation``. ``action`` is ``migrate``, ``suspend`` or ``stay``."""

    pid: int
    action: str
    device_bytes: int
    destination: str
    why: str
    command: str

    @property
    def text(self) -> str:
        """Short description of the step."""
        gpu = self.destination.rpartition(":")[2]
        return {"migrate": f"to GPU {gpu}", "stay": "stays"}.get(self.action, self.action)
