"""What reaches the terminal: nothing that it obeys, and tables that fit it."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from phosd.bus import CallError
from phosd.cli import job, tables
from phosd.cli.commands import images, ps
from phosd.cli.main import main
from phosd.cli.settings import Settings
from phosd.cli.tables import table
from phosd.client.errors import of_bus
from phosd.client.text import plain
from phosd.engine.hook_client.link import BlockFlag, HookBlock, Kernel
from phosd.engine.job.progress import Progress
from phosd.engine.system.procfs import process_id
from phosd.errors import OutOfSpace
from tests.support.fake_engine import block, manifest, this_process
from tests.support.service import Service
from tests.system.cli.test_client import lines, phos

ME = str(os.getpid())
EVIL = "\x1b]0;mine\x07\x9b31m\u202e\rred\nphos: a line of its own :bug: [bold]"
HARMLESS = r"\x1b]0;mine\x07\x9b31m\u202e\rred\nphos: a line of its own :bug: [bold]"
IMAGE = "20261120T153010-3fa{}"


def safe(text: str) -> bool:
    return plain(text, lines=True) == text and "\r" not in text


def test_programs_send_no_commands_to_the_terminal(service: Service) -> None:
    """Command lines, kernels, hooks' logs, reasons and errors are what a program likes."""
    found = process_id(os.getpid())
    assert found is not None
    service.engine.running = [
        this_process(start_time=found[1], command=("python", EVIL), reason=EVIL)
    ]
    service.engine.live_blocks = [(HookBlock(1, 0x1000, 4096, 0, BlockFlag.EXPORTED), 0)]
    service.engine.launched = [Kernel(EVIL, 7, 3, suspect=True)]
    image = manifest("i", why=EVIL)
    program = replace(image.processes[0], command=(EVIL,))
    service.engine.stored["i"] = replace(image, processes=(program,))

    def fail(progress: Progress) -> None:
        progress.note(EVIL)
        raise OutOfSpace(EVIL, hint="")

    service.engine.act = fail
    failed = phos(service, "checkpoint", ME)
    assert HARMLESS.partition(r"\n")[0] in failed.stderr
    assert safe(failed.stderr)
    for words in (
        *(["ps"], ["ps", ME], ["images"], ["images", "i"], ["jobs"], ["jobs", "1"]),
        *(["history"], ["events"]),
    ):
        done = phos(service, *words)
        assert done.returncode == 0, done.stderr
        assert safe(done.stdout), words
        assert "\nphos: a line" not in done.stdout, words
        assert ":bug: [bold]" in done.stdout or words[0] in ("jobs", "events"), words
        rows = phos(service, *words, "--json").stdout
        assert rows.isascii() and safe(rows)
    (row,) = lines(phos(service, "ps", ME, "--json").stdout)
    assert row["command"] == ["python", EVIL]
    assert row["kernels"][0]["name"] == EVIL  # type: ignore[index]


def test_a_log_keeps_its_lines_and_nothing_else(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = process_id(os.getpid())
    assert found is not None
    service.engine.running = [this_process(start_time=found[1])]
    monkeypatch.setattr(service.engine, "hook_log", lambda _: f"one\n{EVIL}\n")
    assert phos(service, "ps", ME, "--log").stdout == (
        f"one\n{HARMLESS.replace(chr(92) + 'n', chr(10))}\n"
    )


@given(st.text())
def test_plain_leaves_nothing_to_obey_and_tells_all(text: str) -> None:
    assert safe(plain(text)) and safe(plain(text, lines=True))
    assert plain(plain(text)) == plain(text)
    assert plain(text, lines=True).count("\n") == text.count("\n")


def shown(rows: Mapping[str, Sequence[str]], spare: Sequence[str], width: int) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table(rows, spare, width))
    return captured.get().splitlines()


def test_a_table_gives_up_what_it_may_and_cuts_nothing() -> None:
    rows = {"ID": ["a" * 20], "WHEN": ["b" * 20], "WHO": ["c" * 8], "WHAT": ["d" * 30]}
    assert shown(rows, ["WHEN", "WHO"], 90)[0].split() == ["ID", "WHEN", "WHO", "WHAT"]
    assert shown(rows, ["WHEN", "WHO"], 60)[0].split() == ["ID", "WHO", "WHAT"]
    assert shown(rows, ["WHEN", "WHO"], 45)[0].split() == ["ID", "WHAT"]
    for width in range(45, 100):
        text = "".join(shown(rows, ["WHEN", "WHO"], width))
        assert "a" * 20 in text and text.count("d") == 30
    upright = shown(rows, [], 30)
    assert [line.split()[0] for line in upright[:4]] == ["ID", "WHEN", "WHO", "WHAT"]
    assert all(letter * 20 in "".join(upright) for letter in "abd"), "folded only where it must be"
    assert ["".join(upright).count(letter) for letter in "abcd"] == [20, 20, 8, 30]


def test_a_table_takes_no_longer_for_each_row_the_more_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str] = []

    def counted(text: str) -> int:
        measured.append(text)
        return len(text)

    monkeypatch.setattr(tables, "cell_len", counted)
    table({"ID": ["a"] * 1000, "WHAT": ["b" * 90] * 1000}, ["ID"], 60, cut=True)
    assert len(measured) <= 3 * 2 * 1001


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_ids_are_whole_on_every_terminal(service: Service, columns: int, tmp_path: Path) -> None:
    """They are what one copies."""
    ids = [IMAGE.format(n) for n in range(3)]
    for each in ids:
        image = manifest(each, pid=4_194_303, blocks=(block(1, 2),))
        command = ("python", "-u", "/home/ann/a/long/path/train_with_a_long_name.py", "--batch=4")
        process = replace(image.processes[0], command=command)
        service.engine.stored[each] = replace(image, processes=(process,))
    found = process_id(os.getpid())
    assert found is not None
    service.engine.running = [this_process(start_time=found[1], command=("x" * 90,))]
    service.engine.go.set()
    phos(service, "checkpoint", ME)
    phos(service, "verify", ids[0])

    def on_a_terminal(*words: str) -> list[str]:
        done = CliRunner(env={"PHOS_BUS": service.address, "COLUMNS": str(columns)}).invoke(
            main, words, obj=_Terminal()
        )
        assert done.exit_code == 0, done.output
        assert "…" not in done.output or words == ("images",), "its commands are cut"
        rows = done.output.splitlines()
        assert all(len(row) <= columns and row == row.rstrip() for row in rows), rows
        return rows

    table = on_a_terminal("images")
    assert [word for row in table for word in row.split() if word in ids] == ids
    assert sum("4194303" in row for row in table) == 3
    if columns > 40:
        assert [row.split()[0] for row in table if row.startswith("2026")] == ids
        assert len(table) == 1 + 4, "one line for each"
        dated = ["2026-01-02 " in row for row in table if row.startswith("2026")]
        assert all(dated) is (columns == 80)
    on_a_terminal("gpus")
    on_a_terminal("events")
    assert sum(row.count("x") for row in on_a_terminal("ps") if "PID" not in row) >= 90
    for words in (("jobs",), ("history",)):
        text = "\n".join(on_a_terminal(*words))
        assert ids[0] in text and "image-0" in text and ME in text


class _Terminal(Settings):
    """As if standard output were one, as wide as COLUMNS says."""

    @property
    def out(self) -> Console:
        return self._console(width=int(os.environ["COLUMNS"]))


def test_a_list_that_is_not_all_says_so(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    found = process_id(os.getpid())
    assert found is not None
    service.engine.running = [this_process(start_time=found[1])]
    service.engine.live_blocks = [
        (HookBlock(n, n << 21, 4096, 0, BlockFlag.EXPORTED), 0) for n in range(1, 4)
    ]
    service.engine.launched = [Kernel(f"k{n}", n, 3, suspect=False) for n in range(3)]

    def run(*words: str) -> str:
        done = CliRunner(env={"PHOS_BUS": service.address}).invoke(main, words)
        assert done.exit_code == 0, done.output
        return done.output

    row = json.loads(run("ps", ME, "--json"))
    assert (row["all_blocks"], row["all_kernels"]) == (True, True)
    assert "there may be more" not in run("ps", ME)
    monkeypatch.setattr(ps, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(ps, "_MOST_KERNELS", 2)
    row = json.loads(run("ps", ME, "--json"))
    assert [len(row["blocks"]), len(row["kernels"])] == [2, 2]
    assert (row["all_blocks"], row["all_kernels"]) == (False, False)
    text = run("ps", ME)
    assert "blocks        only 2 of the lowest ids; there may be more" in text
    assert "kernels       only 2, suspects and those launched most; there may be more" in text


def test_an_image_tells_all_its_blocks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_PAGE", 2)
    for count in (4, 5):
        service.engine.stored[f"i{count}"] = manifest(
            f"i{count}", blocks=tuple(block(n) for n in range(count))
        )
    service.call("ListImages")
    for count in (4, 5):
        done = CliRunner(env={"PHOS_BUS": service.address}).invoke(
            main, ["images", f"i{count}", "--json"]
        )
        assert len(json.loads(done.output)["blocks"]) == count


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("org.freedesktop.DBus.Error.Spawn.ChildExited", "NoDaemon", "`journalctl -u phosd`"),
        ("org.freedesktop.DBus.Error.TimedOut", "NoDaemon", "`journalctl -u phosd`"),
        ("org.freedesktop.systemd1.UnitMasked", "NoDaemon", "`journalctl -u phosd`"),
        ("org.freedesktop.DBus.Error.ServiceUnknown", "NoDaemon", "`systemctl start phosd`"),
        ("org.freedesktop.DBus.Error.UnknownObject", "UnknownObject", "meanwhile"),
        ("org.phos.Error.Busy", "Busy", "what the bus said"),
    ],
)
def test_errors_of_the_bus_say_what_to_do(name: str, code: str, text: str) -> None:
    error = of_bus(CallError(name, "what the bus said"), "system")
    assert error.code == code
    assert text in str(error)


def test_what_has_no_total_has_no_bar() -> None:
    settings = Settings()
    settings.__dict__["err"] = Console(file=io.StringIO(), width=100, force_terminal=True)
    bars = job._bars(settings)
    task = bars.add_task("freeze", total=None)

    def shown() -> str:
        with settings.err.capture() as drawn:
            settings.err.print(bars.get_renderable())
        return Text.from_ansi(drawn.get()).plain

    assert shown().split()[1:] == ["freeze"]
    bars.update(task, total=2 << 20, completed=1 << 20)
    assert "━" in shown() and "1.0/2.0 MiB" in shown()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_trouble(closed: str) -> None:
    """As in a daemon's child, or a script that closes what it does not need."""
    words = f'exec "$0" -m phosd.cli.main --bus unix:path=/nowhere ps {closed}'
    done = subprocess.run(["sh", "-c", words, sys.executable], capture_output=True, check=False)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
