"""Run code in the processes of a probe, one piece after the other.

``python -m tests.driver.inside FD`` forks them, which takes milliseconds for each. It has loaded
the bindings, and no driver: a driver that was loaded before a fork does not work. The code of
probes has all names of this module.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as d

from tests.driver import MESSAGE

MIB = 1 << 20
SIZE = 2 * MIB
"""Bytes of a block, the least that the driver hands out."""
_DIE_WITH_PARENT = 1
_ATTRIBUTES = "CU_POINTER_ATTRIBUTE_"

KERNELS = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry count(.param .u64 at) {
    .reg .u64 %at; .reg .u32 %n;
    ld.param.u64 %at, [at];
    ld.global.u32 %n, [%at];
    add.u32 %n, %n, 1;
    st.global.u32 [%at], %n;
    ret;
}
.visible .entry spin(.param .u64 flag, .param .u32 value) {
    .reg .u64 %flag; .reg .u32 %n, %value; .reg .pred %wait;
    ld.param.u64 %flag, [flag];
    ld.param.u32 %value, [value];
again:
    ld.volatile.global.u32 %n, [%flag];
    setp.lt.u32 %wait, %n, %value;
    @%wait bra again;
    ret;
}
"""
"""``count`` adds one to a word, ``spin`` ends when a word has reached a value."""


# --- NVML


def nvml_begun() -> ctypes.CDLL:
    """Return NVML's library, begun."""
    library = ctypes.CDLL(os.environ.get("PHOS_TEST_NVML", "libnvidia-ml.so.1"))
    assert library.nvmlInit_v2() == 0
    return library


def gpus_of(nvml: ctypes.CDLL) -> int:
    """Return how many GPUs NVML tells."""
    count = ctypes.c_uint()
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    return count.value


# --- calls


def ck(result: Sequence[Any]) -> Any:
    """Return the values of a call that must succeed."""
    assert int(result[0]) == 0, f"the driver answered {code(result)}"
    return result[1] if len(result) == 2 else tuple(result[1:])


def code(result: Sequence[Any]) -> str:
    """Return what a call answered, such as ``SUCCESS`` or ``ERROR_INVALID_VALUE``."""
    return str(d.CUresult(result[0]).name).removeprefix("CUDA_")


class Begun:
    """A call that another thread makes, in the same context: it may not return for long."""

    def __init__(self, call: Callable[[], Sequence[Any]]) -> None:
        self._call = call
        self._context = ck(d.cuCtxGetCurrent())
        self.answer = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ck(d.cuCtxSetCurrent(self._context))
        self.answer = code(self._call())

    def within(self, seconds: float) -> str:
        """Return what the call answered, and nothing if it has not returned in time."""
        self._thread.join(seconds)
        return self.answer


def library() -> ctypes.CDLL:
    """Return the driver as C sees it."""
    return ctypes.CDLL("libcuda.so.1")


# --- contexts and memory


def use(ordinal: int = 0) -> Any:
    """Make the primary context of a GPU the current one; this initialises the driver."""
    ck(d.cuInit(0))
    context = ck(d.cuDevicePrimaryCtxRetain(ordinal))
    ck(d.cuCtxSetCurrent(context))
    return context


def free() -> int:
    """Return the bytes that the current GPU has free."""
    return int(ck(d.cuMemGetInfo())[0])


DESCRIPTOR = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def properties(ordinal: int = 0, place: str = "DEVICE") -> Any:
    """Return properties of memory that can be exported."""
    made = d.CUmemAllocationProp()
    made.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = getattr(d.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{place}")
    made.location.id = ordinal
    made.requestedHandleTypes = DESCRIPTOR
    return made


def access(of: Any) -> Any:
    """Return the right of the place that these properties name, to read and write."""
    made = d.CUmemAccessDesc()
    made.location = of.location
    made.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


def map_at(address: int, handle: Any, *allowed: Any, size: int = SIZE) -> None:
    """Map memory, by default for GPU 0."""
    ck(d.cuMemMap(address, size, 0, handle, 0))
    rights = list(allowed) or [access(properties())]
    ck(d.cuMemSetAccess(address, size, rights, len(rights)))


def mapped(handle: Any, *allowed: Any) -> int:
    """Map memory at an address of its own, and return the address."""
    address = int(ck(d.cuMemAddressReserve(SIZE, 0, 0, 0)))
    map_at(address, handle, *allowed)
    return address


def make(ordinal: int = 0) -> Any:
    """Return a handle of new memory that can be exported."""
    return ck(d.cuMemCreate(SIZE, properties(ordinal), 0))


def export(handle: Any) -> int:
    """Return a descriptor of memory."""
    return int(ck(d.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0)))


def imported(descriptor: int) -> Any:
    """Return a handle of the memory behind a descriptor."""
    return ck(d.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR))


def fill(address: Any, value: int, size: int = SIZE) -> None:
    """Set each word."""
    ck(d.cuMemsetD32(int(address), value, size // 4))
    ck(d.cuCtxSynchronize())


def holds(address: Any, value: int, size: int = SIZE) -> bool:
    """Return whether each word has this value."""
    out = bytearray(size)
    ck(d.cuMemcpyDtoH(out, int(address), size))
    return bytes(out) == value.to_bytes(4, "little") * (size // 4)


def take_all_but(left: int) -> int:
    """Allocate until at most 2 MiB more than ``left`` bytes are free; return how much is."""
    size = 1 << 30
    while size >= SIZE:
        if free() - left < size or code(d.cuMemAlloc(size)) != "SUCCESS":
            size //= 2
    return free()


def attribute(name: str, address: Any) -> int:
    """Return an attribute of a pointer as the driver writes it, as 8 bytes that were all ones."""
    data = ctypes.c_uint64(2**64 - 1)
    number = int(getattr(d.CUpointer_attribute, _ATTRIBUTES + name))
    answer = library().cuPointerGetAttribute(
        ctypes.byref(data), number, ctypes.c_uint64(int(address))
    )
    assert answer == 0, f"the driver answered {d.CUresult(answer).name} for {name}"
    return data.value


# --- work


class Flag:
    """A word of pinned host memory that the device waits for, and the host raises at any time."""

    def __init__(self) -> None:
        self.address = int(ck(d.cuMemHostAlloc(4096, d.CU_MEMHOSTALLOC_PORTABLE)))
        self._word = ctypes.c_uint32.from_address(self.address)
        self._word.value = 0

    def hold(self, stream: Any) -> None:
        """Let a stream wait until the flag is raised."""
        ck(d.cuStreamWaitValue32(stream, self.address, 1, 0))

    def rise(self) -> None:
        """Let the streams and kernels go on that wait for it."""
        self._word.value = 1


def kernel(name: str) -> Any:
    """Return a kernel of :data:`KERNELS`, loaded anew."""
    module = ck(d.cuModuleLoadData(KERNELS + b"\0"))
    return ck(d.cuModuleGetFunction(module, name.encode()))


def launch(function: Any, stream: Any, *arguments: int) -> None:
    """Launch one thread of a kernel: the first argument has 64 bits, the others have 32."""
    types = tuple(ctypes.c_uint32 if at else ctypes.c_uint64 for at in range(len(arguments)))
    values = (tuple(map(int, arguments)), types)
    ck(d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, 0))


# --- checkpoints of other processes


def lock(pid: int, milliseconds: int) -> str:
    arguments = d.CUcheckpointLockArgs()
    arguments.timeoutMs = milliseconds
    return code(d.cuCheckpointProcessLock(pid, arguments))


def restore(pid: int, pairs: Sequence[tuple[int, int]]) -> str:
    """Restore a process; ``pairs`` of ordinals say which GPU takes the place of which."""
    made = []
    for old, new in pairs:
        made.append(d.CUcheckpointGpuPair())
        made[-1].oldUuid, made[-1].newUuid = ck(d.cuDeviceGetUuid(old)), ck(d.cuDeviceGetUuid(new))
    arguments = d.CUcheckpointRestoreArgs()
    arguments.gpuPairs, arguments.gpuPairsCount = made, len(made)
    return code(d.cuCheckpointProcessRestore(pid, arguments if made else None))


def state(pid: int) -> str:
    """Return the state of a process by its name, such as ``LOCKED``, or what the call answered."""
    result = d.cuCheckpointProcessGetState(pid)
    if code(result) != "SUCCESS":
        return code(result)
    return str(d.CUprocessState(result[1]).name).removeprefix("CU_PROCESS_STATE_")


# --- processes


def forked() -> tuple[int, str]:
    """Fork a child that lives as long as this process. Returns its pid, and what it was answered
    when it allocated memory.
    """
    answer, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        os.write(tells, code(d.cuMemAlloc(16)).encode())
        os.close(tells)
        while True:
            signal.pause()
    os.close(tells)
    with os.fdopen(answer) as told:
        return pid, told.read()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _run(text: str, names: dict[str, Any]) -> Any:
    """Run code, and return its value if it is an expression."""
    try:
        expression = compile(text, "<probe>", "eval")
    except SyntaxError:
        exec(compile(text, "<probe>", "exec"), names)
        return None
    return eval(expression, names)


def serve(channel: socket.socket) -> None:
    """Run what the channel says until it is closed.

    A request is code, and may bring a descriptor, which is then ``given``. The answer is its value;
    if that was asked for, the value is a descriptor, which goes with the answer and is closed.
    """
    names = dict(globals())
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, 1)
        if not message:
            return
        request = json.loads(message)
        if descriptors:
            names["given"] = descriptors[0]
        sent: list[int] = []
        try:
            value = _run(request["code"], names)
            if request["descriptor"]:
                sent.append(value)
            answer = json.dumps({"value": value}, default=int)  # handles are numbers
        except Exception:
            answer = json.dumps({"error": traceback.format_exc()})
        socket.send_fds(channel, [answer.encode()], sent)
        for descriptor in sent:
            os.close(descriptor)


def main() -> None:
    """Fork a process for each socket that comes, with an environment, and send it its pid."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, 1)
        if not message:
            return
        if os.fork() == 0:
            _die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            os.environ.update(json.loads(message))
            own = socket.socket(fileno=descriptors[0])
            own.send(json.dumps({"value": os.getpid()}).encode())
            serve(own)
            os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
