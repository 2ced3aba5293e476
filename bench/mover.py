"""Measure how fast device memory is saved into an image and loaded. Prints one JSON object per
case.

    python bench/mover.py --state FOLDER [--gib N] [--ring-mib N]

The same run measures for comparison: copies to and from pinned memory, and the folder's own rate
for large writes and reads by as many threads.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.image.manifest import CHUNK, Block, ChunkRef, Gpu, Host, Manifest, Process, Tree
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.image.writer import Pack
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.requests import Copies, DrainMap, DrainSource
from phosd.engine.mover.worker.transfer import close_all, reopen_direct
from phosd.engine.system.cuda import call, driver

PIECE = 32 << 20
THREADS = min(16, os.cpu_count() or 1)


def show(case: str, **values: Any) -> None:
    """Print one result."""
    print(json.dumps({"case": case} | values), flush=True)


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that ``work`` takes."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def rate(byte_count: int, taken: float) -> float:
    """Return GB/s."""
    return round(byte_count / taken / 1e9, 2)


def pinned_rates() -> tuple[float, float]:
    """Return GB/s from the device to pinned memory, and back."""
    size = 1 << 30 if call("cuMemGetInfo")[1] > 16 << 30 else 64 << 20
    host, device = int(call("cuMemHostAlloc", size, 0)), int(call("cuMemAlloc", size))

    def out() -> None:
        call("cuMemcpyDtoH", host, device, size)

    def back() -> None:
        call("cuMemcpyHtoD", device, host, size)

    rates = [rate(size, statistics.median(seconds(w) for _ in range(7))) for w in (out, back)]
    call("cuMemFreeHost", host)
    call("cuMemFree", device)
    return rates[0], rates[1]


def folder_rates(folder: Path, total: int) -> tuple[float, float]:
    """Return GB/s of writing and reading ``total`` bytes in ``folder``, with O_DIRECT if
    possible.
    """
    source = mmap.mmap(-1, PIECE)
    source[:] = os.urandom(1 << 20) * (PIECE >> 20)
    pieces = max(THREADS, total // PIECE)
    files = []
    for i in range(THREADS):
        fd = os.open(folder / f"probe-{i}", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, -(-pieces // THREADS) * PIECE)
        direct = reopen_direct(fd, os.O_RDWR)
        files.append((fd, direct if direct >= 0 else fd))

    def write(i: int) -> None:
        fd, target = files[i]
        for at in range(i, pieces, THREADS):
            os.pwrite(target, source, at // THREADS * PIECE)
        os.fsync(fd)

    def read(i: int) -> None:
        buffer = mmap.mmap(-1, PIECE)
        for at in range(i, pieces, THREADS):
            os.preadv(files[i][1], [buffer], at // THREADS * PIECE)

    with ThreadPoolExecutor(THREADS) as pool:
        written = seconds(lambda: list(pool.map(write, range(THREADS))))
        done = seconds(lambda: list(pool.map(read, range(THREADS))))
    for i, (fd, target) in enumerate(files):
        os.close(fd)
        if target != fd:
            os.close(target)
        (folder / f"probe-{i}").unlink()
    return rate(pieces * PIECE, written), rate(pieces * PIECE, done)


def fill(descriptors: Sequence[int], sizes: Sequence[int]) -> None:
    """Fill every chunk of memory that the mover allocated with different bytes."""
    b = driver()
    kind = b.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access = b.CUmemAccessDesc()
    location = b.CUmemLocation()
    location.type = b.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location = location
    access.flags = b.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    number = 0
    for fd, size in zip(descriptors, sizes, strict=True):
        handle = call("cuMemImportFromShareableHandle", fd, kind)
        address = int(call("cuMemAddressReserve", size, 0, 0, 0))
        call("cuMemMap", address, size, 0, handle, 0)
        call("cuMemSetAccess", address, size, [access], 1)
        for at in range(address, address + size, CHUNK):
            number += 1
            call("cuMemsetD32", at, number, CHUNK // 4)
        call("cuCtxSynchronize")
        call("cuMemUnmap", address, size)
        call("cuMemAddressFree", address, size)
        call("cuMemRelease", handle)
        os.close(fd)


Chunks = Mapping[int, Sequence[ChunkRef]]


def copy_out(
    case: str,
    mover: Mover,
    digests: Mapping[int, Sequence[bytes]],
    writer: ImageWriter,
    packs: Sequence[Pack],
) -> tuple[Chunks, dict[str, Any]]:
    """Copy all chunks out while no program writes them; return their places and further figures."""
    if case == "save":
        saved = mover.save(digests, writer, packs=packs)
        return saved.chunks, {"changed": len(saved.changed)}
    if case == "copy":
        copies = Copies(writer, packs)
        every = [(key, i) for key, parts in digests.items() for i in range(len(parts))]
        mover.copy(every, copies)
        again = every[:: max(1, len(every) // 1000)]
        taken = seconds(lambda: mover.copy(again, copies))
        refs = {
            key: [copies.refs[key, i] for i in range(len(parts))] for key, parts in digests.items()
        }
        return refs, {"again_chunks": len(again), "again_s": round(taken, 4)}
    with ChunkMap.create([(key, len(parts)) for key, parts in digests.items()], []) as chunk_map:
        blocks = {key: chunk_map.first_chunk(key) for key in digests}
        source = DrainSource([DrainMap(chunk_map.fd, 0, blocks)], digests)
        drained = mover.drain(source, writer, packs=packs)
    return drained.chunks, {
        "changed": len(drained.changed),
        "to_saved_us": round(drained.seconds_to_saved * 1e6, 1),
        "longest_to_saved_us": round(drained.longest_to_saved * 1e6, 1),
    }


def manifest(writer: ImageWriter, saved: Chunks, size: int) -> Manifest:
    """Return a manifest with a made-up process: the image can be loaded, but not restored."""
    process = Process(1, 0, 0, "", (), writer.owner, 0, (), (), True, True, True)
    blocks = [Block(0, key, key << 32, size, 0, tuple(chunks)) for key, chunks in saved.items()]
    return Manifest(
        id=writer.id,
        created="",
        mode="stop",
        owner=writer.owner,
        host=Host("", "", "", 0, ()),
        gpus=(Gpu(0, "GPU-00000000-0000-0000-0000-000000000000", "", 0),),
        trees=(Tree(1, "none", ()),),
        processes=(process,),
        blocks=tuple(blocks),
        stop_seconds=0.0,
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="a folder on what to measure")
    parser.add_argument("--gib", type=float, default=16.0, help="device memory to move")
    parser.add_argument("--ring-mib", type=int, help="pinned ring (default: the mover's)")
    parser.add_argument("--block-mib", type=int, default=32)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="phos-bench-", dir=options.state))
    try:
        run(folder, options)
    finally:
        shutil.rmtree(folder)


def run(folder: Path, options: argparse.Namespace) -> None:
    """Run all cases in one folder."""
    block = options.block_mib << 20
    count = max(1, int(options.gib * 2**30) // block)
    total = count * block
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))
    out, back = pinned_rates()
    write, read = folder_rates(folder, min(total, 16 << 30))
    show("baseline", pinned_out_gb_s=out, pinned_in_gb_s=back, write_gb_s=write, read_gb_s=read)

    store = Store(folder / "state")
    ring = options.ring_mib << 20 if options.ring_mib else None
    sizes = [block] * count
    with Mover.start(0, ring, store.key) as mover:
        made = mover.create(list(enumerate(sizes)))
        fill(made, sizes)
        for number in range(2):
            taken = seconds(lambda: mover.digest(range(count)))
            show("digest", round=number, bytes=total, ms=round(taken * 1e3, 2))
        digests = mover.digest(range(count))
        for case in ("drain", "copy", "save"):
            taken = seconds(partial(store.spares.preallocate, total))
            show("preallocate", bytes=total, s=round(taken, 3), gb_s=rate(total, taken))
            with store.begin(os.getuid()) as writer:
                packs = writer.packs(sum(map(len, digests.values())))
                start = time.monotonic()
                pinned = mover.pin(pack.fd for pack in packs)
                show("pin", packs=len(packs), s=round(time.monotonic() - start, 3))
                start = time.monotonic()
                chunks, details = copy_out(case, mover, digests, writer, packs)
                copied = time.monotonic() - start - details.get("again_s", 0.0)
                unpin = seconds(partial(mover.unpin, pinned))
                published = manifest(writer, chunks, block)
                sync = seconds(partial(writer.publish, published))
            show(
                case,
                bytes=total,
                s=round(copied, 3),
                gb_s=rate(total, copied),
                of_pinned=round(total / copied / 1e9 / out, 3),
                of_folder=round(total / (copied + sync) / 1e9 / write, 3),
                unpin_s=round(unpin, 3),
                publish_s=round(sync, 3),
                **details,
            )
            if case != "save":
                store.delete(published.id)
        mover.drop(range(count))
        taken = seconds(lambda: close_all(mover.create(list(enumerate(sizes)))))
        show("create", bytes=total, blocks=count, s=round(taken, 3))
        with store.open(published.id) as image:
            for number in range(2):
                taken = seconds(lambda: mover.load(chunks, image))
                show_load(number, total, taken, back, read)
        show("equal", digests_equal=mover.digest(range(count)) == digests)


def show_load(number: int, total: int, taken: float, back: float, read: float) -> None:
    """Show a load of ``total`` bytes beside the rates of pinned memory and of the folder."""
    show(
        "load",
        round=number,
        bytes=total,
        s=round(taken, 3),
        gb_s=rate(total, taken),
        of_pinned=round(total / taken / 1e9 / back, 3),
        of_folder=round(total / taken / 1e9 / read, 3),
    )


if __name__ == "__main__":
    main()
