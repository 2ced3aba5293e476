"""Modules analysed by a process that can do little: what it finds, and how it may end."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from phosd.engine.analysis import table
from phosd.engine.analysis.code import cage
from phosd.engine.analysis.code.tools import Tool, run
from phosd.engine.kernels import analyser as analysing
from phosd.engine.kernels.analyser import Analyser
from phosd.engine.kernels.cache import Cache
from phosd.engine.kernels.entry import State
from phosd.engine.kernels.module import Module
from phosd.errors import Cancelled, Internal
from tests.native.analysis.oracle import machine_code
from tests.native.analysis.test_command import SOURCE

NAMES = {"add", "chase", "pick", "count"}


@pytest.fixture(name="code", scope="module")
def _code() -> tuple[bytes, bytes]:
    return machine_code(SOURCE)


@pytest.fixture(name="analyser")
def _analyser(tmp_path: Path) -> Analyser:
    return Analyser(Cache(tmp_path, b"k" * 32))


def test_an_entry_grows_by_what_is_asked_for(code: tuple[bytes, bytes], analyser: Analyser) -> None:
    for data in code:
        with Module.of(data) as module:
            found = analyser.analyse(module, 90, {"add", "none"})
            assert [*found.entry.kernels] == ["add"] and found.absent == {"none"}
            assert found.entry.kernels["add"].roles == {"0": "written", "8": "read"}
            told: list[int] = []
            whole = analyser.analyse(module, 90, None, told.append)
            assert (set(whole.entry.kernels), whole.entry.whole) == (NAMES, True)
            assert whole.seconds > 0
            tables = [facts.table for facts in whole.entry.kernels.values()]
            (count,) = table.HEADER.unpack_from(table.merged(module.hash, 90, tables))[5:6]
            assert count == len(NAMES)
            assert analyser.analyse(module, 90, {"add", "none"}).seconds == 0, "it is all known"


def test_what_cannot_be_read_is_remembered(code: tuple[bytes, bytes], analyser: Analyser) -> None:
    other = run(Tool.PTXAS, ["--gpu-name", "sm_120"], code[0])
    for data, state in (
        (b"nothing", State.UNREADABLE),
        (code[1][:64] + b"\xff" * 200, State.UNREADABLE),
        (b"\x50\xed\x55\xba\x01\x00\x10\x00" + bytes(8), State.OTHER_ARCHITECTURE),
    ):
        with Module.of(data) as module:
            found = analyser.analyse(module, 90, {"add"})
            assert found.entry.state is state and found.entry.reason
            assert found.seconds > 0 and analyser.analyse(module, 90, {"add"}).seconds == 0
    with Module.of(other) as module:
        facts = analyser.analyse(module, 90, {"add"}).entry.kernels["add"]
        assert facts.unknown_writes == ("the machine code is for sm_120",)


SAYS = """
import json, os, sys, signal
orders = json.loads(os.pread(int(sys.argv[1]), 1 << 20, 0))
def say(**line): os.write(int(sys.argv[3]), json.dumps(line).encode() + b"\\n")
"""


def worker(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Another process in the place of that which analyses: ``say`` writes what it says."""
    script = folder / "worker.py"
    script.write_text(SAYS + text)
    monkeypatch.setattr(analysing, "_WORKER", (str(script),))


CRASHES = """
names = [n for n in orders["names"] or ["add", "bad", "mul"] if n not in orders["without"]]
for at in names if orders["single"] else [None]:
    say(begun=names if at is None else [at])
    if "bad" in (names if at is None else [at]): os.kill(os.getpid(), signal.SIGSEGV)
    say(kernel=at, facts={})
say(done=True)
"""


@pytest.mark.parametrize("names", [None, {"add", "bad", "mul"}])
def test_a_kernel_that_crashes_what_reads_it_is_found(
    names: set[str] | None, analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, tmp_path, CRASHES)
    with Module.of(b"any") as module:
        entry = analyser.analyse(module, 90, names).entry
    assert entry.state is State.ANALYSED
    assert entry.kernels["bad"].unknown_writes == ("what reads it has crashed",)
    assert not entry.kernels["add"].unknown_writes and not entry.kernels["mul"].unknown_writes


@pytest.mark.parametrize(
    ("text", "state", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", State.CRASHED, "has crashed"),
        ("sys.exit(1)", State.CRASHED, "has crashed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", State.TOO_LARGE, "more memory"),
        ("say(failed='too-long', why='long')", State.TOO_LONG, "long"),
        ("say(failed='unheard of', why='a\\x1b[31m\\nb')", State.UNREADABLE, r"a\?\[31m b"),
        ("say(begun=['a' * 5000])", State.CRASHED, "may not say"),
        ("say(kernel='a', facts={'roles': {'-1': 'read'}})", State.CRASHED, "may not say"),
        ("say(kernel='a', facts={'more': 1})", State.CRASHED, "may not say"),
        ("os.write(int(sys.argv[3]), b'\\xff\\n')", State.CRASHED, "may not say"),
        ("[say(kernel=f'k{n}', facts={}) for n in range(70000)]", State.TOO_LARGE, "more than"),
        ("while True: pass", State.TOO_LONG, "more than 1 s"),
    ],
)
def test_how_it_may_end(
    text: str,
    state: State,
    reason: str,
    analyser: Analyser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a state with a name, and is remembered."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 20))\n"
    worker(monkeypatch, tmp_path, limit * text.startswith("while") + text)
    analyser.module_seconds = 1
    with Module.of(b"any") as module:
        entry = analyser.analyse(module, 90).entry
        assert entry.state is state
        assert re.search(reason, entry.reason)
        assert not entry.whole
        worker(monkeypatch, tmp_path, "say(done=True)")
        assert analyser.analyse(module, 90).entry == entry


def test_what_was_not_asked_for_is_not_taken(
    analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a table of another module."""
    text = "say(kernel='mine', facts={}); say(kernel='other', facts={})\n"
    text += "say(kernel='bad', facts={'table': 'AAAA'}); say(done=True)"
    worker(monkeypatch, tmp_path, text)
    with Module.of(b"any") as module:
        found = analyser.analyse(module, 90, {"mine", "bad"})
    assert [*found.entry.kernels] == ["mine"] and found.absent == {"bad"}


def test_a_busy_machine_is_no_reason(
    analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysing, "_TIMEOUT_FACTOR", 0)
    worker(monkeypatch, tmp_path, "signal.pause()")
    with Module.of(b"any") as module:
        found = analyser.analyse(module, 90)
    assert found.early and found.entry.state is State.ANALYSED


def test_it_can_be_ended(
    analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, tmp_path, "say(kernel='first', facts={}); signal.pause()")
    with Module.of(b"any") as module:
        found = analyser.analyse(module, 90, None, lambda count: analyser.stop())
        assert found.early and set(found.entry.kernels) == {"first"}, "what was found is kept"
        with pytest.raises(Cancelled):
            analyser.analyse(module, 90)


def test_without_tools_nothing_is_remembered(
    analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, tmp_path, "say(missing='nvdisasm is not installed', hint='install it')")
    with Module.of(b"any") as module:
        with pytest.raises(Internal, match="nvdisasm is not installed; install it"):
            analyser.analyse(module, 90)
        assert analyser.known(module.digest, 90) is None


def test_other_tools_are_tried(
    analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, tmp_path, "os.abort()")
    with Module.of(b"any") as module:
        assert analyser.analyse(module, 90).entry.state is State.CRASHED
        monkeypatch.setattr("phosd.engine.analysis.code.tools.version", lambda: "another")
        worker(monkeypatch, tmp_path, "say(kernel='a', facts={}); say(done=True)")
        assert set(analyser.analyse(module, 90).entry.kernels) == {"a"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_what_it_is_allowed_to(
    analyser: Analyser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Confined as the real one is, before it reads anything."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    text = f"""
import resource, socket
from phosd.engine.kernels.worker import Orders, _confine
import msgspec
_confine(msgspec.convert(orders, Orders))
def tried(what):
    try:
        what()
    except OSError as error:
        return error.strerror
said = [str(os.getresuid()),
        str((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))),
        tried(lambda: open({str(secret)!r})),
        tried(lambda: socket.socket()), tried(lambda: os.setuid(0)),
        str(resource.getrlimit(resource.RLIMIT_CPU)), tried(lambda: os.kill(1, 0))]
say(kernel="k", facts={{"unknown_reads": said}})
say(done=True)
"""
    worker(monkeypatch, tmp_path, text)
    with Module.of(b"any") as module:
        said = analyser.analyse(module, 90).entry.kernels["k"].unknown_reads
    real, effective, saved = map(int, said[0].strip("()").split(", "))
    assert real == effective == saved in cage.IDS
    denied = "Operation not permitted"
    assert said[1:] == (
        *(str((os.SCHED_BATCH, 10)), "Permission denied", denied, denied),
        *(str((analyser.module_seconds, analyser.module_seconds + 5)), denied),
    )
