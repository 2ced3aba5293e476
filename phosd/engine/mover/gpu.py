"""The mover's GPU: blocks mapped here, and the digest kernel."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phosd.engine.cuda import call, driver
from phosd.engine.digest import KERNEL, LANES, SIZE, DigestKey, pack_chunks, ptx
from phosd.engine.errors import Internal, PhosError
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import PAGE

_POINTER = struct.Struct("<Q")


@dataclass(frozen=True)
class Block:
    """Device memory that this process has mapped at ``address``; ``size`` in bytes.

    ``chunks`` are (address, length in bytes), ``table`` the same for the digest kernel: made before
    they are needed, because the digests are computed while a program stands still.
    """

    address: int
    size: int
    handle: Any
    fd: int
    chunks: list[tuple[int, int]]
    table: bytes


class Gpu:
    """One device with its context. ``blocks`` holds what was adopted or created, by key."""

    def __init__(self, ordinal: int, key: DigestKey) -> None:
        self._bindings = driver()
        self.device = call("cuDeviceGet", ordinal)
        self.context = call("cuDevicePrimaryCtxRetain", self.device)
        self.attach()
        self._module = call("cuModuleLoadData", ptx() + b"\0", about="the digest kernel")
        self._kernel = call("cuModuleGetFunction", self._module, KERNEL.encode())
        self.use(key)
        self._properties = self._allocation_properties(ordinal)
        self._access = self._bindings.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = self._bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._reserved: dict[frozenset[tuple[int, int]], Any] = {}
        self._table = 0
        self._table_chunks = 0
        self._kept: frozenset[int] = frozenset()
        self.blocks: dict[int, Block] = {}

    def use(self, key: DigestKey) -> None:
        """Compute digests with this key from now on."""
        self._key = ctypes.create_string_buffer(key.packed, len(key.packed))

    def attach(self) -> None:
        """Make the context current on the calling thread."""
        call("cuCtxSetCurrent", self.context)

    def adopt(self, blocks: Sequence[tuple[int, int]], descriptors: Sequence[int]) -> None:
        """Import and map memory; takes the descriptors over. All or nothing."""
        if len(blocks) != len(descriptors):
            raise Internal(f"{len(blocks)} blocks came with {len(descriptors)} descriptors")
        kind = self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

        def bring(fd: int) -> Any:
            return call("cuMemImportFromShareableHandle", fd, kind, about="a block")

        added: list[int] = []
        try:
            for (key, size), fd in zip(blocks, descriptors, strict=True):
                self._add(key, size, bring(fd), fd)
                added.append(key)
        except BaseException:
            self.drop(added, keep_descriptors=True)
            raise

    def create(self, blocks: Sequence[tuple[int, int]]) -> list[int]:
        """Make and map new memory; returns one exportable descriptor each. All or nothing.

        The contents are undefined, as the driver gives them.
        """
        kind = self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        added: list[int] = []
        try:
            for key, size in blocks:
                about = f"a block of {size} bytes"
                handle = call("cuMemCreate", size, self._properties, 0, about=about)
                try:
                    fd = int(call("cuMemExportToShareableHandle", handle, kind, 0))
                except BaseException:
                    call("cuMemRelease", handle)
                    raise
                try:
                    self._add(key, size, handle, fd)
                except BaseException:
                    os.close(fd)
                    raise
                added.append(key)
        except BaseException:
            self.drop(added)
            raise
        return [self.blocks[key].fd for key in added]

    @contextlib.contextmanager
    def keeping(self, keys: Collection[int]) -> Iterator[None]:
        """Inside, other threads cannot drop these blocks. One request that has any at a time."""
        if not keys:
            yield
            return
        self._kept = frozenset(keys)
        try:
            yield
        finally:
            self._kept = frozenset()

    def drop(self, keys: Iterable[int], *, keep_descriptors: bool = False) -> None:
        """Unmap and release blocks."""
        for key in keys:
            block = self.block(key)
            if key in self._kept:
                raise Internal(f"block {key} is being copied", hint="drop it afterwards")
            del self.blocks[key]
            call("cuMemUnmap", block.address, block.size)
            call("cuMemAddressFree", block.address, block.size + CHUNK)
            call("cuMemRelease", block.handle)
            if not keep_descriptors:
                os.close(block.fd)

    def drop_kept(self, keys: Sequence[int]) -> None:
        """Unmap and release blocks that the caller alone keeps."""
        self._kept -= frozenset(keys)
        self.drop(keys)

    def block(self, key: int) -> Block:
        """The block of that key."""
        if key not in self.blocks:
            raise Internal(f"the data mover holds no block {key}")
        return self.blocks[key]

    def digest(self, keys: Sequence[int]) -> list[bytes]:
        """The digests of each block's chunks, 16 bytes each; one launch for all."""
        tables = [self.block(key).table for key in keys]
        table = b"".join(tables)
        count = len(table) // SIZE
        if not count:
            return [b""] * len(keys)
        self._reserve_table(count)
        digests = bytearray(SIZE * count)
        call("cuMemcpyHtoD", self._table, table, len(table))
        self.launch_digest(0, self._table, count, self._table + len(table))
        call("cuMemcpyDtoH", digests, self._table + len(table), len(digests))
        blobs = []
        at = 0
        for part in tables:  # an entry of the table is as long as a digest
            blobs.append(bytes(digests[at : at + len(part)]))
            at += len(part)
        return blobs

    def launch_digest(self, stream: Any, table: int, count: int, digests: int) -> None:
        """Hash ``count`` chunks on a stream; ``table`` and ``digests`` are device addresses."""
        arguments = [
            self._key,
            *(ctypes.create_string_buffer(_POINTER.pack(p), 8) for p in (table, digests)),
        ]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grid, block = (count, 1, 1), (LANES, 1, 1)
        call(
            "cuLaunchKernel",
            *(self._kernel, *grid, *block, 0, stream, ctypes.addressof(pointers), 0),
            about="the digest kernel",
        )

    def usable(self) -> bool:
        """Whether the context still works: some errors, such as a wild access, end it for good."""
        try:
            call("cuCtxSynchronize")
        except PhosError:
            return False
        return True

    def free_memory(self) -> tuple[int, int]:
        """(free, total) device memory in bytes."""
        free, total = call("cuMemGetInfo")
        return int(free), int(total)

    @property
    def reserved(self) -> set[tuple[int, int]]:
        """For whom memory is reserved: (pid, start time)."""
        return {process for processes in self._reserved for process in processes}

    def reserve(self, byte_count: int, processes: Iterable[tuple[int, int]]) -> None:
        """Keep device memory for ``processes``; 0 lets go of what is kept for nobody else.

        A new amount for the same ones replaces the old one.
        """
        wanted = frozenset(processes)
        for known, handle in list(self._reserved.items()):
            if known == wanted or (known and known <= wanted):
                call("cuMemRelease", handle)
                del self._reserved[known]
        if byte_count:
            size = -(-byte_count // CHUNK) * CHUNK
            about = f"a reserve of {size} bytes"
            self._reserved[wanted] = call("cuMemCreate", size, self._properties, 0, about=about)

    def _add(self, key: int, size: int, handle: Any, fd: int) -> None:
        """Map ``handle``, which is released when that fails."""
        address = 0
        try:
            if key in self.blocks:
                raise Internal(f"the data mover already holds a block {key}")
            if size <= 0 or size % PAGE:
                raise Internal(f"block {key} has {size} bytes, not a multiple of {PAGE}")
            room = size + CHUNK  # a gap, so that no copy runs from one block into another
            address = int(call("cuMemAddressReserve", room, 0, 0, 0, about=f"{size} bytes"))
            call("cuMemMap", address, size, 0, handle, 0, about=f"block {key}")
            try:
                call("cuMemSetAccess", address, size, [self._access], 1, about=f"block {key}")
            except BaseException:
                call("cuMemUnmap", address, size)
                raise
        except BaseException:
            if address:
                call("cuMemAddressFree", address, size + CHUNK)
            call("cuMemRelease", handle)
            raise
        end = address + size
        chunks = [(at, min(CHUNK, end - at)) for at in range(address, end, CHUNK)]
        self.blocks[key] = Block(address, size, handle, fd, chunks, pack_chunks(chunks))

    def _reserve_table(self, count: int) -> None:
        """Device memory for ``count`` table entries and digests, kept for the next time."""
        if count > self._table_chunks:
            if self._table:
                call("cuMemFree", self._table)
                self._table = self._table_chunks = 0
            room = max(1024, 2 * count)
            self._table = int(call("cuMemAlloc", 2 * SIZE * room, about="the digest table"))
            self._table_chunks = room

    def _allocation_properties(self, ordinal: int) -> Any:
        b = self._bindings
        properties = b.CUmemAllocationProp()
        properties.type = b.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = (
            b.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        location = b.CUmemLocation()
        location.type = b.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        properties.location = location
        rdma = b.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        flags = properties.allocFlags
        flags.gpuDirectRDMACapable = int(call("cuDeviceGetAttribute", rdma, self.device))
        properties.allocFlags = flags
        return properties
