"""Say in words which pod, Slurm job or container a program is in."""

from phosd.engine.system.containers import Container, container_of
from phosd.engine.system.slurm_steps import SlurmStep, step_of

_SHORT_ID = 12
"""Characters of a container's id, as runtimes shorten it."""


def within(container: Container | None, step: SlurmStep | None) -> str:
    """Return ``pod NAMESPACE/NAME``, ``Slurm job 12``, ``container NAME``, or nothing."""
    if found := pod_or_job(container, step):
        return found
    return f"container {container.name or container.id[:_SHORT_ID]}" if container else ""


def pod_or_job(container: Container | None, step: SlurmStep | None) -> str:
    """Return the pod or the Slurm job alone, which would start the program again."""
    if container is not None and container.pod:
        return f"pod {container.pod}"
    return f"Slurm job {step.job}" if step is not None else ""


def within_of(pid: int) -> str:
    """Return the same of a process; nothing if it has ended."""
    return within(container_of(pid), step_of(pid))
