"""Two processes pass tensors on as torch.multiprocessing does: by legacy CUDA IPC.

The first makes a tensor in memory of a few segments, and a new interprocess event, which it records
behind the work that makes the tensor. It sends the handles of both. It keeps the tensor until the
second has counted its reference down, in memory that both have mapped; then it destroys the event,
and uses the memory again. After some rounds it frees a segment.

The second opens a segment once for all tensors in it, has its stream wait for the event, which it
never destroys, as PyTorch does, and computes. It answers by an event of its own, which the first
has opened once and waits for again and again. No host waits for the other's device.

``tensor_queue.py STEPS [two] [alone]``: with ``two`` the second computes on the second GPU; with
``alone`` the first goes on when the second has ended.
"""

import ctypes
import mmap
import os
import socket
import sys
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok, read

TENSOR = 64 << 10
TENSORS = 6
"""Tensors of a segment."""
SEGMENT = TENSOR * TENSORS
SEGMENTS = 3
ROUNDS = 7
"""Steps after which a segment is freed, and another one takes its place."""
BYTES = 64
"""Length of a handle."""
PASSES = 4
"""How often a tensor is computed on: whoever does not wait reads one that is half done."""


def receive(peer: socket.socket, size: int) -> bytes:
    """``size`` bytes, or the end of the process: its peer is gone."""
    data: bytes = peer.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        if "alone" in sys.argv:
            raise EOFError
        os._exit(0)
    return data


def event() -> Any:
    flags = driver.CUevent_flags
    return ok(
        driver.cuEventCreate(
            flags.CU_EVENT_DISABLE_TIMING
            | flags.CU_EVENT_INTERPROCESS
            | flags.CU_EVENT_BLOCKING_SYNC
        )
    )


def stream() -> Any:
    return ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def sent(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), BYTES)


def given(handle: Any, data: bytes) -> Any:
    ctypes.memmove(handle.getPtr(), data, BYTES)
    return handle


class Rank:
    """What both have: a device, a stream, and a state of their own."""

    def __init__(self, peer: socket.socket, counters: mmap.mmap, device: int) -> None:
        self.peer, self.counters = peer, counters
        self.device = Device(device)
        self.stream = stream()
        self.state = State(self.device, cold_block=128 << 10)
        self.sum = allocate(16)

    def compute(self, tensor: int, seed: int) -> None:
        for number in range(PASSES):
            self.device.advance(tensor, TENSOR, seed + number, self.stream)

    def look(self, tensor: int) -> None:
        self.device.fold(tensor, TENSOR, self.sum, self.stream)
        self.device.launch("stir", u64(self.sum), stream=self.stream)


class Sender(Rank):
    """The first. ``limbo`` has what the second still refers to."""

    def __init__(self, peer: socket.socket, counters: mmap.mmap) -> None:
        super().__init__(peer, counters, 0)
        self.segments = [allocate(SEGMENT) for _ in range(SEGMENTS)]
        self.limbo: dict[int, Any] = {}
        handle = given(driver.CUipcEventHandle(), receive(peer, BYTES))
        self.answered = ok(driver.cuIpcOpenEventHandle(handle))

    def step(self, number: int, seed: int) -> bytes:
        self._let_go()
        place = number % (SEGMENTS * TENSORS)
        while place in self.limbo:  # never for long: the second is at most a step behind
            self._let_go()
        segment = self.segments[place // TENSORS]
        offset = place % TENSORS * TENSOR
        tensor = segment + offset
        self.compute(tensor, seed)
        made = event()
        ok(driver.cuEventRecord(made, self.stream))
        self.counters[place] = 1
        self.limbo[place] = made
        self.peer.sendall(
            sent(ok(driver.cuIpcGetMemHandle(segment)))
            + sent(ok(driver.cuIpcGetEventHandle(made)))
            + offset.to_bytes(4, "little")
            + place.to_bytes(4, "little")
            + (seed % (1 << 64)).to_bytes(8, "little")
        )
        receive(self.peer, 1)  # it has recorded its answer, and perhaps not come to it
        ok(driver.cuStreamWaitEvent(self.stream, self.answered, 0))
        self.look(tensor)
        mine = self.state.step(number, seed, self.stream) + read(self.sum, 8)
        theirs = receive(self.peer, 24)
        if number % ROUNDS == ROUNDS - 1:
            self._renew(number // ROUNDS % SEGMENTS)
        return mine + theirs

    def alone(self, number: int, seed: int) -> bytes:
        """A step without the second, whose event is still here."""
        tensor = self.segments[number % SEGMENTS]
        made = event()
        self.compute(tensor, seed)
        ok(driver.cuEventRecord(made, self.stream))
        ok(driver.cuStreamWaitEvent(self.stream, self.answered, 0))
        self.look(tensor)
        ok(driver.cuEventRecord(self.answered, self.stream))
        ok(driver.cuEventSynchronize(self.answered))
        ok(driver.cuEventDestroy(made))
        return self.state.step(number, seed, self.stream) + read(self.sum, 8)

    def _let_go(self) -> None:
        for place in [place for place in self.limbo if self.counters[place] == 0]:
            ok(driver.cuEventDestroy(self.limbo.pop(place)))

    def _renew(self, which: int) -> None:
        while any(place // TENSORS == which for place in self.limbo):
            self._let_go()
        ok(driver.cuMemFree(self.segments[which]))
        self.segments[which] = allocate(SEGMENT)


class Receiver(Rank):
    """The second. ``opened`` has the address of each segment, by its handle."""

    def __init__(self, peer: socket.socket, counters: mmap.mmap, device: int) -> None:
        super().__init__(peer, counters, device)
        self.opened: dict[bytes, int] = {}
        self.answer = event()
        peer.sendall(sent(ok(driver.cuIpcGetEventHandle(self.answer))))

    def step(self, number: int) -> None:
        memory, made = receive(self.peer, BYTES), receive(self.peer, BYTES)
        offset, place = (int.from_bytes(receive(self.peer, 4), "little") for _ in range(2))
        seed = int.from_bytes(receive(self.peer, 8), "little")
        tensor = self._segment(memory) + offset
        ready = ok(driver.cuIpcOpenEventHandle(given(driver.CUipcEventHandle(), made)))
        ok(driver.cuStreamWaitEvent(self.stream, ready, 0))
        self.look(tensor)
        self.compute(tensor, seed >> 1)
        ok(driver.cuEventRecord(self.answer, self.stream))
        self.peer.sendall(b"a")
        computed = self.state.step(number, seed, self.stream) + read(self.sum, 8)
        if number % 2:  # PyTorch leaves all of them
            ok(driver.cuEventDestroy(ready))
        if number % ROUNDS == ROUNDS - 1:
            for address in self.opened.values():
                ok(driver.cuIpcCloseMemHandle(address))
            self.opened.clear()
        self.counters[place] = 0
        self.peer.sendall(computed)

    def _segment(self, handle: bytes) -> int:
        if handle not in self.opened:
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            opening = given(driver.CUipcMemHandle(), handle)
            self.opened[handle] = int(ok(driver.cuIpcOpenMemHandle(opening, flags)))
        return self.opened[handle]


def main() -> None:
    ours, theirs = socket.socketpair()
    counters = mmap.mmap(-1, mmap.PAGESIZE)
    if os.fork() == 0:
        ours.close()
        receiver = Receiver(theirs, counters, int("two" in sys.argv))
        number = 0
        while True:
            receiver.step(number)
            number += 1
    theirs.close()
    report = Report()
    sender = Sender(ours, counters)
    turn = sender.step
    for step in report.steps():
        try:
            report.tell(step, turn(step, report.seed))
        except (EOFError, OSError):
            ours.close()  # one end of a socket cannot be saved without the other
            turn = sender.alone
            report.tell(step, turn(step, report.seed))


if __name__ == "__main__":
    main()
