"""Dispatch ``phos`` to its commands."""

import dataclasses
import importlib
import keyword
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from phosd import __version__
from phosd.cli.settings import Settings, shared_options
from phosd.client.errors import CommandError, Exit

_COMMANDS = {
    "run": "Run COMMAND under phosd's hook; no daemon is needed.",
    "ps": "List the processes that use a GPU, and how each can be saved; or tell all about PID: "
    "its device memory, and the kernels that the last checkpoint saw it launch.",
    "status": "Say which programs are protected, and what needs you; those first. As root "
    "everybody's.",
    "gpus": "List the GPUs of this node, and which of your processes use them; as root, "
    "everybody's.",
    "checkpoint": "Save process PID and its children as an image, and let it go on, or end it.",
    "continue": "Let process PID go on, which `phos checkpoint --hold` has saved and holds.",
    "restore": "Run the program of IMAGE again from where it was, under its old pid.",
    "images": "List the images, oldest first; or tell all about IMAGE, and the device memory that "
    "it holds, in the order in which it is loaded, and its files, with what restores have LEFT "
    "beside them.",
    "note": "Write a note of IMAGE, a line that tells it apart; or show it.",
    "export": "Write IMAGE to FILE, which `phos import` reads on another machine; - is standard "
    "output.",
    "import": "Store the image in FILE, which `phos export` wrote on another machine; - is "
    "standard input.",
    "push": "Bring IMAGE to URL, from where `phos pull` takes it to another machine: a bucket, a "
    "folder, anything that fsspec knows.",
    "pull": "Store an image that `phos push` has brought to URL: the newest, or the one whose id "
    "there is IMAGE, or begins with it, or the newest with this name.",
    "verify": "Read all of IMAGES and compare them with their digests, or rehearse their restores.",
    "rm": "Delete IMAGES for good, after a question that says what they are.",
    "prune": "Delete output of `phos run` that nothing needs any more, with --images old images, "
    "and with --files what restores have left of a program's files.",
    "migrate": "Move process PID and its children to another GPU of this node.",
    "suspend": "Take process PID off its GPUs, with its children and all that share device memory "
    "with it.",
    "resume": "Bring the suspended process PID back, with all that was suspended with it.",
    "swap": "Suspend process OUT, and resume the suspended process IN on the GPU that has become "
    "free: two programs, of which the GPU holds only one, take turns.",
    "evacuate": "Clear GPU, named by its number or the beginning of its UUID: your processes "
    "there, or as root everybody's, move to the GPUs of the same chip with most memory free.",
    "wait": "Wait until process PROGRAM has ended, or your program of that name, and exit with its "
    "exit code.",
    "jobs": "List the jobs that run or ended lately; or tell all about JOB; or cancel one.",
    "history": "List past jobs, newest first: yours, or as root everybody's.",
    "events": "List what happened, newest first: what concerns you, or as root everything.",
    "doctor": "Look at everything that checkpoints need; works without phosd running.",
    "trust": "Clear KERNEL, or all kernels, of PID's program of suspicion.",
    "analyse": "Say what the kernels in FILE read and write, from their machine code: in a cubin, "
    "a fat binary, PTX, or a library that has fat binaries inside; or those that process PID has "
    "launched, or your program of that name.",
    "setup-container-runtime": "Make RUNTIME put phosd's hook into the containers that ask for it, "
    "so that their programs can be suspended, resumed and moved from outside, and saved by "
    "RUNTIME's own commands.",
    "warm-cache": "Analyse all kernels in FILES, or in the libraries, cubins and PTX in FOLDERS, "
    "ahead of time: programs that load them find it done.",
    "recover": "Bring processes back that were left locked, checkpointed or parked.",
    "demo": "Train a small network, save it, kill it, restore it, and compare what it computes.",
}
"""The commands in the order in which one needs them, each with the first sentence of its help.

Each command is in the module of its name (with underscores; a keyword has one behind it) in
``commands``, and ``run`` in ``run_command``. It is imported only to run it, so that listing the
commands or running one does not load what the others need.
"""


_ELSEWHERE = {
    "delete": "rm",
    "dump": "checkpoint",
    "kill": "checkpoint PID --end",
    "list": "ps",
    "logs": "ps PID --log",
    "ls": "ps",
    "pause": "suspend PID",
    "remove": "rm",
    "save": "checkpoint",
    "start": "run",
    "stop": "suspend PID",
    "top": "status",
}
"""Commands that are called otherwise in other tools, and what they are here."""


def _meant(word: str) -> str:
    """Return the command that somebody meant by a word that is none; empty: none comes close."""
    if word in _ELSEWHERE:
        return _ELSEWHERE[word]
    import difflib

    return next(iter(difflib.get_close_matches(word, _COMMANDS, n=1)), "")


def named(name: str) -> click.Command:
    """Import and return the command of this name."""
    here = f"{name}_" if keyword.iskeyword(name) else name.replace("-", "_")
    where = "run_command" if name == "run" else "commands"
    command: click.Command = getattr(importlib.import_module(f"phosd.cli.{where}.{here}"), here)
    return command


class _Never(click.ClickException):
    """An error that is never raised."""


class _Lazy(click.Group):
    """A group that lists the commands in order, and imports only the one that is run or
    completed.
    """

    def __init__(self, **attributes: Any) -> None:
        listed = {name: click.Command(name, help=text) for name, text in _COMMANDS.items()}
        super().__init__(commands=listed, **attributes)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            if meant := _meant(args[0]):
                said = f"{error.message.rstrip('.')} (did you mean `phos {meant}`?)"
                raise click.UsageError(said, error.ctx) from None
            raise
        return name, named(name) if name and command else None, rest

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that ``args`` name, or the words of the command line. Wrong usage is told
        as every other error is.
        """
        _open_what_is_closed()
        words = sys.argv[1:] if args is None else args
        if not standalone_mode:
            return super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            exit_code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except _NoArgs as error:
            error.show()
            exit_code = error.exit_code
        except CommandError as error:  # of a name that was looked up
            _settings_of(error, words).tell(error)
            exit_code = error.exit
        except click.ClickException as error:
            _settings_of(error, words).tell(CommandError("Usage", _usage(error)))
            exit_code = error.exit_code
        except click.Abort:
            Settings().note("phos: interrupted")
            exit_code = Exit.FAILED
        sys.exit(exit_code if isinstance(exit_code, int) else Exit.DONE)


# Newer versions of click raise it, to show the help.
_NoArgs: type[click.ClickException] = getattr(click.exceptions, "NoArgsIsHelpError", _Never)


def _open_what_is_closed() -> None:
    """Open closed standard streams on /dev/null: what is opened next would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _settings_of(error: Exception, words: Sequence[str]) -> Settings:
    """Return the settings as far as they are known: the words behind the wrong one were not read,
    and may ask for JSON.
    """
    context = getattr(error, "ctx", None)
    known = context.find_object(Settings) if context else None
    ours = list(words)[: words.index("--")] if "--" in words else words
    return dataclasses.replace(known or Settings(), json="--json" in ours)


def _usage(error: click.ClickException) -> str:
    """Return what is wrong, and where it is said how to write it."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "phos"
    return f"{error.format_message().rstrip('.')}; `{path} --help` says what there is"


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phos")
@shared_options
def main() -> None:
    """Checkpoint, restore and move unmodified GPU programs.

    \b
    A first try:
      phos doctor                      what this machine can do, and what is missing
      phos run -- python train.py      start a program so that it can be saved
      phos ps                          find its pid
      phos checkpoint 4711             save it; it goes on
      phos status                      is everything saved, and what needs you?
      phos images                      what was saved
      phos restore IMAGE               run it again from there, after it ended
      phos migrate 4711 --to 1         or move it to another GPU
      phos suspend 4711                or leave its GPU for a while; `phos resume 4711`

    What `phos run --name bert` has started may be called bert wherever a pid is asked for.

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not authorized, 4 no such thing,
    5 not now (busy, out of time, memory or space), 6 never (unsupported).
    """


if __name__ == "__main__":
    main()
