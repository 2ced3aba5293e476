"""What the engine holds of device memory: memory files stand in for blocks, movers take notes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from phosd.engine.hook_client.link import BlockFlag, Hello, HookBlock, HookLink, HookState
from phosd.engine.memory import device_memory as module
from phosd.engine.memory import parking
from phosd.engine.memory.adopted import MoverProvider
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import distinct
from phosd.engine.memory.free_watchers import FreeWatchers
from phosd.engine.memory.parking import detached, parked
from phosd.engine.system import procfs
from phosd.engine.system.kcmp import same_file
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Internal, PhosError, Timeout, Unsupported
from tests.support.fake_hook import open_files

HAS, OUT, IN = BlockFlag.HAS_DESCRIPTOR, BlockFlag.EXPORTED, BlockFlag.IMPORTED
SIZE = 2 << 20


class Link:
    """A process with blocks: id -> (its file, flags)."""

    def __init__(self, pid: int, device: int = 0) -> None:
        self.pid = pid
        self.device = device
        self.files: dict[int, int] = {}
        self.flags: dict[int, BlockFlag] = {}
        self.sizes: dict[int, int] = {}
        self.addresses: dict[int, int] = {}
        self.connected = True
        self.state = HookState.CLOSED
        self.trouble: dict[str, PhosError] = {}
        """What the next request of a name meets; the later ones too, if ``hopeless``."""
        self.hopeless = False
        self.carried_out: set[str] = set()
        """The requests that are carried out although they fail: their answer is lost."""
        self.mapped: list[int] = []

    def add(self, number: int, flags: BlockFlag = HAS, file: int | None = None) -> int:
        """A new block of new memory, or of memory that another process has."""
        self.files[number] = os.memfd_create("block") if file is None else os.dup(file)
        self.flags[number] = flags
        return self.files[number]

    def remove(self, number: int) -> None:
        os.close(self.files.pop(number))

    def _block(self, number: int) -> HookBlock:
        size = self.sizes.get(number, SIZE)
        address = self.addresses.get(number, number << 21)
        return HookBlock(number, address, size, self.device, self.flags[number])

    def list_blocks(self, after: int = 0) -> list[HookBlock]:
        return [self._block(i) for i in sorted(self.files) if i > after]

    def export_blocks(self, after: int = 0) -> Iterator[tuple[HookBlock, int | None]]:
        for block in self.list_blocks(after):
            exportable = block.flags & HAS
            yield block, os.dup(self.files[block.id]) if exportable else None

    def _request(self, name: str, then: HookState | None = None, connected: bool = True) -> None:
        assert self.connected, f"{name} without a connection"
        trouble = self.trouble.get(name) if self.hopeless else self.trouble.pop(name, None)
        if trouble is None or name in self.carried_out:
            self.state = then or self.state
            self.connected = connected
        if trouble is not None:
            self.connected = self.connected and name not in self.carried_out
            raise trouble

    def park(self) -> int:
        self._request("park", HookState.PARKED)
        return len(self.files)

    def detach(self) -> None:
        self._request("detach", connected=False)

    def reattach(self) -> None:
        self.connected = True

    def hello(self) -> Hello:
        self._request("hello")
        return Hello(self.pid, 13000, ("GPU-a",), self.state, True, False, False, True, "")

    def unpark(self, memory: Iterator[tuple[int, int]]) -> int:
        given = dict(memory)
        self._request("unpark", HookState.CLOSED)
        assert all(same_file(fd, self.files[i]) for i, fd in given.items())
        self.mapped = sorted(given)
        return len(given)


class FakeMover:
    """Notes the keys that it holds, and whose blocks it guards."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self.guarded: set[ProcessId] = set()
        self.keys: dict[int, int] = {}
        self.alive = True
        self.trouble: PhosError | None = None
        self.dies = False
        """Whether the trouble ends the mover."""

    def adopt(self, blocks: list[tuple[int, int, int]]) -> None:
        self._fail()
        assert not self.keys.keys() & {key for key, *_ in blocks}
        self.keys |= {key: size for key, size, _ in blocks}

    def drop(self, keys: list[int]) -> None:
        self._fail()
        for key in keys:
            del self.keys[key]

    def digest(self, keys: list[int]) -> dict[int, list[bytes]]:
        return {key: [b"digest"] for key in keys}

    def guard(self, blocks: list[tuple[ProcessId, int, int]]) -> None:
        self._fail()
        assert {key for *_, key in blocks} <= self.keys.keys()
        self.guarded |= {process for process, *_ in blocks}

    def unguard(self, processes: list[ProcessId]) -> None:
        self.guarded -= {*processes}

    def _fail(self) -> None:
        if self.trouble is not None:
            self.alive = not self.dies
            raise self.trouble


class Bench:
    """Two movers, and the memory of processes 1 (GPU 0) and 2 (GPU 0 and 1)."""

    def __init__(self) -> None:
        self.movers = {0: FakeMover(0), 1: FakeMover(1)}
        self.memory = DeviceMemory(cast(MoverProvider, self), {1: [0], 2: [0, 1]})
        self.before = open_files()

    def mover(self, gpu: int) -> FakeMover:
        return self.movers[gpu]

    def take(self, *links: Link) -> None:
        self.memory.take(hooks(*links))

    def empty(self) -> bool:
        return not self.memory.all() and not any(m.keys for m in self.movers.values())


def hooks(*links: Link) -> list[HookLink]:
    return [cast(HookLink, link) for link in links]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(
        FreeWatchers, "watch_all", lambda *_: None
    )  # there is nobody to tell anything
    monkeypatch.setattr(procfs, "process_id", lambda pid: ProcessId(pid, 0))
    return Bench()


def held_files(bench: Bench, *links: Link) -> int:
    """The descriptors that are neither the processes' nor from before."""
    return open_files() - bench.before - sum(len(link.files) for link in links)


def test_new_blocks_are_taken_and_freed_ones_let_go(bench: Bench) -> None:
    link = Link(1)
    link.add(1)
    link.add(2)
    bench.take(link)
    assert [h.block.id for h in bench.memory.of(1)] == [1, 2]
    link.add(3)
    link.remove(1)
    bench.take(link)
    assert [h.block.id for h in bench.memory.of(1)] == [2, 3]
    assert len(bench.movers[0].keys) == 2
    assert held_files(bench, link) == 2
    bench.memory.close()
    assert bench.empty() and held_files(bench, link) == 0


def test_memory_of_two_processes_is_one_piece(bench: Bench) -> None:
    """Known by its open file; private memory is never compared."""
    first, second = Link(1), Link(2)
    shared = first.add(1, HAS | OUT)
    first.add(2)
    second.add(1, HAS | IN, shared)
    second.add(2, HAS | OUT)
    bench.take(first, second)
    keys = {(h.pid, h.block.id): h.key for h in bench.memory.all()}
    assert keys[1, 1] == keys[2, 1] and len(set(keys.values())) == 3
    assert len(bench.movers[0].keys) == 3
    assert len(distinct(bench.memory.all())) == 3
    assert bench.memory.adopted.digest(bench.memory.all()).keys() == set(keys.values())
    first.remove(1)  # the second still has it
    bench.take(first, second)
    assert keys[2, 1] in bench.movers[0].keys
    second.remove(1)
    bench.take(first, second)
    assert keys[2, 1] not in bench.movers[0].keys
    bench.memory.close()
    assert bench.empty() and held_files(bench, first, second) == 0


@pytest.mark.parametrize("exporter_first", [False, True])
def test_memory_that_is_shared_after_it_was_taken(bench: Bench, exporter_first: bool) -> None:
    """The descriptor of then tells nothing of who has it now: each export is a file of its own."""
    owner, peer = Link(1), Link(2)
    owner.add(1)
    owner.add(2)
    bench.take(owner, peer)
    before = {exported.block.id: exported.key for exported in bench.memory.of(1)}
    os.close(owner.files[1])
    file = owner.add(1, HAS | OUT)
    peer.add(1, HAS | IN, file)
    links = (owner, peer) if exporter_first else (peer, owner)
    bench.memory.take_all(hooks(*links))
    keys = {(exported.pid, exported.block.id): exported.key for exported in bench.memory.all()}
    assert keys[1, 1] == keys[2, 1] != before[1]
    assert keys[1, 2] == before[2], "what has not changed is kept"
    assert {exported.pid for exported in bench.memory.shared()} == {1, 2}
    assert bench.movers[0].keys.keys() == set(keys.values())
    bench.memory.close()
    assert bench.empty() and held_files(bench, owner, peer) == 0


def test_an_import_that_is_mapped_after_it_was_taken(bench: Bench) -> None:
    """Its size is known only then."""
    link = Link(1)
    link.add(1, HAS | IN)
    link.sizes[1] = SIZE // 2
    bench.take(link)
    link.sizes[1] = SIZE
    bench.take(link)
    assert [exported.block.size for exported in bench.memory.all()] == [SIZE]
    assert [*bench.movers[0].keys.values()] == [SIZE]
    bench.memory.close()


@pytest.mark.parametrize("exporter_first", [False, True])
def test_an_import_that_was_never_mapped(bench: Bench, exporter_first: bool) -> None:
    """It has no size of its own: it is as large as the memory is for others."""
    owner, peer = Link(1 if exporter_first else 2), Link(2 if exporter_first else 1)
    peer.add(1, HAS | IN, owner.add(1, HAS | OUT))
    peer.sizes[1] = 0
    for take in (bench.take, lambda *links: bench.memory.take_all(hooks(*links))):
        for links in ((owner, peer), (peer, owner)):
            take(*links)
            assert [each.block.size for each in bench.memory.all()] == [SIZE, SIZE]
            assert len({each.key for each in bench.memory.all()}) == 1
            assert [*bench.movers[0].keys.values()] == [SIZE]
            assert not bench.memory.not_held(1) | bench.memory.not_held(2)
    before = {each.key for each in bench.memory.all()}
    peer.sizes[1] = SIZE
    bench.take(peer, owner)
    assert {each.key for each in bench.memory.all()} == before, "it was mapped meanwhile"
    bench.memory.close()
    assert bench.empty() and held_files(bench, owner, peer) == 0


def test_an_import_that_nobody_else_has_and_that_was_never_mapped(bench: Bench) -> None:
    link = Link(1)
    link.add(1, HAS | IN)
    link.sizes[1] = 0
    bench.take(link)
    assert bench.memory.not_held(1) == {1}
    with pytest.raises(Busy, match="process 1 has imported device memory that nobody else has"):
        bench.memory.take_all(hooks(link))
    link.sizes[1] = SIZE
    bench.memory.take_all(hooks(link))
    assert [each.block.size for each in bench.memory.all()] == [SIZE]
    bench.memory.close()
    assert bench.empty() and held_files(bench, link) == 0


def test_a_block_that_is_mapped_elsewhere_after_it_was_taken(bench: Bench) -> None:
    link = Link(1)
    link.add(1)
    bench.take(link)
    (before,) = bench.memory.all()
    link.addresses[1] = 5 << 30
    bench.memory.take_all(hooks(link))
    (now,) = bench.memory.all()
    assert now.block.va == 5 << 30
    assert (now.key, now.descriptor) == (before.key, before.descriptor)
    # Whoever took note of it before still has it.
    ((_, duplicate),) = bench.memory.duplicates([before])
    os.close(duplicate)
    bench.memory.close()
    assert bench.empty() and held_files(bench, link) == 0


def test_each_gpu_has_its_mover(bench: Bench) -> None:
    link = Link(2, device=1)
    link.add(1)
    bench.take(link)
    assert not bench.movers[0].keys and len(bench.movers[1].keys) == 1
    bench.memory.close()
    assert bench.empty()


def test_words_of_events_are_near_the_gpu_of_whom_is_met_first(bench: Bench) -> None:
    """They are in host memory: each process names a device of its own that reaches them."""
    first, second = Link(1), Link(2, device=1)
    words = first.add(1, HAS | OUT | BlockFlag.HOST_LOCATED)
    second.add(1, HAS | IN | BlockFlag.HOST_LOCATED, words)
    second.add(2)
    bench.take(first, second)
    gpus = {(h.pid, h.block.id): h.gpu for h in bench.memory.all()}
    assert gpus == {(1, 1): 0, (2, 1): 0, (2, 2): 1}
    assert [h.host for h in bench.memory.all()] == [True, True, False]
    assert len(bench.movers[0].keys) == 1 and len(bench.movers[1].keys) == 1
    bench.memory.close()
    assert bench.empty()


def test_blocks_that_cannot_be_exported_are_left_out(bench: Bench) -> None:
    link = Link(1)
    link.add(1, BlockFlag(0))
    link.add(2)
    bench.take(link)
    assert [h.block.id for h in bench.memory.all()] == [2]
    bench.memory.close()
    assert held_files(bench, link) == 0


@pytest.mark.parametrize("kind", ["host memory", "no such device", "cannot compare", "adopting"])
def test_a_block_that_cannot_be_taken(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the error, and nothing is left of the blocks before it either."""
    link = Link(1)
    link.add(1, HAS | OUT)
    last = HAS | BlockFlag.HOST_LOCATED if kind == "host memory" else HAS | OUT
    link.add(2, last)
    kinds: dict[str, type[PhosError]] = {"host memory": Unsupported}
    if kind == "host memory":  # of the program, which names no device
        link.remove(1)
        link.device = -1
    elif kind == "no such device":
        link.device = 1
    elif kind == "adopting":
        bench.movers[0].trouble = Internal("adopting failed")
    elif kind == "cannot compare":

        def refuse(first: int, second: int) -> bool:
            raise Internal("cannot compare")

        monkeypatch.setattr(module, "same_file", refuse)
    why = {"host memory": "host RAM", "no such device": "device 1, but sees 1"}.get(kind, kind)
    with pytest.raises(kinds.get(kind, Internal), match=why):
        bench.take(link)
    bench.memory.close()
    assert bench.empty() and held_files(bench, link) == 0


def test_a_mover_that_died_holds_nothing(bench: Bench) -> None:
    """Whether it is known to be dead before it is asked or not; the other is asked all the same."""
    for known in (True, False):
        bench = Bench()
        links = [Link(1), Link(2, device=1)]
        for link in links:
            link.add(1)
        bench.take(*links)
        dead = bench.movers[1]
        if known:
            dead.alive = False
        else:
            dead.trouble, dead.dies = Internal("it is gone"), True
        bench.memory.close()
        assert not bench.movers[0].keys
        assert held_files(bench, *links) == 0


def test_one_mover_fails_and_the_other_lets_go(bench: Bench) -> None:
    links = [Link(1), Link(2, device=1)]
    for link in links:
        link.add(1)
    bench.take(*links)
    bench.movers[1].trouble = Internal("no way")
    with pytest.raises(Internal, match="no way"):
        bench.memory.close()
    assert not bench.movers[0].keys
    assert held_files(bench, *links) == 0


# -- parking -----------------------------------------------------------------------------------


def pair(bench: Bench) -> list[Link]:
    links = [Link(1), Link(2)]
    for link in links:
        link.add(1)
        link.add(2)
    bench.take(*links)
    return links


def test_memory_is_given_back(bench: Bench) -> None:
    links = pair(bench)
    with parked(hooks(*links), bench.memory):
        assert all(link.state is HookState.PARKED and not link.connected for link in links)
    assert all(link.state is HookState.CLOSED and link.mapped == [1, 2] for link in links)
    bench.memory.close()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("step", ["park", "detach"])
def test_a_step_fails_for_one(bench: Bench, step: str, which: int, lost: bool) -> None:
    """Also when it was carried out and only its answer is lost: none stays parked."""
    links = pair(bench)
    links[which].trouble[step] = Timeout("too slow")
    if lost:
        links[which].carried_out.add(step)
    with pytest.raises(Timeout, match="too slow") as raised, parked(hooks(*links), bench.memory):
        pytest.fail("one of them is not parked")
    assert not getattr(raised.value, "__notes__", ())
    assert all(link.state is HookState.CLOSED and link.connected for link in links)
    assert not bench.movers[0].guarded
    bench.memory.close()


def test_one_is_given_its_memory_at_the_second_attempt(bench: Bench) -> None:
    links = pair(bench)
    links[0].trouble["unpark"] = Internal("mapping failed")
    with parked(hooks(*links), bench.memory):
        assert [link.state for link in links] == [HookState.PARKED] * 2
    assert [link.state for link in links] == [HookState.CLOSED] * 2
    bench.memory.close()


def test_one_cannot_be_given_its_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is, and only for the one it is kept; and the first error is still seen."""
    monkeypatch.setattr(parking, "_AGAIN_SECONDS", 0.1)
    links = pair(bench)
    links[1].trouble["unpark"], links[1].hopeless = Internal("mapping failed"), True
    with pytest.raises(ZeroDivisionError) as raised, parked(hooks(*links), bench.memory):
        raise ZeroDivisionError
    assert raised.value.__notes__ == ["besides, mapping failed"]
    assert [link.state for link in links] == [HookState.CLOSED, HookState.PARKED]
    assert bench.movers[0].guarded == {(2, 0)}
    bench.memory.close()


def refused(bench: Bench, *links: Link) -> str:
    """Why none of them is parked (invariant 2)."""
    with (
        pytest.raises(Internal, match="invariant 2") as raised,
        parked(hooks(*links), bench.memory),
    ):
        pytest.fail("one of them is parked")
    assert raised.value.hint
    assert all(link.state is HookState.CLOSED for link in links)
    assert not bench.movers[0].guarded
    return raised.value.what


def test_nothing_is_parked_that_phosd_does_not_hold(bench: Bench) -> None:
    links = pair(bench)
    links[1].add(3, BlockFlag(0))
    bench.take(*links)
    assert "process 2 would be parked with one keeper of block 3" in refused(bench, *links)
    links[1].remove(3)
    bench.take(*links)
    with parked(hooks(*links), bench.memory):
        pass
    bench.memory.close()


def test_nothing_is_parked_that_no_mover_guards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = pair(bench)
    guard = parking.guard
    monkeypatch.setattr(parking, "guard", lambda memory: guard(memory) - {(1, 2)})
    assert "process 1 would be parked with one keeper of block 2" in refused(bench, *links)
    monkeypatch.setattr(procfs, "process_id", lambda pid: None)
    with parked(hooks(*links), bench.memory):  # what has ended loses nothing
        pass
    bench.memory.close()


def test_nothing_is_parked_that_was_not_asked_what_it_has(bench: Bench) -> None:
    links = pair(bench)
    bench.memory.close()
    assert "not known what memory process 1 has" in refused(bench, *links)


def test_detached_hooks_come_back(bench: Bench) -> None:
    links = [Link(1), Link(2)]
    with pytest.raises(ZeroDivisionError), detached(hooks(*links)):
        assert not any(link.connected for link in links)
        raise ZeroDivisionError
    assert all(link.connected for link in links)


def test_the_same_open_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open() as one, path.open() as other:
        copy = os.dup(one.fileno())
        assert same_file(one.fileno(), copy)
        assert not same_file(one.fileno(), other.fileno())  # one file, opened twice
        os.close(copy)
        with pytest.raises(Internal, match="comparing"):
            same_file(one.fileno(), copy)
