"""Say in words which pod, Slurm job or container a program is in."""

from phosd.engine.system.containers import Container, container_of
from phosd.engine.system.slurm_steps import SlurmStep, step_of

_SHORT_ID = 12
"""Characters of a container's id, as runtimes shorten it."""


def within(container: Container | None, step: SlurmStep | None) -> str:
    """Return ``pod NAMESPACE/NAME``, ``Slurm job 12``, ``container NAME``, or nothing. What would
    start the program again comes first.
    """
    if container is not None and container.pod:
        return f"pod {container.pod}"
    if step is not None:
        return f"Slurm job {step.job}"
    if container is not None:
        return f"container {container.name or container.id[:_SHORT_ID]}"
    return ""


def within_of(pid: int) -> str:
    """Return the same of a process; nothing if it has ended."""
    return within(container_of(pid), step_of(pid))
