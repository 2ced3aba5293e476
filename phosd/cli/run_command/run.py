"""Implement ``phos run``: start a program so that it can be saved and restored."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phosd.cli.command import command
from phosd.cli.parameters import Duration
from phosd.cli.run_command.environment import DEFAULT_RUNTIME, environment
from phosd.cli.run_command.foreground import Foreground, place_of_output, start
from phosd.cli.run_command.named import checked_name, only_one
from phosd.cli.settings import Settings
from phosd.engine.program.name import VARIABLE

# A start imports only what it uses: few programs are of a Slurm job.
if TYPE_CHECKING:
    from phosd.cli.run_command.enclosed import EnclosedProgram
    from phosd.cli.run_command.program import Program
    from phosd.cli.run_command.slurm import SavingStep

_OF_SLURM = "PHOS_SLURM"
"""What a job was submitted with (`--phos`), which `phosd/slurm_plugin` sets."""
_PATH_MAX = 4096
"""Bytes of a path, with the one that ends it (linux/limits.h)."""


@command(context_settings={"allow_interspersed_args": False})
@click.option("--detach", "-d", is_flag=True, help="Print the pid and return at once.")
@click.option(
    "--gpu",
    type=click.Choice(["auto", "real", "soft"]),
    default="auto",
    show_default=True,
    envvar="PHOS_GPU",
    help="The GPU that the program sees; auto takes the software GPU where there is no other.",
)
@click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="PHOS_RUNTIME_DIR",
    help=f"Where phosd looks for hooks (default: {DEFAULT_RUNTIME}).",
)
@click.option(
    "--managed",
    type=click.Choice(["device", "host"]),
    help="Where managed memory is: of the driver, which cannot save it, or in the host, from where "
    "each access of the GPU fetches it.",
)
@click.option(
    "--name",
    callback=checked_name,
    help="The name of the program, which its images keep: one of that name runs at a time.",
)
@click.option(
    "--resume",
    "resuming",
    is_flag=True,
    help="Go on from the last image of NAME, if there is one.",
)
@click.option(
    "--pidns/--no-pidns",
    default=None,
    help="Whether the program gets a pid namespace of its own, where its pids are free whenever it "
    "is restored (default: if it has a name, and phosd can make one).",
)
@click.option(
    "--on-term",
    type=click.Choice(["pass", "save"]),
    help="What SIGTERM does: it is passed on to the program (the default), or the program is saved "
    "and ended.",
)
@click.option(
    "--grace",
    type=Duration(least=1, most=86_400),
    help="How long --on-term=save may take (default: what Slurm gives the job or systemd the "
    "unit, otherwise 90).",
)
@click.option(
    "--keep-files",
    multiple=True,
    metavar="PATH",
    help="A folder, file or pattern ('runs/*.pt'): what is there belongs to each image, also when "
    "the program does not have it open, and is put back at a restore; what was made there since is "
    "put aside. Several may be given.",
)
@click.option(
    "--in-memory",
    is_flag=True,
    help="With --on-term=save: end the program when its image is complete in memory. That is "
    "sooner, and a machine that ends before the image is on the disk loses it.",
)
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    settings: Settings,
    detach: bool,
    gpu: str,
    runtime_dir: Path | None,
    managed: str | None,
    name: str | None,
    resuming: bool,
    pidns: bool | None,
    on_term: str | None,
    grace: float | None,
    keep_files: tuple[str, ...],
    in_memory: bool,
    words: tuple[str, ...],
) -> None:
    """Start a program so that it can be saved. COMMAND runs under phosd's hook; no daemon is
    needed.

    The program gets a session of its own, no input, and files for its output, which are shown
    here as they grow; where they are is told first. So nothing ties it to this terminal: it can be
    saved, and it goes on when the terminal is closed. Ctrl-C and SIGTERM are passed on; the exit
    code is the program's.

    \b
    Examples:
      phos run -- python -u train.py
      phos run --detach -- ./simulate --steps 1000000
      phos run --gpu soft -- python train.py     on a machine without a GPU
      phos run --name bert --resume --on-term=save -- python train.py
                              survives preemption: the same line the first time and the tenth

    A program that sees a file as its output may hold it back for a while (`python -u` does not).
    Libraries are told to do without what cannot be saved, unless these variables say otherwise:
    UV_USE_IO_URING=0 (libuv), NCCL_NVLS_ENABLE=0 and NCCL_CUMEM_HOST_ENABLE=0 (NCCL).

    With --on-term=save a SIGTERM to this command or to the program, as systemd and Slurm send it,
    makes phosd save and end the program, with exit code 75 when its image is on the disk. A program
    that cannot be saved in time gets the SIGTERM then. --resume goes on from the last image of NAME
    as if the program had never ended, with its output and its exit code.

    In a Slurm job that was submitted with --phos=save both are the default, and the job names the
    program.
    """
    step = _saving_step()
    saves = on_term == "save" or (step is not None and on_term is None)
    _require_possible(detach=detach, name=name, resuming=resuming, saves=saves)
    resuming = resuming or step is not None
    if not saves and (grace is not None or in_memory):
        raise click.UsageError("--grace and --in-memory are about saving; give --on-term=save, too")
    with contextlib.ExitStack() as stack:
        if step is not None:
            name = stack.enter_context(step.part_of_job(name, words, settings))
        if name is not None:
            stack.enter_context(only_one(name))
        # It tells what the program gets: not before it is known that there will be one.
        variables = environment(settings, gpu, runtime_dir, managed)
        for ours in (VARIABLE, _OF_SLURM):  # what the program itself starts is a part of it
            variables.pop(ours, None)
        if name is not None:
            variables[VARIABLE] = name
        if keep_files:
            variables |= _declared(keep_files)
        if not detach:
            foreground = stack.enter_context(
                Foreground(
                    settings,
                    name,
                    words,
                    saves=saves,
                    grace=grace,
                    in_memory=in_memory,
                    pidns=pidns,
                    step=step,
                )
            )
            sys.exit(foreground.run(variables, resuming=resuming))
        program = start(settings, name, words, variables, place_of_output(), pidns=pidns)
        _tell(settings, program)


def _declared(paths: Sequence[str]) -> dict[str, str]:
    """Return the variable that tells phosd what of a program's files it has declared."""
    from phosd.engine.program.declared import KEEP_FILES

    if unusable := next((path for path in paths if os.pathsep in path), ""):
        raise click.UsageError(
            f"--keep-files cannot have {unusable!r}: it has a {os.pathsep!r} in its name"
        )
    if "" in paths:
        raise click.UsageError(
            "--keep-files has an empty name; is a variable not set? This folder is called ."
        )
    found = [*map(os.path.abspath, paths)]
    if (longest := max(len(os.fsencode(path)) for path in found)) >= _PATH_MAX:
        raise click.UsageError(
            f"--keep-files has a path of {longest} bytes, and Linux takes no more than "
            f"{_PATH_MAX - 1}; name a folder above it"
        )
    return {KEEP_FILES: os.pathsep.join(found)}


def _tell(settings: Settings, program: "Program | EnclosedProgram") -> None:
    """Say which process the program is, and where its output goes."""
    if settings.json:
        settings.emit(
            {"pid": program.pid, "stdout": str(program.stdout), "stderr": str(program.stderr)}
        )
    else:
        settings.note(f"output: {program.stdout}")
        settings.say(str(program.pid))


def _saving_step() -> "SavingStep | None":
    """Return the step of the Slurm job that this is, if the job is to be saved."""
    if _OF_SLURM not in os.environ:
        return None
    from phosd.cli.run_command.slurm import saving_step

    return saving_step(os.environ[_OF_SLURM])


def _require_possible(*, detach: bool, name: str | None, resuming: bool, saves: bool) -> None:
    """Raise :class:`click.UsageError` for options that do not go together."""
    if resuming and name is None:
        raise click.UsageError("--resume goes on from the images of a name; give --name, too")
    if detach and (resuming or saves):
        raise click.UsageError(
            "--detach leaves nobody to save or resume the program; leave it out, or run this in "
            "the background"
        )
