"""What a start takes: each command and each process of ours imports only what it uses."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from phosd.cli.main import GROUPS, main, named

_HEAVY = {"asyncio", "cuda", "dbus_next", "msgspec", "numpy", "pynvml", "rich", "sqlite3"}
_HEAVY |= {"sqlite_utils", "textual"}
_LOOK = """
import sys
sys.argv = ["phos", *sys.argv[1:]]
from phosd.cli.main import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def imported(*words: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PHOS_BUS": "unix:path=/nowhere"},
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--help"], ""),
        (["run", "--help"], ""),
        (["run", "--gpu", "soft", "true"], ""),
        (["ps", "--json"], "asyncio dbus_next"),
        (["ps"], "asyncio dbus_next rich"),  # to say that there is no bus
        (["checkpoint", "1", "--json"], "asyncio dbus_next"),
    ],
    ids=" ".join,
)
def test_a_command_imports_only_what_it_uses(words: list[str], needed: str) -> None:
    found = imported(*words)
    assert _HEAVY & found <= set(needed.split())
    ours = {name for name in found if name.startswith(("phosd.cli.", "phosd.engine."))}
    shared = {
        "main",
        "command",
        "settings",
        "text",
        "options",
        "parameters",
        "names",
        "client",
        "job",
        "times",
    }
    shared |= {"commands", "run_command", f"commands.{words[0]}"}
    run = ("run", "program", "relay", "environment", "foreground", "named", "early_signals")
    shared |= {f"run_command.{name}" for name in (*run, "output_room")}
    allowed = {f"phosd.cli.{name}" for name in shared}
    engine = (
        "system",
        "system.cuda",
        "system.native",
        "system.procfs",
        "system.file_status",
        "image",
        "image.name",
    )
    allowed |= {f"phosd.engine.{name}" for name in (*engine, "program", "program.name")}
    assert ours <= allowed


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        (
            "phosd.service.tasks.local_engine, phosd.service.main",
            # sqlite_utils imports numpy where it is installed.
            "asyncio dbus_next msgspec numpy pynvml sqlite3 sqlite_utils",
        ),
        ("phosd.engine.mover.worker.main", "msgspec"),
        ("phosd.engine.criu.probe", "msgspec"),
        ("phosd.engine.criu.files.file_worker", "msgspec"),
        ("phosd.engine.criu.restore.restore_shim", ""),
    ],
)
def test_a_process_of_ours_begins_with_what_it_needs(module: str, needed: str) -> None:
    found = modules_after(f"import {module}")
    assert _HEAVY & found <= set(needed.split())


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_the_list_says_of_each_command_what_it_says_itself() -> None:
    for group in GROUPS.values():
        for name, text in group.items():
            said = " ".join((named(name).help or "").split())
            assert said.startswith((f"{text}. ", f"{text}, ")), name
            assert len(text) <= 45 and not text.endswith("."), name


@pytest.mark.parametrize("width", [80, 200])
def test_the_list_has_a_line_for_each_command_of_a_group(width: int) -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=width).output
    for title, group in GROUPS.items():
        lines = shown.partition(f"\n{title}:\n")[2].split("\n\n")[0].splitlines()
        assert [line.split(maxsplit=1) for line in lines] == [list(row) for row in group.items()]
        columns = {line.rindex(group[line.split()[0]]) for line in lines}
        assert len(columns) == 1


def test_the_help_says_what_an_argument_may_be() -> None:
    for command, argument, said in (
        ("restore", "IMAGE", "NAME@3 for its third"),
        ("rm", "IMAGES", "NAME@3 for its third"),
        ("checkpoint", "PID", "or the name of a program"),
        ("swap", "OUT", "or the name of a program"),
        ("evacuate", "GPU", "the beginning of its UUID"),
    ):
        shown = CliRunner().invoke(main, [command, "--help"], terminal_width=200).output
        (line,) = (each for each in shown.splitlines() if each.startswith(f"  {argument}  "))
        assert said in line, command


def test_each_command_is_in_the_module_of_its_name() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        assert named(name).name == name
        assert main.resolve_command(context, [name, "--help"]) == (name, named(name), ["--help"])
    done = CliRunner().invoke(main, ["fly"])
    assert (done.exit_code, "No such command 'fly'" in done.output) == (2, True)
