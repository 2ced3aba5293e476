"""Map blocks on the mover's GPU, allocate and reserve memory, and launch the digest kernel."""

import contextlib
import ctypes
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from phosd.engine.digest import KERNEL, LANES, SIZE, DigestKey, ptx
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import PAGE
from phosd.engine.mover.worker.gpu_block import GpuBlock, MappedSlab, chunks_of, whole_chunks
from phosd.engine.mover.worker.streams import Streams
from phosd.engine.system.cuda import call, driver
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, PhosError

_POINTER = struct.Struct("<Q")
_STREAMS = 14
"""Streams for a copy out, a load and a fetch at the same time."""
_LOOK_SECONDS = 0.1
_TABLE_CHUNKS = 1 << 16
"""Chunks that one launch hashes at most: 128 GiB; their table and digests take 2 MiB."""


class Gpu:
    """A device with its context. ``blocks`` has the adopted and created blocks, by key."""

    def __init__(self, ordinal: int, key: DigestKey) -> None:
        self._bindings = driver()
        self._ordinal = ordinal
        self.device = call("cuDeviceGet", ordinal)
        self.context = call("cuDevicePrimaryCtxRetain", self.device)
        self.attach()
        self._module = call("cuModuleLoadData", ptx() + b"\0", about="the digest kernel")
        self._kernel = call("cuModuleGetFunction", self._module, KERNEL.encode())
        self.use(key)
        self._properties = self._allocation_properties(ordinal)
        self._neighbours: dict[int, Any] = {}
        self._reserved: dict[frozenset[ProcessId], Any] = {}
        self._reserving = threading.Lock()
        # All that a stop needs is made now, as a neighbour may have all memory then.
        self.streams = Streams(_STREAMS)
        self._table = int(call("cuMemAlloc", 2 * SIZE * _TABLE_CHUNKS, about="the digest table"))
        self._hashing = threading.Lock()
        self._users: Counter[int] = Counter()
        self._using = threading.Lock()
        self._created = threading.Condition()
        self.blocks: dict[int, GpuBlock] = {}

    def use(self, key: DigestKey) -> None:
        """Compute digests with this key from now on."""
        self.digest_key = key
        self._key = ctypes.create_string_buffer(key.packed, len(key.packed))

    def attach(self) -> None:
        """Make the context current on the calling thread."""
        call("cuCtxSetCurrent", self.context)

    def adopt(
        self,
        blocks: Sequence[tuple[int, int]],
        descriptors: Sequence[int],
        home: int | None = None,
    ) -> None:
        """Import and map memory; takes over the descriptors. All or nothing.

        ``home`` is the ordinal of the GPU that has the memory, if it is another.
        """
        if len(blocks) != len(descriptors):
            raise Internal(f"{len(blocks)} blocks came with {len(descriptors)} descriptors")
        kind = self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

        if home is not None and self._reaches(home):
            home = None

        def bring(fd: int) -> Any:
            return call("cuMemImportFromShareableHandle", fd, kind, about="a block")

        added: list[int] = []
        try:
            for (key, size), fd in zip(blocks, descriptors, strict=True):
                self._add(key, size, bring(fd), fd, home)
                added.append(key)
        except BaseException:
            self.drop(added, keep_descriptors=True)
            raise

    def create(self, blocks: Sequence[tuple[int, int]], host: Collection[int] = ()) -> list[int]:
        """Allocate and map new memory; return one exportable descriptor each. All or nothing.

        ``host`` are the keys of blocks in the host's RAM. The contents are undefined.
        """
        made: dict[int, GpuBlock] = {}
        try:
            for key, size in blocks:
                self._require_new(key, size)
                if key in made:
                    raise Internal(f"block {key} is to be created twice")
                made[key] = self._create(size, self._in_host() if key in host else self._properties)
        except BaseException:
            for block in made.values():
                self._unmap(block)
                os.close(block.fd)
            raise
        with self._created:
            self.blocks |= made
            self._created.notify_all()
        return [block.fd for block in made.values()]

    def _create(self, size: int, properties: Any) -> GpuBlock:
        kind = self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call("cuMemCreate", size, properties, 0, about=f"a block of {size} bytes")
        try:
            fd = int(call("cuMemExportToShareableHandle", handle, kind, 0))
        except BaseException:
            call("cuMemRelease", handle)
            raise
        try:
            address = self._map(size, handle, self._ordinal)
        except BaseException:
            os.close(fd)
            raise
        return GpuBlock(address, size, handle, fd, *chunks_of(address, size))

    def created(self, keys: Sequence[int], check: Callable[[], None]) -> int:
        """Wait until the first of these blocks has been created. Returns how many of the first ones
        have been. ``check`` is called meanwhile, and raises to end the wait.
        """
        with self._created:
            while keys[0] not in self.blocks:
                check()
                self._created.wait(_LOOK_SECONDS)
            return next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))

    def create_together(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Allocate and map new memory for several blocks in one allocation. All or nothing."""
        if not blocks:
            return
        for key, size in blocks:
            self._require_new(key, size)
        size = sum(whole_chunks(size) for _, size in blocks)
        about = f"{len(blocks)} blocks of {size} bytes"
        handle = call("cuMemCreate", size, self._properties, 0, about=about)
        slab = MappedSlab(self._map(size, handle, self._ordinal), size, handle, len(blocks))
        at = slab.address
        for key, size in blocks:
            self.blocks[key] = GpuBlock(at, size, None, -1, *chunks_of(at, size), slab=slab)
            at += whole_chunks(size)

    @contextlib.contextmanager
    def keeping(self, keys: Collection[int]) -> Iterator[None]:
        """Prevent other threads from dropping these blocks inside the context."""
        used = frozenset(keys)
        with self._using:
            self._users.update(used)
        try:
            yield
        finally:
            with self._using:
                self._users -= Counter(used)

    def drop(self, keys: Iterable[int], *, keep_descriptors: bool = False) -> None:
        """Unmap and release blocks."""
        for key in keys:
            self._drop(key, 0, keep_descriptors=keep_descriptors)
        self._leave_neighbours()

    def drop_kept(self, keys: Iterable[int]) -> None:
        """Unmap and release blocks that only the caller keeps (:meth:`keeping`)."""
        for key in keys:
            self._drop(key, 1)
        self._leave_neighbours()

    def rename(self, keys: Mapping[int, int]) -> None:
        """Give blocks new keys: all of them or none."""
        with self._using:
            for key in keys:
                self._require_unused(key, 0)
            for key, new in keys.items():
                self.blocks[new] = self.blocks.pop(key)

    def keys(self) -> set[int]:
        """Return the keys of the blocks; other threads add and drop some at any time."""
        return set(self.blocks)

    def block(self, key: int) -> GpuBlock:
        """Return the block with this key."""
        if key not in self.blocks:
            raise Internal(f"the data mover holds no block {key}")
        return self.blocks[key]

    def digest(self, keys: Sequence[int]) -> list[bytes]:
        """Return the digests of each block's chunks, 16 bytes each. Thread-safe."""
        tables = [self.block(key).table for key in keys]
        table = b"".join(tables)
        most = SIZE * _TABLE_CHUNKS
        digests = b"".join(self._hash(table[at : at + most]) for at in range(0, len(table), most))
        blobs = []
        at = 0
        for part in tables:
            blobs.append(digests[at : at + len(part)])
            at += len(part)
        return blobs

    def _hash(self, table: bytes) -> bytes:
        """Return the digests for a table, by one launch; an entry is as long as its digest."""
        digests = bytearray(len(table))
        with self._hashing:
            call("cuMemcpyHtoD", self._table, table, len(table))
            self.launch_digest(0, self._table, len(table) // SIZE, self._table + len(table))
            call("cuMemcpyDtoH", digests, self._table + len(table), len(digests))
        return bytes(digests)

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

    def copy_from(self, source: GpuBlock, at: int, address: int, size: int, stream: Any) -> None:
        """Copy ``size`` bytes from device address ``at``, in ``source``, to ``address``."""
        if source.home is None:
            call("cuMemcpyDtoDAsync", address, at, size, stream)
        else:
            there = self._neighbour(source.home)
            call("cuMemcpyPeerAsync", address, self.context, at, there, size, stream)

    def usable(self) -> bool:
        """Return whether the context works: errors such as an illegal access end it for good."""
        try:
            call("cuCtxSynchronize")
        except PhosError:
            return False
        return True

    def free_memory(self) -> tuple[int, int]:
        """Return (free, total) device memory in bytes."""
        free, total = call("cuMemGetInfo")
        return int(free), int(total)

    @property
    def reserved(self) -> set[ProcessId]:
        """The processes that memory is reserved for."""
        known = list(self._reserved)  # one copy, since other threads may reserve
        return {process for processes in known for process in processes}

    def reserve(self, byte_count: int, processes: Iterable[ProcessId]) -> None:
        """Reserve device memory for ``processes``; 0 releases what no other process needs.

        A new amount for the same processes replaces the old one.
        """
        wanted = frozenset(processes)
        with self._reserving:
            for known, handle in list(self._reserved.items()):
                if known == wanted or (known and known <= wanted):
                    call("cuMemRelease", handle)
                    del self._reserved[known]
            if byte_count:
                size = whole_chunks(byte_count)
                about = f"a reserve of {size} bytes"
                self._reserved[wanted] = call("cuMemCreate", size, self._properties, 0, about=about)

    def _drop(self, key: int, users: int, *, keep_descriptors: bool = False) -> None:
        with self._using:
            block = self._require_unused(key, users)
            del self.blocks[key]
            slab = block.slab
            if slab is not None:
                slab.parts -= 1
        if slab is None:
            self._unmap(block)
            if not keep_descriptors:
                os.close(block.fd)
        elif not slab.parts:
            self._unmap(slab)

    def _require_unused(self, key: int, users: int) -> GpuBlock:
        """Return the block. Raises if more than ``users`` requests keep it."""
        if self._users[key] > users:
            raise Internal(f"block {key} is being copied", hint="drop it afterwards")
        return self.block(key)

    def _reaches(self, ordinal: int) -> bool:
        """Return whether this GPU can access the memory of another."""
        other = call("cuDeviceGet", ordinal)
        return ordinal == self._ordinal or bool(call("cuDeviceCanAccessPeer", self.device, other))

    def _neighbour(self, ordinal: int) -> Any:
        """Return a context on a GPU that this one cannot access; it is kept while needed."""
        if ordinal not in self._neighbours:
            device = call("cuDeviceGet", ordinal)
            self._neighbours[ordinal] = call("cuDevicePrimaryCtxRetain", device)
        return self._neighbours[ordinal]

    def _leave_neighbours(self) -> None:
        if not self._neighbours:
            return
        needed = {block.home for block in list(self.blocks.values())}
        for ordinal in self._neighbours.keys() - needed:
            # Otherwise another thread released it.
            if self._neighbours.pop(ordinal, None) is not None:
                call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", ordinal))

    def _access(self, ordinal: int) -> Any:
        access = self._bindings.CUmemAccessDesc()
        location = self._bindings.CUmemLocation()
        location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        access.location = location
        access.flags = self._bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _add(self, key: int, size: int, handle: Any, fd: int, home: int | None = None) -> None:
        """Map ``handle`` for this GPU, or for its ``home``; on failure the handle is released."""
        try:
            self._require_new(key, size)
        except BaseException:
            call("cuMemRelease", handle)
            raise
        address = self._map(size, handle, self._ordinal if home is None else home)
        self.blocks[key] = GpuBlock(address, size, handle, fd, *chunks_of(address, size), home)

    def _require_new(self, key: int, size: int) -> None:
        if key in self.blocks:
            raise Internal(f"the data mover already holds a block {key}")
        if size <= 0 or size % PAGE:
            raise Internal(f"block {key} has {size} bytes, not a multiple of {PAGE}")

    def _map(self, size: int, handle: Any, home: int) -> int:
        """Map memory and return its address; on failure ``handle`` is released."""
        address = 0
        about = f"{size} bytes"
        try:
            room = size + CHUNK  # a gap, so that no copy overruns into the next block
            address = int(call("cuMemAddressReserve", room, 0, 0, 0, about=about))
            call("cuMemMap", address, size, 0, handle, 0, about=about)
            try:
                call("cuMemSetAccess", address, size, [self._access(home)], 1, about=about)
            except BaseException:
                call("cuMemUnmap", address, size)
                raise
        except BaseException:
            if address:
                call("cuMemAddressFree", address, size + CHUNK)
            call("cuMemRelease", handle)
            raise
        return address

    def _unmap(self, mapped: GpuBlock | MappedSlab) -> None:
        call("cuMemUnmap", mapped.address, mapped.size)
        call("cuMemAddressFree", mapped.address, mapped.size + CHUNK)
        call("cuMemRelease", mapped.handle)

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

    def _in_host(self) -> Any:
        """Return the properties of memory in the host's RAM, near the device."""
        b = self._bindings
        near = b.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        properties = b.CUmemAllocationProp()
        properties.type = self._properties.type
        properties.requestedHandleTypes = self._properties.requestedHandleTypes
        location = b.CUmemLocation()
        location.type = b.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        # Without NUMA the id is negative, and the driver wants 0.
        location.id = max(0, int(call("cuDeviceGetAttribute", near, self.device)))
        properties.location = location
        return properties
