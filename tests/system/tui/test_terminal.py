"""Once for real: the daemon, a program on the software GPU, and phos-tui in a terminal."""

import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from phosd.client import Client
from tests.support.harness import PROGRAMS, alive, parse, wait_until
from tests.system.service.test_end_to_end import phos, phos_ended, phosd

_PATIENCE = 120.0
"""A checkpoint and a restore each take seconds, and more on a busy machine."""


class Terminal:
    """A terminal of tmux, in which a program runs. ``socket`` is tmux's own, in a test's folder."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.ended = socket.with_suffix(".status")

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *words]
        environment = os.environ | {"LC_ALL": "C.UTF-8"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "phos", *keys)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "phos")

    def status(self) -> str:
        """The exit status of the program; nothing while it runs."""
        return self.ended.read_text() if self.ended.exists() else ""

    def shows(self, *words: str) -> None:
        """Wait until all these are on the screen, wherever its lines end."""

        def there(screen: str) -> bool:
            in_one_line = " ".join(screen.split())
            return all(word in screen or word in in_one_line for word in words)

        self._waits(there, f"{words}")

    def hides(self, word: str) -> None:
        """Wait until this is on the screen no more."""
        self._waits(lambda screen: word not in screen, f"the end of {word!r}")

    def lists(self, pid: int) -> None:
        """Wait until this process has a row on the first screen."""
        self._waits(partial(_row, pid), f"a row of {pid}")

    def ends(self, pid: int) -> None:
        """Wait until it has none any more; there may be others, and jobs about it."""
        self._waits(lambda screen: not _row(pid, screen), f"the end of {pid}")

    def _waits(self, condition: Callable[[str], bool], what: str) -> None:
        seen = [""]

        def there() -> bool:
            seen[0] = self.screen()
            return condition(seen[0])

        try:
            wait_until(there, what, patience=_PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error} in the terminal:\n{seen[0]}") from None


def _row(pid: int, screen: str) -> bool:
    """Return whether it has a row: what else is about it has no word on its protection."""
    return bool(re.search(rf" {pid} .*B [✗○▲·●] ", screen))


@contextmanager
def terminal(folder: Path, command: list[str]) -> Iterator[Terminal]:
    """A terminal of 100x30 with this program, until the end of the context."""
    found = Terminal(folder / "tmux")
    line = f"{shlex.join(command)}; echo $? >{found.ended}"
    found.tmux("new-session", "-d", "-s", "phos", "-x", "100", "-y", "30", line)
    try:
        found.tmux("set-option", "-t", "phos", "remain-on-exit", "on")
        yield found
    finally:
        found.tmux("kill-server")


@contextmanager
def program(bus: str, folder: Path, *options: str) -> Iterator[tuple[int, Path]]:
    """A program that computes on the software GPU, and where its output goes."""
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]
    words = ("--gpu", "soft", "--detach", *options, "--", *single)
    (started,) = phos(bus, folder, "run", *words)
    pid, output = int(str(started["pid"])), Path(str(started["stdout"]))
    try:
        wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
        yield pid, output
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(500)
def test_checkpoint_kill_and_restore_with_a_key_each(bus: str, tmp_path: Path) -> None:
    tui = [sys.executable, "-m", "phosd.tui.main", "--bus", bus]
    with (
        phosd(bus, tmp_path),
        terminal(tmp_path, tui) as shown,
        program(bus, tmp_path) as (pid, output),
    ):
        shown.shows("1 Processes", "0 PHOS software", str(pid), "○ never")
        shown.press("/")
        shown.press("-l", str(pid))  # whatever else runs here, the row is the program's
        shown.press("Enter")
        shown.lists(pid)
        shown.press("c")
        shown.shows(f"checkpoint of {pid} is done")
        shown.press("2")
        shown.shows("✓ done")
        shown.press("Enter")
        shown.shows(f"Job 1: checkpoint of {pid}", "SECONDS", "persist", "publish")
        shown.press("q")
        shown.shows("RESULT", "✓ done")
        before = parse(output.read_bytes())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), "its end")
        position = output.stat().st_size
        shown.press("1")
        shown.shows("PROTECTED")
        shown.ends(pid)
        shown.press("3")
        shown.shows(f"{pid}", "concurrent")
        shown.press("r")
        shown.shows("restore of")
        wait_until(lambda: len(parse(output.read_bytes()[position:])) > 5, "the restored program")
        again = parse(output.read_bytes()[position:])
        common = again.keys() & before.keys()
        assert {step: again[step] for step in common} == {s: before[s] for s in common}
        shown.press("1")
        shown.lists(pid)
        shown.press("q")
        wait_until(shown.status, "phos-tui to end")
        assert shown.status() == "0\n", shown.screen()


@pytest.mark.timeout(500)
def test_a_restore_beside_its_program_is_refused_in_each_client(bus: str, tmp_path: Path) -> None:
    """Its pids are free in the namespace that the restore would make."""
    tui = [sys.executable, "-m", "phosd.tui.main", "--bus", bus]
    with (
        phosd(bus, tmp_path),
        terminal(tmp_path, tui) as shown,
        program(bus, tmp_path, "--name", "bert") as (pid, output),
    ):
        phos(bus, tmp_path, "checkpoint", "bert")
        for words in (["bert", "--dry-run"], ["bert"]):
            done = phos_ended(bus, tmp_path, "restore", *words)
            assert done.returncode == 5, done.stdout + done.stderr
            assert f"runs: pid {pid} (" in done.stdout + done.stderr
        with Client(bus) as client:
            (image,) = client.images()
            (check,) = [each for each in client.try_restore(image.id) if each.error]
            assert (check.what, check.error) == ("original", "Busy")
        shown.press("3")
        shown.shows("bert", "a restore needs that it has ended")
        shown.press("r")
        shown.shows("Restore", f"runs: pid {pid}")
        steps = len(parse(output.read_bytes()))
        wait_until(lambda: len(parse(output.read_bytes())) > steps, "the program to go on")


@pytest.mark.timeout(500)
def test_phosd_goes_and_another_one_comes_under_it(bus: str, tmp_path: Path) -> None:
    tui = [sys.executable, "-m", "phosd.tui.main", "--bus", bus]
    with terminal(tmp_path, tui) as shown, ExitStack() as first:
        shown.shows("No phosd for", "phosd --session")
        first.enter_context(phosd(bus, tmp_path))
        with program(bus, tmp_path) as (pid, _):
            shown.press("/")
            shown.press("-l", str(pid))
            shown.press("Enter")
            shown.lists(pid)
            shown.press("Space")
            shown.shows("○ never", "1 marked")
            first.close()
            shown.shows("✗ No phosd for", "What is shown is", "(Checkpoint)")
            shown.lists(pid)
            with phosd(bus, tmp_path):
                shown.shows(f"● {platform.node()}", "c Checkpoint", "1 marked")
                shown.lists(pid)
                shown.hides("No phosd")
                shown.press("c")
                shown.shows(f"checkpoint of {pid} is done")
                shown.press("q")
                wait_until(shown.status, "phos-tui to end")
                assert shown.status() == "0\n", shown.screen()


def test_without_a_terminal_it_says_so(bus: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phosd.tui.main", "--bus", bus],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "needs a terminal; `phos status`" in done.stderr
