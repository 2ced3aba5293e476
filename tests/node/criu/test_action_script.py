"""The answers to CRIU's action script arrive, whatever becomes of what wakes it."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.run.action_script import FROZEN, STARTED, ActionScript
from phosd.errors import Cancelled
from tests.support.harness import wait_until


def nothing() -> None:
    """What is done when the tree is frozen."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def script(work: Path) -> Iterator[ActionScript]:
    with ActionScript(work, os.getuid(), nothing) as made:
        yield made


def ask(work: Path, where: str) -> subprocess.Popen[bytes]:
    """Run it as CRIU does."""
    return subprocess.Popen(
        ["./meet.sh"], cwd=work, env=os.environ | {"CRTOOLS_SCRIPT_ACTION": where}
    )


def attend_until_there(script: ActionScript, where: str) -> None:
    def there() -> bool:
        script.attend()
        return where in script.reached

    wait_until(there, f"the script at {where}")


def test_it_goes_on_when_it_is_told(work: Path, script: ActionScript) -> None:
    waiting = ask(work, STARTED)
    attend_until_there(script, STARTED)
    assert waiting.poll() is None
    script.let_go_on()
    assert waiting.wait(20) == 0
    frozen = ask(work, FROZEN)
    attend_until_there(script, FROZEN)
    assert frozen.wait(20) == 0


@pytest.mark.parametrize("where", [STARTED, FROZEN])
def test_no_answer_is_lost_with_what_wakes(work: Path, script: ActionScript, where: str) -> None:
    """``head`` may have taken the word out of the fifo when ``timeout`` ends it."""
    thief = os.open(work / "wake", os.O_RDONLY)
    over = threading.Event()

    def steal() -> None:
        while not over.is_set():
            os.read(thief, 64)

    # Two, so that one of them waits when the word comes.
    thieves = [threading.Thread(target=steal, daemon=True) for _ in range(2)]
    for each in thieves:
        each.start()
    try:
        asking = ask(work, where)
        attend_until_there(script, where)
        if where == STARTED:
            script.let_go_on()
        assert asking.wait(20) == 0
    finally:
        over.set()
        for each in thieves:
            while each.is_alive():
                (work / "wake").open("wb", buffering=0).write(b"\n\n")
                each.join(0.05)
        os.close(thief)


_LATE = """#!/bin/sh
echo >>calls
[ "$(wc -l <calls)" -gt "$LATE" ] || exit 124
exec "$TIMEOUT" "$@"
"""


@pytest.mark.parametrize(("late", "code"), [(4, 0), (1000, 1)], ids=["busy", "dead"])
def test_a_busy_machine_is_no_dead_phosd(
    work: Path, script: ActionScript, monkeypatch: pytest.MonkeyPatch, late: int, code: int
) -> None:
    """Where nothing is started in a second, it looks again before it gives up."""
    found = shutil.which("timeout")
    assert found is not None
    slow = work / "bin/timeout"
    slow.parent.mkdir()
    slow.write_text(_LATE)
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TIMEOUT", found)
    monkeypatch.setenv("LATE", str(late))
    calls = work / "calls"
    calls.touch()
    asking = ask(work, STARTED)
    if not code:
        attend_until_there(script, STARTED)
        wait_until(lambda: len(calls.read_text()) > late, "it to look again")
        script.let_go_on()
    assert asking.wait(20) == code


def test_an_answer_that_comes_first_is_found(work: Path, script: ActionScript) -> None:
    script.let_go_on()
    assert ask(work, STARTED).wait(20) == 0


def test_criu_gives_up_where_it_waits(work: Path, script: ActionScript) -> None:
    """A cancelled job does not wait for CRIU to come further."""
    waiting = ask(work, STARTED)
    attend_until_there(script, STARTED)
    script.refuse()
    assert waiting.wait(20) == 1


def test_an_error_when_frozen_makes_criu_give_up(work: Path) -> None:
    def cancelled() -> None:
        raise Cancelled("the job was cancelled", hint="")

    with ActionScript(work, os.getuid(), cancelled) as script:
        frozen = ask(work, FROZEN)
        attend_until_there(script, FROZEN)
        assert frozen.wait(20) == 1
        assert isinstance(script.error, Cancelled)


def test_nothing_of_it_stays(work: Path) -> None:
    with ActionScript(work, os.getuid(), nothing):
        assert any(work.iterdir())
    assert [*work.iterdir()] == []
