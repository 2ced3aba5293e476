"""Implement ``phos trust``: clear suspect kernels."""

import click

from phosd.cli import options
from phosd.cli.client import ask, call, if_missing
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.interface.methods import PROCESS


@command()
@click.argument("pid", type=options.PID)
@click.argument("kernel", default="")
def trust(settings: Settings, pid: int, kernel: str) -> None:
    """Clear kernels of suspicion. KERNEL is one of the program's suspects; without it all are
    cleared.

    When a program writes where phosd did not expect it during a checkpoint, the kernels that may
    have done so become suspects: in later checkpoints each counts as writing everything, which is
    slow. `phos ps PID` lists the suspects. Once cleared, what a kernel writes is predicted from its
    arguments again. If one is trusted wrongly, the next checkpoint finds that out.

    \b
    Examples:
      phos trust 4711
      phos trust 4711 scatter_kernel
    """
    path = call(settings, "GetProcess", pid)
    with if_missing("NoSuchProcess", f"process {pid} has ended; `phos ps` lists those that run"):
        count = ask(settings, path, PROCESS, "TrustKernels", kernel=kernel)
    if settings.json:
        settings.emit({"pid": pid, "kernel": kernel or None, "trusted": count})
    else:
        settings.say(f"suspect kernels cleared: {count}")
