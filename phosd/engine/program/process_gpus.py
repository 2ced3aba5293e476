"""Tell which of the node's GPUs a process sees, by the node's ordinals."""

from collections.abc import Sequence

from phosd.engine.hook_client.link import Hello
from phosd.engine.system import cuda, device_nodes, procfs
from phosd.engine.system.containers import is_apart
from phosd.errors import NoSuchProcess, Reason, Unsupported


def visible_gpus(pid: int) -> list[int]:
    """Return the node's ordinals of a process's devices, in the order of the process.

    This is what its initial environment says; a hook knows better (:func:`gpus_of`).
    """
    uuids = gpu_uuids()
    chosen = environment(pid).get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(len(uuids)))
    return parse_visible(chosen, uuids)


def gpus_of(hello: Hello) -> list[int]:
    """Return the node's ordinals of the devices of a hooked process, in the order of the process.

    Raises :class:`Unsupported` if a device is none of the node's GPUs.
    """
    ordinals = {uuid: ordinal for ordinal, uuid in enumerate(gpu_uuids())}
    for uuid in hello.devices:
        if uuid not in ordinals:
            raise Unsupported(
                f"process {hello.pid} uses {uuid}, which is none of this node's GPUs"
                f" ({', '.join(ordinals) or 'there are none'})",
                hint="phosd must see every GPU: start it without CUDA_VISIBLE_DEVICES; MIG devices"
                " cannot be checkpointed",
                reason=Reason.UNKNOWN_GPU,
            )
    return [ordinals[uuid] for uuid in hello.devices]


def parse_visible(chosen: str, uuids: Sequence[str]) -> list[int]:
    """Return the ordinals that ``CUDA_VISIBLE_DEVICES`` names: numbers, or unique UUID prefixes.

    As in the driver, devices after an invalid name are invisible.
    """
    ordinals: list[int] = []
    for name in map(str.strip, chosen.split(",")):
        if name.isascii() and name.isdecimal():
            matches = [i for i in range(len(uuids)) if str(i) == (name.lstrip("0") or "0")]
        else:
            matches = [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(matches) != 1:
            break
        ordinals += matches
    return ordinals


def gpu_uuids() -> list[str]:
    """Return the UUIDs (``GPU-...``) of the node's GPUs, by ordinal."""
    uuids = []
    for ordinal in range(cuda.call("cuDeviceGetCount")):
        device = cuda.call("cuDeviceGet", ordinal)
        uuids.append(cuda.gpu_uuid(bytes(cuda.call("cuDeviceGetUuid", device).bytes)))
    return uuids


def unseen_gpus(pid: int) -> frozenset[int]:
    """Return the node's ordinals of GPUs that a process cannot use, as its container lacks them."""
    if not is_apart(pid):
        return frozenset()
    known = enumerate(gpu_uuids())
    return frozenset(gpu for gpu, uuid in known if not device_nodes.sees(pid, uuid))


def environment(pid: int) -> dict[str, str]:
    """Return the variables with which a process began."""
    try:
        found = procfs.environment(pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NoSuchProcess(f"there is no process {pid}", hint="see `phos ps`") from error
    pairs = (each.decode(errors="replace").partition("=") for each in found if each)
    return {name: value for name, _, value in pairs}
