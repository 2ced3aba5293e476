"""Take the screenshots of phos-tui in docs/screens from a real session.

    python packaging/make_screens.py [--to docs/screens] [--size 110x30] [-- COMMAND...]

Starts a private bus, phosd and a program under ``phos run``: the training of ``phos demo``, or
COMMAND. Using the keys of phos-tui, it checkpoints the program, verifies an image, kills the
program and restores it, and writes each screen as SVG on the way. On a machine without a GPU the
program gets the software GPU. Needs root, as CRIU does. Removes its folders and daemons at the end.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import screenshots
from textual.pilot import Pilot

from phosd.client.records import Image, Job, Process
from phosd.demo import stage
from phosd.engine.system.native import python_environment
from phosd.tui.app import PhosApp
from phosd.tui.link import BusLink
from phosd.tui.node import Node
from phosd.tui.widgets.table import RecordTable

_COMMAND = ("python", "-m", "phosd.demo.train")
_PATIENCE = 120.0
_CHECKPOINTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of phos-tui.")
    parser.add_argument("--to", type=Path, default=Path("docs/screens"), help="the folder")
    parser.add_argument("--size", default="110x30", help="columns and rows (default: 110x30)")
    parser.add_argument("command", nargs="*", help="what runs (default: the demo's training)")
    options = parser.parse_args()
    columns, _, rows = options.size.partition("x")
    if not (columns.isdigit() and rows.isdigit()):
        parser.error(f"--size {options.size}: write columns and rows, such as 110x30")
    session = _session(options.to, (int(columns), int(rows)), options.command or list(_COMMAND))
    try:
        asyncio.run(session)
    except stage.DemoError as error:
        sys.exit(f"make_screens: {error}")


async def _session(folder: Path, size: tuple[int, int], command: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    async with (
        stage.folder() as place,
        stage.private_bus(place) as address,
        stage.daemon(place, address),
        _program(place, command),
    ):
        app = PhosApp(Node(BusLink(address), name="node7"))
        async with app.run_test(size=size) as pilot:
            await _Session(pilot, app, folder).play()


@asynccontextmanager
async def _program(place: Path, command: list[str]) -> AsyncIterator[None]:
    """Run the program under ``phos run``, with this Python's folder first in PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    env = python_environment() | {
        "PATH": path,
        "PHOS_RUNTIME_DIR": str(place / "run"),
        "XDG_STATE_HOME": str(place / "home"),
    }
    run = [sys.executable, "-m", "phosd.cli.main", "run", "--", *command]
    async with stage.running(run, place / "run.log", env):
        yield


class _Session:
    """An operator's session, in which screenshots are taken."""

    def __init__(self, pilot: Pilot[None], app: PhosApp, folder: Path) -> None:
        self._pilot = pilot
        self._app = app
        self._node = app.node
        self._folder = folder

    async def play(self) -> None:
        """Play the whole session, and kill the program if it still runs."""
        await self._until(self._found, "a GPU process with a hook")
        pid = self._found()[0].pid
        try:
            await self._play(pid)
        finally:
            if self._node.process(pid) is not None:
                os.kill(pid, signal.SIGKILL)

    async def _play(self, pid: int) -> None:
        await self._choose(pid)
        for number in range(1, _CHECKPOINTS + 1):
            await self._pilot.press("c")
            if number == _CHECKPOINTS:
                await self._until(lambda: self._node.active_jobs, "the job")
                await self._picture("processes")
            await self._ended(number)
        await self._pilot.press("enter")
        await self._picture("process")
        await self._pilot.press("q", "2")
        await self._picture("jobs")
        await self._pilot.press("enter")
        await self._picture("job")
        await self._pilot.press("q", "3", "v")
        await self._ended(_CHECKPOINTS + 1)
        os.kill(pid, signal.SIGKILL)
        await self._until(lambda: self._node.process(pid) is None, "the end of the program")
        await self._pilot.press("r")
        await self._ended(_CHECKPOINTS + 2)
        await self._until(lambda: self._node.process(pid), "the restored program")
        await self._picture("images")
        await self._pilot.press("enter")
        await self._picture("image")
        await self._pilot.press("q")
        for key, name in (("4", "history"), ("5", "gpus"), ("6", "log")):
            await self._pilot.press(key)
            await self._picture(name)

    async def _choose(self, pid: int) -> None:
        """Filter for our program, to hide others on this machine."""
        await self._pilot.press("slash", *str(pid), "enter")
        chosen = self._app.screen.query_one(RecordTable).chosen
        if [process.pid for process in chosen] != [pid]:
            raise stage.DemoError(f"the program, {pid}, has ended")

    def _found(self) -> list[Process]:
        """Return processes whose hook is in our runtime folder: the program that we started."""
        return [p for p in self._node.of(Process).values() if p.hook == "hooked"]

    async def _ended(self, count: int) -> None:
        """Wait until ``count`` jobs have succeeded, and for the images that they made."""
        jobs = self._node.of(Job)
        await self._until(lambda: sum(j.over for j in jobs.values()) >= count, f"job {count}")
        for job in jobs.values():
            if job.state != "done":
                raise stage.DemoError(f"job {job.number} is {job.state}: {job.message}")
        made = min(count, _CHECKPOINTS)
        await self._until(lambda: len(self._node.of(Image)) >= made, f"image {made}")

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        await stage.until(condition, what, _PATIENCE)

    async def _picture(self, name: str) -> None:
        await self._pilot.pause(1.5)  # for replies and the figures in them
        path = self._folder / f"{name}.svg"
        screenshots.write(self._app, path)
        print(path)


if __name__ == "__main__":
    main()
