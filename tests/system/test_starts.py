"""What a start takes: each command and each process of ours imports only what it uses."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from phosd.cli.main import main, named

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
    shared |= {f"run_command.{name}" for name in run}
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


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_list_says_of_each_command_what_it_says_itself(width: int) -> None:
    eager = click.Group(commands={name: named(name) for name in main.commands})
    eager.list_commands = main.list_commands  # type: ignore[method-assign]
    shown, wanted = (
        CliRunner().invoke(group, ["--help"], terminal_width=width).output.partition("Commands:")
        for group in (main, eager)
    )
    assert shown[2] == wanted[2] != ""


def test_each_command_is_in_the_module_of_its_name() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        assert named(name).name == name
        assert main.resolve_command(context, [name, "--help"]) == (name, named(name), ["--help"])
    done = CliRunner().invoke(main, ["fly"])
    assert (done.exit_code, "No such command 'fly'" in done.output) == (2, True)
