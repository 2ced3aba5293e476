"""The tutorial (docs/tutorial.md): its commands do what it says, and print what it shows. Numbers,
pids and names of images may differ.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import PATIENCE, PROGRAMS

PAGE = PROGRAMS.parents[1] / "docs/tutorial.md"
FOLDER = "/tmp/tutorial"
"""The page's folder. The test has another one in its place."""
_BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")
_VARIES = re.compile(r"\d{8}T\d{6}-[0-9a-f]+|\d+(?:\.\d+)?")
"""What another run prints otherwise: names of images and of output folders, and numbers."""
_STAYS = ("0", "75")
"""Numbers that every run prints: of steps with two losses, of the first GPU, and the exit code."""
_LOOKS = re.compile(r"(?:phos (?:gpus|ps|status|images)|tail|head|sort)\b")
"""Commands that change nothing: they are given again until they print what is expected."""
_TIMEOUT = """\
timeout() { shift 2; "$@" & until [ -s /dev/fd/1 ]; do sleep 0.1; done; kill $!; wait $!; }
"""
"""Sends SIGTERM when the program has printed something, however long that takes."""


ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Begins a command in a pid namespace of its own: beside it, a test may be a GPU process."""


class Shell:
    """A shell in which the page's commands are given. All that it starts ends with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.process = subprocess.Popen(
            [*ALONE, "sh", "-c", "dbus-run-session -- bash; exit $?"],
            cwd=PAGE.parents[1],
            env=os.environ | {"XDG_STATE_HOME": self._folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.run(_TIMEOUT)

    def run(self, command: str) -> list[str]:
        """Return the lines that a command prints, without empty ones."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        given = command.replace(FOLDER, self._folder)
        self.process.stdin.write(f"{given}\n(exit $?); code=$?; echo; echo END; (exit $code)\n")
        self.process.stdin.flush()
        lines = iter(self.process.stdout.readline, "")
        printed = [line.replace(self._folder, FOLDER).strip() for line in until(lines, "END\n")]
        return [line for line in printed if line]


def until(lines: Iterator[str], last: str) -> Iterator[str]:
    """Yield the lines before ``last``."""
    for line in lines:
        if line == last:
            return
        yield line


def steps() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the page, and the lines that the page shows below it."""
    for block in _BLOCK.findall(PAGE.read_text()):
        for step in block.removeprefix("$ ").split("\n$ "):
            command, *shown = step.splitlines()
            yield command, [line for line in shown if line]


def pattern(line: str) -> str:
    """A regular expression for a line of the page: what varies is a group of its own."""
    words = [re.escape(word) for word in re.split(_VARIES, " ".join(line.split()))]
    words = [re.sub("[KMGT]iB", "[KMGT]iB", word) for word in words]
    values = [f"({kind(value)})" for value in _VARIES.findall(line)]
    return "".join(word + value for word, value in zip(words, [*values, ""], strict=True))


def kind(value: str) -> str:
    """A regular expression for what may stand in a value's place."""
    if value in _STAYS:
        return value
    return r"\d{8}T\d{6}-[0-9a-f]+" if "-" in value else r"\d+(?:\.\d+)?"


def values_of(shown: list[str], printed: list[str]) -> dict[str, str] | None:
    """Return what was printed for each value on the page, or None if the shape is another one."""
    found: dict[str, str] = {}
    if len(shown) != len(printed):
        return None
    for expected, line in zip(shown, printed, strict=True):
        match = re.fullmatch(pattern(expected), " ".join(line.split()))
        if match is None:
            return None
        found |= zip(_VARIES.findall(expected), match.groups(), strict=True)
    return found


def meant(command: str, values: dict[str, str]) -> str:
    """The command, with the pids and folders of this run in place of the page's."""
    return _VARIES.sub(
        lambda found: values.get(found[0], found[0]) if len(found[0]) > 3 else found[0], command
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """The tutorial's folder, which it makes itself. Its name is short: sockets are in it."""
    home = Path(tempfile.mkdtemp(prefix="phos-"))
    yield home / "t"
    shutil.rmtree(home)


def test_the_tutorial_does_and_prints_what_it_says(folder: Path) -> None:
    shell = Shell(folder)
    values: dict[str, str] = {}
    for command, shown in steps():
        if command == "exit":
            break
        given = meant(command, values)
        deadline = time.monotonic() + PATIENCE
        printed = shell.run(given)
        while (found := values_of(shown, printed)) is None:
            said = "\n".join([f"$ {given}", *printed])
            assert _LOOKS.match(command) and time.monotonic() < deadline, (
                f"docs/tutorial.md shows other lines than these:\n{said}"
            )
            time.sleep(0.1)
            printed = shell.run(given)
        values |= found
    assert shell.process.communicate("exit\n", timeout=PATIENCE)
    assert shell.process.returncode == 0
    last = (folder / "1.txt").read_text().splitlines()[-1]
    first = (folder / "2.txt").read_text().splitlines()[0]
    assert int(first.split()[0]) == int(last.split()[0]) + 1, "it went on where it was saved"
    subprocess.run(["rm", "-r", folder], check=True)
