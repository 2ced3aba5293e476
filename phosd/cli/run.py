"""Implement ``phos run``: start a program so that it can be saved and restored."""

import ctypes
import errno
import os
import shlex
import sys
from pathlib import Path

import click

from phosd.cli.program import Program, output_folder
from phosd.cli.relay import follow
from phosd.cli.settings import Settings, command
from phosd.client.errors import CommandError
from phosd.engine.system import cuda
from phosd.engine.system.native import hook_library
from phosd.errors import Reason, Unsupported

DEFAULT_RUNTIME = Path("/run/phos")
_SAVABLE = {
    # CRIU does not save io_uring, which libuv would use: that of PyTorch's TCPStore, for one.
    "UV_USE_IO_URING": "0",
    # The driver's checkpoint hangs when there is a multicast object, and NCCL makes one.
    "NCCL_NVLS_ENABLE": "0",
    # Host memory that NCCL shares by handles of the driver; without, it is memory of /dev/shm.
    "NCCL_CUMEM_HOST_ENABLE": "0",
}
"""Variables by which libraries do without what cannot be saved."""


@command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    settings: Settings,
    detach: bool,
    gpu: str,
    runtime_dir: Path | None,
    managed: str | None,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND under phosd's hook; no daemon is needed.

    The program gets a session of its own, no input, and files for its output, which are shown
    here as they grow; where they are is told first. So nothing ties it to this terminal: it can be
    saved, and it goes on when the terminal is closed. Ctrl-C and SIGTERM are passed on; the exit
    code is the program's.

    \b
    Examples:
      phos run -- python -u train.py
      phos run --detach -- ./simulate --steps 1000000
      phos run --gpu soft -- python train.py     on a machine without a GPU

    A program that sees a file as its output may hold it back for a while (`python -u` does not).
    Libraries are told to do without what cannot be saved, unless these variables say otherwise:
    UV_USE_IO_URING=0 (libuv), NCCL_NVLS_ENABLE=0 and NCCL_CUMEM_HOST_ENABLE=0 (NCCL).
    """
    environment = dict(os.environ)
    _prepend(environment, "LD_PRELOAD", hook_library())
    settings_of_nccl = do_without_what_cannot_be_saved(environment)
    if settings_of_nccl and cuda.has_several_gpus():
        settings.note(
            f"phos: NCCL does without what cannot be saved ({' '.join(settings_of_nccl)}); set "
            "these variables to decide otherwise"
        )
    if _use_software_gpu(gpu):
        _prepend(environment, "LD_LIBRARY_PATH", cuda.software_gpu())
        why = "as you asked" if gpu == "soft" else "there is no GPU here"
        settings.note(f"phos: {why}; the program gets the software GPU")
    if managed is not None:
        environment["PHOS_MANAGED"] = managed
        if managed == "host":
            settings.note("phos: managed memory is in the host; the GPU fetches it at each access")
    if runtime_dir is not None:
        environment["PHOS_RUNTIME_DIR"] = str(runtime_dir.absolute())
    _require_hook_folder(settings, (runtime_dir or DEFAULT_RUNTIME) / "hook")
    program = _start(settings, words, environment)
    if not detach:
        settings.note(f"phos: process {program.pid}; its output is kept in {program.stdout.parent}")
        sys.exit(follow(program))
    if settings.json:
        settings.emit(
            {"pid": program.pid, "stdout": str(program.stdout), "stderr": str(program.stderr)}
        )
    else:
        settings.note(f"output: {program.stdout}")
        settings.say(str(program.pid))


def do_without_what_cannot_be_saved(environment: dict[str, str]) -> list[str]:
    """Set the variables for that which are not set. Returns those for NCCL, as assignments."""
    added = {name: value for name, value in _SAVABLE.items() if name not in environment}
    environment |= added
    return [f"{name}={value}" for name, value in added.items() if name.startswith("NCCL_")]


def _start(settings: Settings, words: tuple[str, ...], environment: dict[str, str]) -> Program:
    """Start the program. Exits as a shell does: 127 without such a command, 126 if it cannot be
    executed.
    """
    try:
        return Program.start(words, environment, output_folder())
    except OSError as error:
        if error.filename is None:  # the fork failed
            raise CommandError(
                "Unsupported",
                f"no process can be started: {error}; end other processes, and try again",
            ) from error
        if error.filename != words[0]:
            raise CommandError(
                "Unsupported",
                f"the program was not started: its output files cannot be made ({error}); set "
                "XDG_STATE_HOME to a folder that you may write to",
            ) from error
        hint = (
            "; if it is a script, its first line must name its interpreter (#!/bin/sh)"
            if error.errno == errno.ENOEXEC
            else ""
        )
        settings.note(f"phos: {error.strerror}: {shlex.quote(words[0])}{hint}")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _use_software_gpu(choice: str) -> bool:
    if choice == "real":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unsupported(
                f"there is no CUDA driver ({error})",
                hint="install the NVIDIA driver, or use --gpu soft",
                reason=Reason.NO_GPU,
            ) from error
        return False
    return choice == "soft" or cuda.is_software()


def _prepend(environment: dict[str, str], variable: str, path: Path) -> None:
    """Put ``path`` first in a variable that lists paths."""
    if ":" in str(path) or " " in str(path):
        raise CommandError(
            "Unsupported",
            f"{variable} cannot hold {path}: install phosd in a path without ':' and spaces",
        )
    before = environment.get(variable)
    environment[variable] = f"{path}:{before}" if before else str(path)


def _require_hook_folder(settings: Settings, folder: Path) -> None:
    """Warn when the hook cannot make its socket, since phosd will then not find the program."""
    if not folder.exists() and os.geteuid() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o1777)
    if not os.access(folder, os.W_OK | os.X_OK):
        settings.note(
            f"phos: {folder} is not there or not writable, so phosd will not find the hook of "
            "this program; start phosd once, or use --runtime-dir"
        )
