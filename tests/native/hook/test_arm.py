"""Chunk maps over the wire: real programs, and an engine that does a mover's work by hand."""

import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.analysis import table
from phosd.engine.analysis.summary import summarise
from phosd.engine.chunk_map.chunk_map import ChunkMap, ChunkState, Event, Phase
from phosd.engine.hook_client.code_images import Held
from phosd.engine.hook_client.link import HookLink, LaunchedKernel
from phosd.engine.kernels.fetch import fetch
from phosd.engine.system import procfs
from phosd.errors import Busy, Internal, Unsupported
from tests.native.hook.live import Live, linked, live
from tests.support.events import next_event
from tests.support.harness import wait_until

CHUNK = 2 << 20

WRITES = """
primary(0)
memory = ok(driver.cuMemAlloc(5 << 20))
ok(driver.cuMemsetD8(memory, 1, 5 << 20))
say("ready")
for line in sys.stdin:
    ok(driver.cuMemsetD8(memory, 2, 16))
    say("written")
"""

LAUNCHES = '''
primary(0)
memory = ok(driver.cuMemAlloc(4096))
image = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 at)
{
    .reg .b64 %to;
    ld.param.u64 %to, [at];
    st.global.u64 [%to], %to;
    ret;
}
"""
import ctypes
parameters = (int(memory),), (ctypes.c_uint64,)
module = ok(driver.cuModuleLoadData(image))
store = ok(driver.cuModuleGetFunction(module, b"store"))
say("ready")
for line in sys.stdin:
    ok(driver.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0))
    ok(driver.cuCtxSynchronize())
    say("launched")
'''


def rows(link: HookLink) -> list[tuple[int, int]]:
    """What a chunk map needs to know of a program's blocks."""
    return [(block.id, -(-block.size // CHUNK)) for block in link.list_blocks()]


@contextmanager
def armed(program: Live) -> Iterator[ChunkMap]:
    """A chunk map without slots; the gate is open inside."""
    program.close_gate()
    with ChunkMap.create(rows(program.link), []) as chunk_map:
        pending = program.link.arm(chunk_map.fd, [])
        assert pending == sum(count for _, count in rows(program.link))
        program.link.open_gate()
        yield chunk_map


def states(chunk_map: ChunkMap, link: HookLink) -> set[ChunkState]:
    """The states that chunks of a program are in."""
    return {ChunkState(word & 7) for i, _ in rows(link) for word in chunk_map.states(i)}


def maps_a_chunk_map(pid: int) -> bool:
    return "phos-board" in Path(f"/proc/{pid}/maps").read_text()


def test_a_thread_waits_for_the_first_chunk_alone(tmp_path: Path) -> None:
    with live(WRITES, tmp_path) as program:
        assert program.hears() == "ready"
        with armed(program) as chunk_map:
            program.tell()
            assert next_event(chunk_map, program.process.pid) is Event.POSTED, (
                "the hook asks for a chunk"
            )
            (block_id, count) = rows(program.link)[-1]
            urgent = [word >> 3 & 1 for word in chunk_map.states(block_id)]
            assert urgent == [1] + [0] * (count - 1)
            time.sleep(0.1)
            chunk_map.watch()
            assert program.hears() == "written"
            assert program.link.disarm() == 0
            said = chunk_map.statistics()
            assert (said.submissions, said.waits, said.touches) == (1, 1, 1)
            assert said.waited_ns > 50_000_000
            assert 0 < said.looked_ns < said.waited_ns, "looking is not waiting"
            assert list(chunk_map.touched(block_id)) == [1] + [0] * (count - 1)
            assert maps_a_chunk_map(program.process.pid)
            program.link.forget()
            assert not maps_a_chunk_map(program.process.pid)


def test_a_lost_client_lets_the_program_go_on(tmp_path: Path) -> None:
    with live(WRITES, tmp_path) as program:
        assert program.hears() == "ready"
        with armed(program) as chunk_map:
            program.tell()
            assert next_event(chunk_map, program.process.pid) is Event.POSTED
            program.link.close()
            assert program.hears() == "written"
            assert chunk_map.phase is Phase.ABORTED
            wait_until(
                lambda: not maps_a_chunk_map(program.process.pid), "the chunk map to be let go of"
            )
        with linked(program.process.pid, tmp_path) as link:
            assert link.kernels() == []


def test_a_watched_board_outlives_its_client_and_not_a_detach(tmp_path: Path) -> None:
    code = WRITES + "    ok(driver.cuMemFree(memory))\n"
    with live(code, tmp_path) as program:
        assert program.hears() == "ready"
        program.close_gate()
        with ChunkMap.create([], []) as chunk_map:
            chunk_map.watch()
            assert program.link.arm(chunk_map.fd, []) == 0
            program.link.open_gate()
            last = rows(program.link)[-1][0]
            program.link.close()
            program.tell()
            assert program.hears() == "written"
            freed: list[int] = []

            def told() -> bool:
                freed.extend(chunk_map.freed() or [])
                return last in freed

            wait_until(told, "the freed block to be told")
            assert chunk_map.statistics().submissions == 0
        assert maps_a_chunk_map(program.process.pid)
        program.link.connect()
        program.link.detach()
        wait_until(
            lambda: not maps_a_chunk_map(program.process.pid), "the chunk map to be let go of"
        )
        program.link.reattach()


def test_kernels_are_listed_with_their_launches(tmp_path: Path) -> None:
    with live(LAUNCHES, tmp_path) as program:
        assert program.hears() == "ready"
        program.tell()
        assert program.hears() == "launched"
        with armed(program) as chunk_map:
            assert program.link.kernels() == []
            chunk_map.watch()
            for _ in range(3):
                program.tell()
                assert program.hears() == "launched"
            (kernel,) = program.link.kernels()
            assert (kernel.name, kernel.launches, kernel.suspect) == ("store", 3, False)
            program.link.forget()
        (image,) = program.link.images()
        assert (image.hash, image.held) == (kernel.module, Held.IN_COPY)
        process = procfs.process_id(program.process.pid)
        assert process is not None
        with fetch(process, image, threading.Event()) as module:
            assert b".entry store" in os.pread(module.file, module.size, 0)


def test_launches_are_told_with_what_a_table_says(tmp_path: Path) -> None:
    with live(LAUNCHES, tmp_path) as program:
        assert program.hears() == "ready"
        link = program.link

        def launched() -> LaunchedKernel:
            program.tell()
            assert program.hears() == "launched"
            (kernel,) = link.launches()
            return kernel

        def give(made: bytes) -> int:
            with memory_file(made) as file:
                return link.give_summaries(file)

        program.tell()
        assert program.hears() == "launched"
        assert link.launches(count_seconds=600) == []  # until now nobody has counted
        kernel = launched()
        assert (kernel.name, kernel.launches, kernel.undecided) == ("store", 1, 1)
        assert kernel.guessed and kernel.summary is None
        (image,) = link.images()
        process = procfs.process_id(program.process.pid)
        assert process is not None
        with fetch(process, image, threading.Event()) as module:
            code = os.pread(module.file, module.size, 0)
        known = list(summarise(code, 90))
        made = table.encode(image.hash, 90, known)
        with pytest.raises(Unsupported, match="version 77"):
            give(made[:8] + struct.pack("<I", 77) + made[12:])
        with pytest.raises(Unsupported, match="sm_80"):
            give(table.encode(image.hash, 80, known))
        with pytest.raises(Unsupported, match="not well formed"):
            give(made.replace(struct.pack("<qII", 1, 0, 0), struct.pack("<qII", 1, 99, 0)))
        assert give(made) == 1
        kernel = launched()
        assert (kernel.launches, kernel.idempotent, kernel.overwrites) == (2, 1, 0)
        assert kernel.summary is not None and kernel.summary & table.WRITES_KNOWN
        assert link.launches(count_seconds=600) == [kernel]  # it is counted on
        with armed(program):
            assert link.launches() == []
            kernel = launched()
            assert (kernel.launches, kernel.idempotent, kernel.guessed) == (1, 1, False)


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    file = os.memfd_create("table", os.MFD_CLOEXEC)
    try:
        os.write(file, content)
        yield file
    finally:
        os.close(file)


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20])
def test_what_is_no_board_is_refused(tmp_path: Path, size: int) -> None:
    with live(WRITES, tmp_path) as program:
        assert program.hears() == "ready"
        program.close_gate()
        loose = os.memfd_create("loose")
        os.truncate(loose, size)
        with pytest.raises(Internal, match="not a board"):
            program.link.arm(loose, [])
        os.close(loose)
        assert not program.link.connected
        program.tell()
        assert program.hears() == "written", "the gate has opened with the end of the connection"
        program.link.connect()


def test_a_board_needs_a_closed_gate_and_comes_alone(tmp_path: Path) -> None:
    with live(WRITES, tmp_path) as program:
        assert program.hears() == "ready"
        with armed(program) as chunk_map:
            program.close_gate()
            with pytest.raises(Busy, match="armed already"):
                program.link.arm(chunk_map.fd, [])
            with pytest.raises(Busy, match="disarm it"):
                program.link.park()
            program.link.open_gate()
            assert states(chunk_map, program.link) == {ChunkState.PENDING}
            began = time.monotonic()
            program.link.forget()
            assert time.monotonic() - began < 1.9, "it waited for somebody, for all of its 2 s"
        with ChunkMap.create([], []) as fresh:
            with pytest.raises(Busy, match="closed gate"):
                program.link.arm(fresh.fd, [])
            fresh.watch()
            assert program.link.arm(fresh.fd, []) == 0, "what is only watched needs none"


def test_a_child_has_no_part_in_a_board(tmp_path: Path) -> None:
    code = WRITES + (
        "    import os\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        maps = open('/proc/self/maps').read()\n"
        "        os._exit('phos-board' in maps)\n"
        "    say(os.waitpid(child, 0)[1])\n"
    )
    with live(code, tmp_path) as program:
        assert program.hears() == "ready"
        with armed(program) as chunk_map:
            chunk_map.watch()
            assert re.search("phos-board", Path(f"/proc/{program.process.pid}/maps").read_text())
            program.tell()
            assert [program.hears(), program.hears()] == ["written", "0"]
            program.link.forget()
