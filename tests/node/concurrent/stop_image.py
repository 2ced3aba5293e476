"""The device memory of a program at the instant of its stop, seen by the test itself.

The software GPU's memory is mapped in the program, at the very addresses that the program uses. So
the kernel tells what it holds, and nothing of the engine, the hook or the data mover is asked.
"""

from pathlib import Path

from phosd.engine.image.manifest import CHUNK, Block, Manifest
from phosd.engine.image.packs import HEADER, RECORD, read_record
from phosd.engine.image.store import Store

_DEVICE = range(0x6F0000000000, 0x700000000000)
"""The addresses of device memory; docs/reference/softgpu.md."""

Memory = dict[int, bytes]
"""Address -> contents, one entry for what is mapped without a gap."""


def mapped(pid: int) -> list[tuple[int, int]]:
    """The ranges [begin, end) of device memory that the process has mapped, in order: also what it
    has not yet given itself access to, but not what it has only reserved, which has no file.
    """
    found: list[tuple[int, int]] = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, _, _, file, *_ = line.split()
        begin, end = (int(a, 16) for a in addresses.split("-"))
        if begin not in _DEVICE or file == "0":
            continue
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def device_memory(pid: int) -> Memory:
    """All that the process has in device memory. Something must keep it from being written."""
    memory = {}
    before = mapped(pid)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        for begin, end in before:
            file.seek(begin)
            memory[begin] = file.read(end - begin)
    changed = set(mapped(pid)) ^ set(before)
    assert not changed, f"memory is mapped or unmapped, though nothing should run: {changed}"
    assert all(len(memory[begin]) == end - begin for begin, end in before)
    return memory


def differences(store: Store, image: str, memories: dict[int, Memory]) -> list[str]:
    """The chunks of an image that are not as they were in ``memories`` (by pid), and the blocks
    that were not there at all.
    """
    with store.open(image) as opened:
        manifest = opened.manifest
        found = []
        for block in manifest.blocks:
            if block.va == 0:
                continue  # Created and not mapped at the stop: nobody can see what is in it.
            pid = manifest.processes[block.process].pid
            there = _bytes_at(memories.get(pid, {}), block.va, block.size)
            name = f"block {block.id} of process {pid}, {block.size} bytes at {block.va:#x}"
            if there is None:
                found.append(f"{name}: was not mapped")
                continue
            for index, ref in enumerate(_holder(manifest, block).chunks):
                saved = _payload(opened.packs[ref.pack], ref.offset)
                if saved != there[index * CHUNK : (index + 1) * CHUNK]:
                    found.append(f"{name}: chunk {index} is not that of the stop")
        return found


def _holder(manifest: Manifest, block: Block) -> Block:
    """The block that has the chunks: another when it is the same memory."""
    if block.alias is None:
        return block
    return next(b for b in manifest.blocks if (b.process, b.id) == block.alias)


def _bytes_at(memory: Memory, address: int, size: int) -> bytes | None:
    for begin, content in memory.items():
        if begin <= address and address + size <= begin + len(content):
            return content[address - begin : address - begin + size]
    return None


def _payload(pack: int, offset: int) -> bytes:
    buffer = bytearray(RECORD)
    record = read_record(pack, offset, buffer, "the pack")
    return bytes(buffer[HEADER : HEADER + record.length])
