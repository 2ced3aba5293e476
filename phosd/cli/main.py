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

GROUPS = {
    "Programs": {
        "run": "Start a program so that it can be saved",
        "ps": "List the programs that use a GPU, or show one",
        "status": "Say what is protected, and what needs you",
        "checkpoint": "Save a running program as an image",
        "continue": "Let a program that is held go on",
        "restore": "Run a program again from its image",
        "wait": "Wait until a program has ended",
    },
    "Images": {
        "images": "List the images, or show one",
        "note": "Write the note of an image, or show it",
        "verify": "Check that images are whole",
        "rm": "Delete images for good",
        "export": "Write an image to a file",
        "import": "Store an image from a file",
        "push": "Bring an image to a bucket or a folder",
        "pull": "Store an image that was pushed",
    },
    "Moving": {
        "migrate": "Move a program to another GPU",
        "suspend": "Take a program off its GPUs for a while",
        "resume": "Bring a suspended program back",
        "swap": "Let two programs take turns on a GPU",
        "pool": "Keep programs ready for `phos start`",
        "start": "Start a program of a pool",
        "evacuate": "Clear a GPU of its programs",
    },
    "Overview": {
        "gpus": "List the GPUs, and who uses them",
        "jobs": "List the jobs, show one, or cancel one",
        "history": "List past jobs",
        "events": "List what happened",
    },
    "Kernels": {
        "analyse": "Say what kernels read and write",
        "trust": "Clear kernels of suspicion",
        "warm-cache": "Analyse kernels before they are loaded",
    },
    "Node": {
        "doctor": "Check that this machine can save programs",
        "recover": "Bring back programs that were left stopped",
        "prune": "Delete what nothing needs any more",
        "setup-analysis": "Install NVIDIA's tools that read kernels",
        "setup-container-runtime": "Let containers ask for phosd's hook",
        "demo": "Save, kill and restore a small training",
    },
}
"""The commands by what one does with them, in the order in which one needs them, each with the
first sentence of its help.

Each command is in the module of its name (with underscores; a keyword has one behind it) in
``commands``, and ``run`` in ``run_command``. It is imported only to run it, so that listing the
commands or running one does not load what the others need.
"""

_COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


_ELSEWHERE = {
    "clone": "restore IMAGE --clone",
    "delete": "rm",
    "dump": "checkpoint",
    "kill": "checkpoint PID --end",
    "help": "--help",
    "list": "ps",
    "log": "ps PID --log",
    "logs": "ps PID --log",
    "ls": "ps",
    "pause": "suspend PID",
    "rehearse": "verify IMAGE --rehearse",
    "remove": "rm",
    "save": "checkpoint",
    "schedule": "checkpoint PID --every 10min",
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
        listed = {name: click.Command(name, short_help=text) for name, text in _COMMANDS.items()}
        super().__init__(commands=listed, **attributes)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands group by group, their sentences one below the other."""
        longest = max(map(len, self.commands))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), text) for name, text in group.items()])

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
