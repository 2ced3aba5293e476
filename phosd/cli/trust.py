"""``phos trust``: kernels that are suspects no more."""

import click

from phosd.bus import Variant
from phosd.cli import options
from phosd.cli.client import ask, call, if_missing
from phosd.cli.settings import Settings, command


@command()
@click.argument("pid", type=options.PID)
@click.argument("kernel", default="")
def trust(settings: Settings, pid: int, kernel: str) -> None:
    """Take KERNEL, or all kernels, of PID's program for what their arguments tell again.

    When a program writes where nobody expected it during a checkpoint, the kernels that may have
    done so become suspects: in later ones each is taken to write everything, which is slow.
    `phos ps PID` lists them. If one is trusted wrongly, the next checkpoint finds that out.

    \b
    Examples:
      phos trust 4711
      phos trust 4711 scatter_kernel
    """
    (path,) = call(settings, "GetProcess", "u", pid)
    with if_missing("NoSuchProcess", f"process {pid} has ended; `phos ps` lists those that run"):
        count = ask(settings, path, "Process1", "TrustKernels", kernel=Variant("s", kernel))
    if settings.json:
        settings.emit({"pid": pid, "kernel": kernel or None, "trusted": count})
    else:
        settings.say(f"trusted again: {count}")
