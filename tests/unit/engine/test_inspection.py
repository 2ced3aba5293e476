"""A close look at a process through its hook, which may be anybody's program."""

import os
import struct
import time
from collections.abc import Callable, Iterator
from itertools import count as counting
from pathlib import Path

import pytest

from phosd.engine.hook_client.wire import Type
from phosd.engine.node import inspection
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.program import process_gpus
from phosd.engine.system import procfs
from phosd.engine.system.cuda import gpu_uuid
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess, Timeout, Unsupported
from tests.support.fake_hook import DEVICE, Answer, Request, blocks, fake_hook, hello, kernels

Look = Callable[[Node, ProcessId], object]
LOOKS: tuple[Look, ...] = (inspection.blocks, inspection.kernels, inspection.log)


@pytest.fixture
def node(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose second GPU this very process uses, if it uses any."""
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: ["GPU-other", gpu_uuid(DEVICE)])
    with Node(NodeConfig(state_dir=tmp_path, runtime_dir=runtime)) as made:
        yield made


@pytest.fixture
def me() -> ProcessId:
    found = procfs.process_id(os.getpid())
    assert found is not None
    return found


def good(request: Request) -> Answer:
    answers = {
        Type.HELLO: hello(),
        Type.LIST_BLOCKS: blocks((3, 1), (7, 3)),
        Type.KERNELS: kernels(("axpy", 3)),
        Type.STATS: b"state 0\n1.5 a \x1b[31mnote\n",
    }
    return Answer(answers[Type(request.type)])


def test_what_a_hook_tells(node: Node, me: ProcessId, runtime: Path) -> None:
    with fake_hook(runtime, good):
        found = inspection.blocks(node, me)
        (kernel,) = inspection.kernels(node, me)
        text = inspection.log(node, me)
    assert [(block.id, block.size, gpu) for block, gpu in found] == [
        (3, 2 << 20, 1),
        (7, 2 << 20, 1),
    ]
    assert (kernel.name, kernel.launches, kernel.suspect) == ("axpy", 3, True)
    assert text == "state 0\n1.5 a ?[31mnote\n", "a program must not steer the reader's terminal"


@pytest.mark.parametrize("look", LOOKS)
def test_a_process_that_a_job_works_on_is_not_asked(
    look: Look, node: Node, me: ProcessId, runtime: Path
) -> None:
    """A connection would be a socket of the process, and CRIU saves none with an end elsewhere."""
    with fake_hook(runtime, good) as seen:
        with node.claim([me.pid]), pytest.raises(Busy, match=f"a job works on process {me.pid}"):
            look(node, me)
        assert not seen
        look(node, me)


@pytest.mark.parametrize("look", LOOKS)
def test_a_process_without_a_hook(look: Look, node: Node, me: ProcessId) -> None:
    with pytest.raises(Unsupported, match=f"process {me.pid} has no hook") as caught:
        look(node, me)
    assert "phos run" in caught.value.hint


@pytest.mark.parametrize("look", LOOKS)
def test_another_process_with_that_pid(
    look: Look, node: Node, me: ProcessId, runtime: Path
) -> None:
    for listens in (True, False):
        with fake_hook(runtime, good if listens else lambda _: Answer(close=True)) as seen:
            with pytest.raises(NoSuchProcess, match="has ended"):
                look(node, ProcessId(me.pid, me.start_time + 1))
            assert not seen


def test_a_hook_that_goes_on_for_ever_is_left(
    node: Node, me: ProcessId, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is quick, and there is one more, for as long as this test would wait."""
    monkeypatch.setattr(inspection, "_TIMEOUT", 0.3)
    answers = counting(1)

    def endless(request: Request) -> Answer:
        time.sleep(0.01)
        number = next(answers)
        if request.type == Type.LIST_BLOCKS:
            (after,) = struct.unpack("<Q", request.payload)
            return Answer(blocks((after + 1, 1), more=number < 500))
        if request.type == Type.KERNELS:
            return Answer(kernels((f"k{number}", 1), more=number < 1000))
        return good(request)

    with fake_hook(runtime, endless):
        for look in (inspection.blocks, inspection.kernels):
            with pytest.raises(Timeout, match="did not answer"):
                look(node, me)


def test_a_hook_with_more_blocks_than_can_be_is_not_believed(
    node: Node, me: ProcessId, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phosd.engine.hook_client.link.MAX_BLOCKS", 10)

    def many(request: Request) -> Answer:
        if request.type != Type.LIST_BLOCKS:
            return good(request)
        (after,) = struct.unpack("<Q", request.payload)
        return Answer(blocks((after + 1, 1), (after + 2, 1), more=1))

    with fake_hook(runtime, many) as seen, pytest.raises(Exception, match="more than 10 blocks"):
        inspection.blocks(node, me)
    assert len([r for r in seen if r.type == Type.LIST_BLOCKS]) == 6
