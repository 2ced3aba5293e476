"""A close look at one process or image, over the bus."""

import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from phosd.engine.hook_client.link import BlockFlag, HookBlock, Kernel
from phosd.engine.image.manifest import Block, ChunkRef
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.kernels.entry import KernelFacts
from phosd.engine.node.launched_kernels import KnownKernel
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.service.process_identity import Program, Target, program
from tests.support.authority import NO, YES, authority
from tests.support.bus import busctl
from tests.support.fake_engine import block, launched, manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import Service

STRANGER = pwd.getpwnam("nobody").pw_uid
OWNER = pwd.getpwnam("daemon").pw_uid
LOOKS = ("ListBlocks", "ListKernels", "DescribeKernels", "AnalyseKernels", "ReadLog")


def ask(
    address: str, path: str, interface: str, member: str, *options: object, uid: int = 0
) -> Any:
    """What a method gives that takes only options: ``name type value`` each."""
    words = ["a{sv}", str(len(options) // 3), *map(str, options)]
    reply = busctl(
        address,
        "--json=short",
        "call",
        "org.phos",
        path,
        f"org.phos.{interface}",
        member,
        *words,
        uid=uid or None,
    )
    return json.loads(reply)["data"][0]


def show(service: Service, pid: int, **changes: object) -> str:
    """Let the engine see a process; its path."""
    found = procfs.process_id(pid)
    assert found is not None
    service.engine.running = [
        this_process(**({"pid": pid, "start_time": found[1], "uid": 0} | changes))
    ]
    service.call("ListProcesses")
    return f"/org/phos/process/_{pid}_{found[1]}"


@pytest.fixture
def target() -> Iterator[int]:
    """A process of a user."""
    with subprocess.Popen(["sleep", "1000"], user=OWNER, group=OWNER, extra_groups=[]) as process:
        yield process.pid
        process.kill()


def test_the_blocks_of_a_process(service: Service) -> None:
    path = show(service, os.getpid())
    both = BlockFlag.EXPORTED | BlockFlag.PROGRAM_VMM | BlockFlag.HAS_DESCRIPTOR
    service.engine.live_blocks = [
        (HookBlock(1, 1 << 47, 2 << 20, 0, BlockFlag.HAS_DESCRIPTOR), 1),
        (HookBlock(2**64 - 1, 0, 4 << 20, 0, both), 0),
        (HookBlock(9, 4096, 4096, -1, BlockFlag.HOST_LOCATED), -1),
    ]
    rows = [
        [1, 1 << 47, 2 << 20, 1, []],
        [2**64 - 1, 0, 4 << 20, 0, ["exported", "program"]],
        [9, 4096, 4096, -1, ["host"]],
    ]
    assert ask(service.address, path, "Process1", "ListBlocks") == rows
    assert ask(service.address, path, "Process1", "ListBlocks", "limit", "u", 2) == rows[:2]
    assert service.engine.asked == [procfs.process_id(os.getpid())] * 2


def test_the_kernels_of_a_process(service: Service) -> None:
    """Also those that the history knows as suspects, and the hook not yet: not as such, or not at
    all.
    """
    path = show(service, os.getpid())
    service.engine.launched = [
        Kernel("seldom", 1, 3, suspect=False),
        Kernel("often", 2, 70, suspect=False),
        Kernel("told", 3, 5, suspect=True),
        Kernel("known", 2**64 - 1, 1, suspect=False),
    ]
    marks = [KernelMark("known", 2**64 - 1), KernelMark("often", 7)]
    service.history.suspects.found(program(Target(ProcessId(os.getpid(), 0), 0)), marks)
    service.history.flush()
    rows = [
        ["told", "0000000000000003", 5, True],
        ["known", "ffffffffffffffff", 1, True],
        ["often", "0000000000000007", 0, True],
        ["often", "0000000000000002", 70, False],
        ["seldom", "0000000000000001", 3, False],
    ]
    assert ask(service.address, path, "Process1", "ListKernels") == rows
    assert ask(service.address, path, "Process1", "ListKernels", "limit", "u", 1) == rows[:1]


def test_what_is_known_of_kernels(service: Service) -> None:
    """Those that were launched most come first; what is not known has a state, and no facts."""
    path = show(service, os.getpid())
    facts = KernelFacts(24, {"0": "written", "*": "read"}, ("loaded",), (), False, True, "always")
    service.engine.known = [
        KnownKernel(launched("seldom", 1, 3), "waiting"),
        KnownKernel(launched("often", 2**64 - 1, 70, 60, 7, summary=3), "analysed", "", facts),
        KnownKernel(launched("never", 3, 0), "no-code", "it is gone"),
    ]
    often, seldom, never = ask(service.address, path, "Process1", "DescribeKernels")
    assert {key: value["data"] for key, value in often.items()} == {
        "Name": "often",
        "Module": "f" * 16,
        "Launches": 70,
        "Suspect": False,
        "InHook": True,
        "IdempotentLaunches": 60,
        "OverwritingLaunches": 7,
        "UndecidedLaunches": 3,
        "State": "analysed",
        "Reason": "",
        "ParameterBytes": 24,
        "Roles": {"0": "written", "*": "read"},
        "UnknownReads": ["loaded"],
        "UnknownWrites": [],
        "RangesRead": False,
        "RangesWritten": True,
        "Idempotent": "always",
        "IdempotentWhy": [],
    }
    assert (seldom["State"]["data"], seldom.get("Roles")) == ("waiting", None)
    assert (never["State"]["data"], never["Reason"]["data"]) == ("no-code", "it is gone")
    assert len(ask(service.address, path, "Process1", "DescribeKernels", "limit", "u", 2)) == 2


def test_kernels_are_analysed_at_once_if_that_is_asked_for(service: Service) -> None:
    path = show(service, os.getpid())
    service.engine.known = [KnownKernel(launched("k", 1, 3), "waiting")]
    service.engine.analysed.clear()
    assert ask(service.address, path, "Process1", "AnalyseKernels") == 1
    assert ask(service.address, path, "Process1", "AnalyseKernels", "count", "u", 5) == 1
    assert [seconds for _, seconds in service.engine.hurried] == [0, 5]
    wait_until(lambda: [os.getpid()] in service.engine.analysed, "a look at the process")


def test_suspects_are_trusted_again(service: Service) -> None:
    path = show(service, os.getpid())
    marks = [KernelMark("scatter", 1), KernelMark("scatter", 2), KernelMark("gather", 1)]
    known = service.history.suspects
    mine = program(Target(ProcessId(os.getpid(), 0), 0))
    others = Program(OWNER, mine.executable)
    known.found(mine, marks)
    known.found(others, marks[:1])
    service.history.flush()
    service.engine.launched = [Kernel(m.name, m.module, 3, suspect=False) for m in marks]

    def suspects() -> list[str]:
        return [row[0] for row in ask(service.address, path, "Process1", "ListKernels") if row[3]]

    def trust(*options: object) -> object:
        return ask(service.address, path, "Process1", "TrustKernels", *options)

    assert sorted(suspects()) == ["gather", "scatter", "scatter"]
    assert trust("kernel", "s", "scatter") == 2
    assert suspects() == ["gather"]
    with pytest.raises(RuntimeError, match="'scatter' is no suspect of"):
        trust("kernel", "s", "scatter")
    with pytest.raises(RuntimeError, match="the options of this call are: kernel"):
        trust("module", "s", "1")
    assert trust() == 1
    assert trust() == 0
    assert suspects() == []
    assert known.of(others) == (KernelMark("scatter", 1),)


def test_who_may_trust_kernels(service: Service, bus: str, target: int) -> None:
    """Users who may checkpoint the process may; to see it is not enough."""
    path = show(service, target, uid=OWNER)
    trust = (service.address, path, "Process1", "TrustKernels")
    with pytest.raises(RuntimeError, match=f"process {target} belongs to uid {OWNER}"):
        ask(*trust, uid=STRANGER)
    assert ask(*trust, uid=OWNER) == 0
    with authority(bus, NO) as polkit:
        polkit.verdicts["org.phos.inspect-others"] = YES
        with pytest.raises(RuntimeError, match="checkpoint-others"):
            ask(*trust, uid=STRANGER)
        polkit.verdicts["org.phos.checkpoint-others"] = YES
        assert ask(*trust, uid=STRANGER) == 0
    assert polkit.questions[-1].details == {"pid": str(target), "owner": str(OWNER)}


def test_who_may_write_a_note_of_an_image(service: Service, bus: str) -> None:
    """Users who may delete the image may; to see it is not enough."""
    service.engine.stored["i"] = manifest("i", owner=OWNER)
    service.call("ListImages")
    path = "/org/phos/image/i"

    def note(text: str, uid: int = 0) -> None:
        call = ("call", "org.phos", path, "org.phos.Image1", "SetNote", "sa{sv}", text, "0")
        busctl(service.address, *call, uid=uid or None)

    def noted() -> str:
        return service.get(path, "Image1", "Note", uid=OWNER)

    note("of its owner", uid=OWNER)
    assert noted() == '"of its owner"'
    note("of root")
    assert noted() == '"of root"'
    with pytest.raises(RuntimeError, match=f"image i belongs to uid {OWNER}"):
        note("of a stranger", uid=STRANGER)
    with authority(bus, NO) as polkit:
        polkit.verdicts["org.phos.inspect-others"] = YES
        with pytest.raises(RuntimeError, match="delete-others"):
            note("of a stranger", uid=STRANGER)
        polkit.verdicts["org.phos.delete-others"] = YES
        note("allowed", uid=STRANGER)
    assert noted() == '"allowed"'
    with pytest.raises(RuntimeError, match="a note is one line of at most 200 characters"):
        note("x" * 201, uid=OWNER)
    note("", uid=OWNER)
    assert noted() == '""'


def test_the_log_of_a_hook(service: Service) -> None:
    path = show(service, os.getpid())
    assert ask(service.address, path, "Process1", "ReadLog") == "state 0\n1.5 a note\n"


@pytest.mark.parametrize("member", LOOKS)
def test_a_process_is_only_asked_for_its_owner(service: Service, target: int, member: str) -> None:
    path = show(service, target, uid=OWNER)
    with pytest.raises(RuntimeError, match=f"process {target} belongs to uid {OWNER}"):
        ask(service.address, path, "Process1", member, uid=STRANGER)
    assert service.engine.asked == []
    ask(service.address, path, "Process1", member, uid=OWNER)
    ask(service.address, path, "Process1", member)
    assert len(service.engine.asked) == 2


def test_a_process_that_has_become_somebody_elses(service: Service, target: int) -> None:
    """What phosd saw last does not count: a set-uid program keeps pid and start time."""
    path = show(service, target, uid=STRANGER)
    with pytest.raises(RuntimeError, match=f"process {target} belongs to uid {OWNER}"):
        ask(service.address, path, "Process1", "ReadLog", uid=STRANGER)
    assert service.engine.asked == []


def test_who_may_inspect_what_is_others_may_look(service: Service, bus: str, target: int) -> None:
    path = show(service, target, uid=OWNER)
    service.engine.stored["i"] = manifest("i", owner=OWNER)
    service.call("ListImages")
    with authority(bus, NO) as polkit:
        polkit.verdicts["org.phos.inspect-others"] = YES
        assert ask(service.address, path, "Process1", "ReadLog", uid=STRANGER)
        assert ask(service.address, "/org/phos/image/i", "Image1", "ListBlocks", uid=STRANGER) == []


@pytest.mark.parametrize("member", LOOKS)
def test_a_process_that_is_gone(service: Service, member: str) -> None:
    found = this_process(start_time=1)  # somebody who had this pid long ago
    service.engine.running = [found]
    service.call("ListProcesses")
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} has ended"):
        ask(service.address, f"/org/phos/process/_{os.getpid()}_1", "Process1", member)
    assert service.engine.asked == []


@pytest.mark.parametrize(
    ("member", "option"),
    [
        ("ListBlocks", ("speed", "u", 1)),
        ("ListBlocks", ("limit", "u", 0)),
        ("ListBlocks", ("limit", "u", 20_001)),
        ("ListKernels", ("limit", "u", 4_001)),
        ("ReadLog", ("limit", "u", 1)),
    ],
)
def test_options_that_are_none(
    service: Service, member: str, option: tuple[str, str, object]
) -> None:
    path = show(service, os.getpid())
    said = "the options of this call are|limit has to be a whole number, at least 1 and at most"
    with pytest.raises(RuntimeError, match=said):
        ask(service.address, path, "Process1", member, *option)
    assert service.engine.asked == []


def test_the_content_of_an_image(service: Service) -> None:
    """A chunk that two blocks have is stored once; what an older image holds is told apart."""
    own = ChunkRef("a", 2, 0, 2 << 20)
    blocks = (
        Block(0, 1, 1 << 40, 4 << 20, 0, (ChunkRef("a", 1, 0, 2 << 20), own)),
        Block(0, 2, 0, 4 << 20, 0, (own, ChunkRef("b", 2, 4096, 2 << 20))),
        Block(0, 3, 4096, 2 << 20, 0, alias=(0, 1)),
        Block(0, 4, 8192, 4096, 0, (ChunkRef("c", 2, 8192, 4096),), host=True),
    )
    service.engine.stored["old"] = manifest("old", blocks=(block(1),))
    service.engine.stored["young"] = manifest("young", pid=77, owner=OWNER, blocks=blocks)
    service.call("ListImages")
    mib = 1 << 20
    rows = [
        [77, 1, 1 << 40, 4 * mib, 0, 2, 4 * mib, 2 * mib],
        [77, 2, 0, 4 * mib, 0, 2, 2 * mib, 0],
        [77, 3, 4096, 2 * mib, 0, 0, 0, 0],
        [77, 4, 8192, 4096, -1, 1, 4096, 0],
    ]
    path = "/org/phos/image/young"
    assert ask(service.address, path, "Image1", "ListBlocks", uid=OWNER) == rows
    assert sum(row[6] for row in rows) == int(service.get(path, "Image1", "StoredBytes"))
    assert sum(row[7] for row in rows) == int(service.get(path, "Image1", "SharedBytes"))
    page = ("limit", "u", 2, "offset", "u", 1)
    assert ask(service.address, path, "Image1", "ListBlocks", *page) == rows[1:3]
    assert ask(service.address, path, "Image1", "ListBlocks", "offset", "u", 9) == []
    with pytest.raises(RuntimeError, match=f"image young belongs to uid {OWNER}"):
        ask(service.address, path, "Image1", "ListBlocks", uid=STRANGER)
    with pytest.raises(RuntimeError, match="the options of this call are: limit, offset"):
        ask(service.address, path, "Image1", "ListBlocks", "parent", "s", "old")
