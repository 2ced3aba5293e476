"""List the GPUs of this node and what uses them, from NVML, or from the software GPU."""

import functools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pynvml

from phosd.engine.node import software_account
from phosd.engine.program.process_gpus import gpu_uuids
from phosd.engine.system import cuda, procfs
from phosd.errors import Reason, Unsupported

_lock = threading.Lock()


@dataclass(frozen=True)
class GpuInfo:
    """A GPU. Memory in bytes, ``utilisation`` 0..1, ``temperature`` in degrees Celsius, ``power``
    in watts; None if the GPU does not report it. ``pids`` are the processes that NVML lists, or the
    software GPU's account; ``movers`` those of them that are data movers of phosd.
    """

    ordinal: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int | None = None
    utilisation: float | None = None
    temperature: float | None = None
    power: float | None = None
    pids: tuple[int, ...] = ()
    movers: tuple[int, ...] = ()


def list_gpus() -> list[GpuInfo]:
    """Return the GPUs in the driver's order. Raises :class:`Unsupported` if no GPU is usable.

    The first call may take seconds, because it starts the driver.
    """
    if cuda.is_software():
        return [_by_driver(ordinal, uuid) for ordinal, uuid in enumerate(gpu_uuids())]
    with _lock:
        _start_nvml()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        known = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        return [
            _by_nvml(ordinal, uuid, known[uuid])
            for ordinal, uuid in enumerate(gpu_uuids())
            if uuid in known
        ]


def driver_release() -> str:
    """Return the release of the NVIDIA driver, such as ``580.159.03``; empty for the software
    GPU's.
    """
    if cuda.is_software():
        return ""
    with _lock:
        _start_nvml()
        return _text(pynvml.nvmlSystemGetDriverVersion())


def used_by(pid: int) -> dict[int, int]:
    """Return the device memory of a process in bytes, by the GPU's ordinal, as far as NVML knows.

    Empty on the software GPU, whose memory counts as memory of the process.
    """
    if cuda.is_software():
        return {}
    ordinals = {uuid: ordinal for ordinal, uuid in enumerate(gpu_uuids())}
    used = {}
    with _lock:
        _start_nvml()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            ordinal = ordinals.get(_text(pynvml.nvmlDeviceGetUUID(handle)))
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == pid and ordinal is not None:
                    used[ordinal] = process.usedGpuMemory or 0
    return used


def users_of(gpus: Collection[int]) -> dict[int, int]:
    """Return the processes that compute on one of these GPUs, as far as NVML knows, with its
    ordinal. Those that are ending are left out; none is known on the software GPU.
    """
    if cuda.is_software() or not gpus:
        return {}
    uuids = gpu_uuids()
    with _lock:
        _start_nvml()
        found = {
            process.pid: gpu
            for gpu in sorted(gpus)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByUUID(uuids[gpu])
            )
        }
    return {pid: gpu for pid, gpu in found.items() if not procfs.ending(pid)}


@functools.cache
def architecture_of(ordinal: int) -> int:
    """Return the architecture of a GPU's machine code: 90 for sm_90."""
    if cuda.is_software():
        device = cuda.call("cuDeviceGet", ordinal)
        major, minor = cuda.call("cuDeviceComputeCapability", device)
    else:
        with _lock:
            _start_nvml()
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuids()[ordinal])
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(major) * 10 + int(minor)


def divided(ordinal: int) -> str:
    """Return why the driver cannot move programs to a GPU ("is in MIG mode"), or an empty text."""
    if cuda.is_software():
        return ""
    uuid = gpu_uuids()[ordinal]
    with _lock:
        _start_nvml()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        mig = _if_told(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
        if mig == pynvml.NVML_DEVICE_MIG_ENABLE:
            return "is in MIG mode"
        if _if_told(lambda: pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)):
            return "is used through MPS"
    return ""


@functools.cache
def _start_nvml() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unsupported(
            f"the GPUs cannot be listed: {error} (libnvidia-ml.so.1)",
            hint="install the NVIDIA driver (r580 or newer), or set PHOS_GPU=soft",
            reason=Reason.NO_GPU,
        ) from error


def _by_driver(ordinal: int, uuid: str) -> GpuInfo:
    device = cuda.call("cuDeviceGet", ordinal)
    name = cuda.call("cuDeviceGetName", 256, device)
    total = int(cuda.call("cuDeviceTotalMem", device))
    used, pids = software_account.used(ordinal, total)
    return GpuInfo(ordinal, uuid, _text(name), total, memory_used=used, pids=pids)


def _by_nvml(ordinal: int, uuid: str, handle: Any) -> GpuInfo:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    rates = _if_told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    power = _if_told(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    running = _if_told(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return GpuInfo(
        ordinal=ordinal,
        uuid=uuid,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_total=int(memory.total),
        memory_used=int(memory.used),
        utilisation=None if rates is None else rates / 100,
        temperature=_if_told(
            lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        ),
        power=None if power is None else power / 1000,
        pids=tuple(sorted(p.pid for p in running or ())),
    )


def _if_told(read: Callable[[], Any]) -> Any:
    """Return the value; None if this kind of GPU does not have it."""
    try:
        return read()
    except pynvml.NVMLError_NotSupported:
        return None


def _text(raw: str | bytes) -> str:
    return raw.split(b"\0")[0].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
