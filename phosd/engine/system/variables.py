"""Read a variable of the environment that a process began with."""

from phosd.engine.system import procfs


def variable(pid: int, name: str) -> bytes | None:
    """Return its value, if the process has it. Raises :class:`OSError`, as it may have ended."""
    prefix = f"{name}=".encode()
    for each in procfs.environment(pid):
        if each.startswith(prefix):
            return each.removeprefix(prefix)
    return None
