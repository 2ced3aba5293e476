"""Implement ``phos analyse``: say what the kernels of a module, or of a process, access."""

import time
from pathlib import Path

import click

from phosd.cli import kernels, options
from phosd.cli.client import ask, call
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.interface.methods import PROCESS
from phosd.units import counted

_LOOK_SECONDS = 0.5


@command()
@click.argument("what", metavar="FILE|PID", type=options.FILE_OR_PID)
@click.option(
    "--architecture",
    type=click.IntRange(min=1),
    default=90,
    show_default=True,
    help="The architecture for which the code in FILE is analysed: 90 is sm_90.",
)
@click.option(
    "--seconds",
    type=click.IntRange(min=0, max=600),
    default=3,
    show_default=True,
    help="How long the launches of PID are counted, which slows it a little; 0: those that a "
    "checkpoint has counted are taken.",
)
@click.option("--kernel", "names", multiple=True, help="Only the kernel of this (mangled) name.")
def analyse(
    settings: Settings, what: Path | int, architecture: int, seconds: int, names: tuple[str, ...]
) -> None:
    """Say what kernels read and write. It is told from their machine code: of those in FILE (a
    cubin, a fat binary, PTX, or a library that has fat binaries inside), or of those that process
    PID has launched.

    READ and WRITTEN have the offsets of the parameters through which memory is read and written; a
    * stands for one that is chosen by an index.
    RANGES says of which accesses a launch tells the range. UNKNOWN says why it is not known what is
    accessed: such a kernel counts as one that reads and writes everything.
    AGAIN says which launches may be run again, since they overwrite nothing that they read: all
    (always), none in which a thread gets to where it does (never), or that depends on the launch.

    It needs nvdisasm: of `phos setup-analysis`, of phosd's extra `analysis` or of CUDA's toolkit in
    PATH. For a process
    phosd does the work, as far as `analysis` in phosd.toml lets it, and this waits for that. OF
    THESE AGAIN says how many of the launches that were counted may be run again (yes), may not
    (no), and of how many that is not known (?).

    \b
    Examples:
      phos analyse kernels.cubin
      phos analyse kernels.cubin --kernel _Z3addPfPKfi
      phos analyse libtorch_cuda.so --json | jq -r .unknown_writes[] | sort | uniq -c
      phos analyse 4711
    """
    if isinstance(what, Path):
        _of_file(settings, what, architecture, names)
    else:
        _of_process(settings, what, seconds, names)


def _of_file(settings: Settings, file: Path, architecture: int, names: tuple[str, ...]) -> None:
    from phosd.engine.analysis.summary import summarise
    from phosd.engine.kernels.entry import facts, row

    found = summarise(file.read_bytes(), architecture, names or None)
    kernels.show(
        settings,
        [row(one.kernel.name, facts(one)) for one in found],
        empty=f"{file} has no {'such ' if names else ''}kernels for sm_{architecture}",
    )


def _of_process(settings: Settings, pid: int, seconds: int, names: tuple[str, ...]) -> None:
    path = call(settings, "GetProcess", pid)

    def count() -> None:
        if seconds:
            ask(settings, path, PROCESS, "AnalyseKernels", count=seconds)
            time.sleep(seconds)

    count()
    told = 0
    while waiting := ask(settings, path, PROCESS, "AnalyseKernels"):
        if waiting != told and not settings.json:
            settings.note(f"still to be analysed: {counted(waiting, 'kernel')}")
        told = waiting
        time.sleep(_LOOK_SECONDS)
    if told:
        count()  # now the hook can tell of each launch whether it may be run again
    found = kernels.launched(settings, path)
    kernels.show(
        settings,
        [row for row in found if not names or row["kernel"] in names],
        empty=kernels.none_of(pid),
    )
