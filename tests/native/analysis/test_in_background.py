"""What processes launch is analysed in the background: what comes first, and where it ends.

The process is the test's own, with a hook that tells what the test wants; what analyses modules
says that it has found all kernels that it was asked for.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.analysis import table
from phosd.engine.analysis.code.cubin import Kernel
from phosd.engine.analysis.summary import Summary
from phosd.engine.hook_client.code_images import CodeImage, Held, hash_of
from phosd.engine.hook_client.wire import LAUNCHES_ASK, Status, Type
from phosd.engine.kernels.analyser import Analyser, _Run
from phosd.engine.kernels.entry import KernelFacts
from phosd.engine.kernels.module import Module
from phosd.engine.kernels.worker import Orders
from phosd.engine.node import kernel_analysis, launched_kernels
from phosd.engine.node.kernel_analysis import AnalysisLimits, KernelAnalysis
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.program import process_gpus
from phosd.engine.program.process import GpuProcess
from phosd.engine.system import procfs
from phosd.engine.system.cuda import gpu_uuid
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, Unsupported
from tests.support.fake_engine import this_process
from tests.support.fake_hook import (
    DEVICE,
    Answer,
    Request,
    count,
    fake_hook,
    hello,
    images,
    launches,
)

LIMITS = AnalysisLimits(300, 900, 1 << 20)


@dataclass
class Stage:
    """A process, what its hook tells, and what was analysed of it."""

    node: Node
    folder: Path
    runtime: Path
    launched: list[tuple[str, int]] = field(default_factory=list)
    of: int = 0
    loaded: list[CodeImage] = field(default_factory=list)
    asked: list[Orders] = field(default_factory=list)
    """What was to be analysed, each time."""
    has: Callable[[str], bool] = lambda name: True
    """Whether a module has a kernel."""
    given: list[tuple[int, int]] = field(default_factory=list)
    """The tables that the hook was given: of which module, and of how many kernels."""
    refuses: bool = False
    counted: list[int] = field(default_factory=list)
    """For how many seconds launches were to be counted, each time."""
    seconds: float = 1.0
    missing: str = ""

    def answer(self, request: Request) -> Answer:
        """Answer as the hook."""
        if request.type == Type.HELLO:
            return Answer(hello())
        if request.type == Type.SUMMARIES:
            header = table.HEADER.unpack(os.pread(request.descriptors[0], table.HEADER.size, 0))
            self.given.append((header[3], header[5]))
            if self.refuses:
                return Answer(status=Status.UNSUPPORTED, payload=b"another version")
            return Answer(count(header[5]))
        if request.type == Type.LAUNCHES:
            after, seconds, _ = LAUNCHES_ASK.unpack(request.payload)
            if seconds:
                self.counted.append(seconds)
            rows = self.launched[after : after + 1000]
            more = after + 1000 < len(self.launched)
            return Answer(launches(*rows, more=more, module=self.of))
        (after,) = struct.unpack("<Q", request.payload)
        rest = self.loaded[after : after + 2000]
        return Answer(images(*rest, more=after + 2000 < len(self.loaded)))

    def run(self, module: Module, orders: Orders, *_: object) -> _Run:
        """Analyse as the process does."""
        self.asked.append(orders)
        if self.missing:
            raise Internal(self.missing, reason="missing-package")
        names = ["whole"] if orders.names is None else orders.names
        found = {}
        for name in filter(self.has, names):
            summary = Summary(Kernel(name, 0x210, 8, (), {}, {}, {}), "loaded")
            made = table.encode(module.hash, orders.architecture, [summary])
            found[name] = KernelFacts(8, table=made)
        return _Run(found, done=True, seconds=self.seconds)

    def load(self, name: str, data: bytes, held: Held = Held.IN_FILE) -> CodeImage:
        """Let the process load a module."""
        path = self.folder / name
        path.write_bytes(data)
        self.loaded.append(CodeImage(hash_of(data), 0, len(data), held, str(path)))
        return self.loaded[-1]

    def launch(self, image: CodeImage, *rows: tuple[str, int]) -> None:
        """Let the process launch kernels of an image, and of no other."""
        self.of, self.launched = image.hash, list(rows)


@pytest.fixture(name="stage")
def _stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: [gpu_uuid(DEVICE)])
    monkeypatch.setattr(kernel_analysis, "architecture_of", lambda ordinal: 90)
    monkeypatch.setattr(kernel_analysis, "_SPARE", 0.0)
    monkeypatch.setattr(kernel_analysis, "_COUNT_SECONDS", 0)
    runtime = Path(tempfile.mkdtemp(prefix="phos-"))
    with Node(NodeConfig(state_dir=tmp_path, runtime_dir=runtime)) as node:
        stage = Stage(node, tmp_path, runtime)
        monkeypatch.setattr(Analyser, "_run", lambda _, *rest: stage.run(*rest))
        with fake_hook(runtime, lambda request: stage.answer(request)):
            yield stage
    shutil.rmtree(runtime)


def me() -> ProcessId:
    found = procfs.process_id(os.getpid())
    assert found is not None
    return found


def mine() -> list[GpuProcess]:
    return [this_process(start_time=me().start_time)]


def states(analysis: KernelAnalysis) -> dict[str, str]:
    return {one.kernel.name: one.state for one in analysis.known(me(), 0)}


def until_idle(analysis: KernelAnalysis) -> int:
    """Go on until nothing is left to do; how many steps that took."""
    steps = 0
    while analysis.step(mine()):
        steps += 1
        assert steps < 100
    return steps


def test_what_was_launched_is_analysed_once(stage: Stage) -> None:
    stage.launch(stage.load("a", b"module a"), ("seldom", 1), ("often", 9))
    analysis = KernelAnalysis(stage.node, LIMITS)
    assert states(analysis) == {"seldom": "waiting", "often": "waiting"}
    until_idle(analysis)
    assert states(analysis) == {"seldom": "analysed", "often": "analysed"}
    assert [set(orders.names or ()) for orders in stage.asked] == [{"seldom", "often"}]
    other = KernelAnalysis(stage.node, LIMITS)  # as another user: the bytes are read again
    until_idle(other)
    assert set(states(other).values()) == {"analysed"} and len(stage.asked) == 1


def test_what_grows_is_looked_at_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    stage.launched.append(("two", 1))
    until_idle(analysis)
    assert [orders.names for orders in stage.asked] == [("one",), ("two",)]


def test_the_hook_gets_what_is_known_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was launched, if it was known from others; and again if it is more."""
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    image = stage.load("a", b"module a")
    stage.launch(image, ("one", 1), ("two", 1))
    until_idle(KernelAnalysis(stage.node, LIMITS))
    assert stage.given == [(image.hash, 2)]
    stage.launched = []
    other = KernelAnalysis(stage.node, LIMITS)
    for _ in range(2):
        until_idle(other)
        assert stage.given == [(image.hash, 2)] * 2
    stage.launch(image, ("three", 1))
    for _ in range(2):
        until_idle(other)
        assert stage.given[2:] == [(image.hash, 3)]


def test_of_much_the_hook_gets_what_was_launched(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    image = stage.load("a", b"module a")
    stage.launch(image, *((f"k{n}", 1) for n in range(5)))
    until_idle(KernelAnalysis(stage.node, LIMITS))
    monkeypatch.setattr(kernel_analysis, "_MOST_UNASKED_BYTES", 100)
    analysis = KernelAnalysis(stage.node, LIMITS)
    stage.launch(image)
    until_idle(analysis)
    assert len(stage.given) == 1, "nothing was launched now"
    stage.launch(image, ("k1", 1), ("new", 1))
    until_idle(analysis)
    assert stage.given[1:] == [(image.hash, 2)]


def test_a_table_that_the_hook_refuses_is_not_offered_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    stage.refuses = True
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    for _ in range(3):
        until_idle(analysis)
    assert len(stage.given) == 1 and states(analysis) == {"one": "analysed"}


def test_a_process_gets_no_more_tables_than_it_may_hold(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    monkeypatch.setattr(kernel_analysis, "_MOST_GIVEN_BYTES", 500)
    analysis = KernelAnalysis(stage.node, LIMITS)
    for number in range(6):
        stage.launch(stage.load(f"m{number}", b"module %d" % number), ("one", 1))
        until_idle(analysis)
    assert 0 < len(stage.given) < 6 and len(stage.asked) == 6


def test_a_process_is_asked_at_intervals_or_if_somebody_waits(stage: Stage) -> None:
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    stage.launched.append(("two", 1))
    assert not analysis.step(mine()) and states(analysis)["two"] == "waiting"
    assert analysis.hurry(me(), 0) == 1
    until_idle(analysis)
    assert states(analysis)["two"] == "analysed" and analysis.hurry(me(), 0) == 0


def test_modules_that_were_compiled_are_analysed_before_they_are_launched(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []

    def fetch(_: object, image: CodeImage, __: object) -> Module:
        fetched.append(image.size)
        return Module.of(bytes(image.size))

    monkeypatch.setattr(kernel_analysis, "fetch", fetch)
    for size, held in ((100, Held.IN_COPY), (2 << 20, Held.IN_COPY), (300, Held.IN_OBJECT)):
        stage.loaded.append(CodeImage(size, 4096, size, held))
    until_idle(KernelAnalysis(stage.node, LIMITS))
    assert fetched == [100, 2 << 20, 300], "of the others it is looked up what is known"
    assert [orders.names for orders in stage.asked] == [None]


def test_what_is_loaded_is_analysed_while_there_is_time_to_spare(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest first, and what was launched before all of it."""
    monkeypatch.setattr(kernel_analysis, "_SPARE", 0.5)
    large, small = stage.load("b", b"a larger module"), stage.load("a", b"module a")
    launched = stage.load("c", b"c")
    stage.launch(launched, ("one", 1))
    stage.seconds = 100.0
    until_idle(KernelAnalysis(stage.node, LIMITS))
    asked = [(orders.module, orders.names) for orders in stage.asked]
    assert asked == [(launched.hash, ("one",)), (launched.hash, None), (small.hash, None)]
    stage.seconds = 1.0
    until_idle(KernelAnalysis(stage.node, LIMITS))
    assert [orders.module for orders in stage.asked[3:]] == [large.hash]
    assert dict(stage.given) == {launched.hash: 2, small.hash: 1, large.hash: 1}


def test_thousands_of_modules_and_kernels(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step takes more than its share of them, and no more are remembered than may be."""
    monkeypatch.setattr(launched_kernels, "_MOST_IMAGES", 50)
    first = stage.load("a", b"module a")
    stage.loaded += [CodeImage(n, 4096, 0, Held.NOT_KEPT) for n in range(1, 9000)]
    stage.launch(first, *((f"k{n}", n) for n in range(20_000)))
    analysis = KernelAnalysis(stage.node, LIMITS)
    assert analysis.step(mine()) and analysis.step(mine())
    assert [len(orders.names or ()) for orders in stage.asked] == [kernel_analysis._MOST_NAMES] * 2
    assert "k19999" in (stage.asked[0].names or ())
    (watched,) = analysis._watched.values()
    assert len(watched.images) == 50
    assert sum(state == "analysed" for state in states(analysis).values()) == 512


def test_a_process_that_lies(stage: Stage) -> None:
    """Kernels that its module does not have, and a module that is not what it says: each is tried
    once.
    """
    stage.has = lambda name: name == "real"
    stage.launch(stage.load("a", b"module a"), ("real", 1), ("made up", 5))
    stage.loaded.append(CodeImage(77, 0, 8, Held.IN_FILE, str(stage.folder / "a")))
    stage.loaded.append(CodeImage(78, 0, 1 << 50, Held.IN_COPY))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    assert states(analysis) == {"real": "analysed", "made up": "no-code"}
    with Module.of(b"module a") as module:
        entry = analysis._analyser.known(module.digest, 90)
    assert entry is not None and set(entry.kernels) == {"real"}, "others get the entry, too"
    for number in (77, 78):
        stage.of = number
        assert set(states(analysis).values()) == {"no-code"}
        assert analysis.hurry(me(), 0) == 0
    assert len(stage.asked) == 1


def test_an_hour_has_so_many_seconds_and_a_user_half_of_them(stage: Stage) -> None:
    stage.seconds = 450.0
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    stage.launch(stage.load("b", b"module b"), ("two", 1))
    assert analysis.hurry(me(), 0) == 0, "nobody waits for the next hour"
    assert not analysis.step(mine()) and len(stage.asked) == 1
    (two,) = analysis.known(me(), 0)
    assert (two.state, "last hour" in two.reason) == ("waiting", True)
    assert not analysis._time.is_over(1), "another user"
    analysis._time.spend(1, 450.0)
    assert analysis._time.is_over(2)


def test_nobody_is_asked_while_a_job_works_on_it(stage: Stage) -> None:
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    with stage.node.claim([os.getpid()]):
        assert not analysis.step(mine())
    assert not stage.asked


def test_without_tools_nothing_is_tried_until_there_are_some(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.missing = "nvdisasm is not installed"
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    for _ in range(3):
        assert not analysis.step(mine())
    assert len(stage.asked) == 1 and states(analysis) == {"one": "no-tool"}
    monkeypatch.setattr("phosd.engine.analysis.code.tools.version", lambda: "installed")
    stage.missing = ""
    analysis.hurry(me(), 0)
    until_idle(analysis)
    assert states(analysis) == {"one": "analysed"}


def test_launches_are_counted_if_none_are_known(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not again soon, and not where some are: counting costs the program time."""
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    monkeypatch.setattr(kernel_analysis, "_COUNT_SECONDS", 2)
    analysis = KernelAnalysis(stage.node, LIMITS)
    for _ in range(3):
        until_idle(analysis)
    assert stage.counted == [2]
    monkeypatch.setattr(kernel_analysis, "_COUNT_AGAIN_SECONDS", -1.0)
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    assert stage.counted == [2] and states(analysis) == {"one": "analysed"}
    analysis.hurry(me(), 0, 5)
    assert stage.counted == [2, 5]


def test_a_hook_that_is_too_old(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def old(request: Request) -> Answer:
        asked.append(request.type)
        return (
            Answer(status=1, payload=b"unknown request")
            if request.type == Type.IMAGES
            else (Stage.answer(stage, request))
        )

    monkeypatch.setattr(stage, "answer", old)
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    analysis = KernelAnalysis(stage.node, LIMITS)
    for _ in range(3):
        assert not analysis.step(mine())
    assert asked.count(Type.IMAGES) == 1
    stage.launched = [("one", 1)]
    stage.of = 1
    assert analysis.hurry(me(), 0) == 0, "nobody waits for it"
    (one,) = analysis.known(me(), 0)
    assert one.state == "waiting"


def test_nothing_is_read_again_before_there_is_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_analysis, "LOOK_SECONDS", 0)
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    read: list[object] = []
    known = Analyser.known

    def counted(*words: Any) -> object:
        read.append(words)
        return known(*words)

    monkeypatch.setattr(Analyser, "known", counted)
    for _ in range(3):
        until_idle(analysis)
    assert not read
    stage.launched.append(("two", 1))
    until_idle(analysis)
    assert read and states(analysis)["two"] == "analysed"


def test_what_never_ends_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Analyser, "_run", lambda *_: _Run(overdue=True, seconds=1.0))
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    assert until_idle(analysis) == kernel_analysis._MOST_FRUITLESS
    assert states(analysis) == {"one": "no-code"}


def test_a_module_that_cannot_be_analysed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Analyser, "_run", lambda *_: _Run(failed="too-large", why="it is large"))
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, LIMITS)
    until_idle(analysis)
    (one,) = analysis.known(me(), 0)
    assert (one.state, one.reason) == ("too-large", "it is large")
    analysis._watched.clear()  # as of a process that has just been found
    assert states(analysis) == {"one": "waiting"}


def test_it_is_off(stage: Stage) -> None:
    stage.launch(stage.load("a", b"module a"), ("one", 1))
    analysis = KernelAnalysis(stage.node, None)
    assert not analysis.step(mine()) and states(analysis) == {"one": "analysis-off"}
    with pytest.raises(Unsupported, match="not analysed on this machine"):
        analysis.hurry(me(), 0)
