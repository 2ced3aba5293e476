"""Answer detailed queries about one process, image or GPU, and clear suspect kernels."""

import time
from collections.abc import Awaitable, Callable
from itertools import chain, islice, repeat
from typing import Annotated, TypeVar

import msgspec

from phosd.bus import Variant
from phosd.engine.hook_client.link import BlockFlag, HookBlock
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.launched_kernels import KnownKernel
from phosd.engine.program.doors import places_of
from phosd.engine.system.procfs import ProcessId
from phosd.errors import InvalidOption, Reason, Unsupported
from phosd.service.api.views import ImageView, ProcessView, microseconds, or_unknown
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import Options, method
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import Time
from phosd.service.process_identity import Target, has_ended, identify, program
from phosd.service.samples import Sample, Samples

HOST = -1
"""Stands for a GPU's ordinal when a block is host memory."""
_FLAGS = {
    BlockFlag.EXPORTED: "exported",
    BlockFlag.IMPORTED: "imported",
    BlockFlag.PROGRAM_VMM: "program",
    BlockFlag.HOST_LOCATED: "host",
}
"""Names of the block flags; plain memory that the hook allocated has none."""

_QUIET = 1.0
"""Seconds between two events of crashes of one user's programs."""

_T = TypeVar("_T")

_Limit = Annotated[int, msgspec.Meta(ge=1, le=20_000)]

BlockRow = tuple[int, int, int, int, list[str]]
KernelRow = tuple[str, str, int, bool]
ImageBlockRow = tuple[int, int, int, int, int, int, int, int]
FileRow = tuple[str, int, list[tuple[str, int, int]]]
SampleRow = tuple[int, float, int, float, float]


class BlockOptions(Options, frozen=True):
    """``limit``: return at most this many, of the lowest ids."""

    limit: _Limit = 5_000


class KernelOptions(Options, frozen=True):
    """``limit``: return at most this many, suspects first."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=4_000)] = 500


class AnalyseOptions(Options, frozen=True):
    """``count``: count what it launches for so many seconds from now on, instead of what was
    counted before.
    """

    count: Annotated[int, msgspec.Meta(ge=0, le=600)] = 0


class TrustOptions(Options, frozen=True):
    """``kernel``: those of this name only; empty: all."""

    kernel: str = ""


class ImageBlockOptions(Options, frozen=True):
    """``limit``: return at most this many, after the first ``offset``."""

    limit: _Limit = 5_000
    offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0


class SampleOptions(Options, frozen=True):
    """``since``: return the figures of this time or later."""

    since: Time = 0


class ProcessMethods:
    """Handlers of a process. They ask the hook and the history in the query pool. Only the owner
    and administrators may call them. ``wake_analysis`` makes the analysis look for something to do.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        rights: Rights,
        query_pool: QueryPool,
        wake_analysis: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._rights = rights
        self._query_pool = query_pool
        self._wake_analysis = wake_analysis

    @method("ListBlocks")
    async def list_blocks(
        self, caller: Caller, view: ProcessView, options: BlockOptions
    ) -> list[BlockRow]:
        """List the device memory of the process by id: id, address, size, GPU (-1: host memory),
        flags.
        """
        found = await self._ask(caller, view, lambda _, process: self._engine.blocks(process))
        return [_block(block, gpu) for block, gpu in found[: options.limit]]

    @method("ListKernels")
    async def list_kernels(
        self, caller: Caller, view: ProcessView, options: KernelOptions
    ) -> list[KernelRow]:
        """List the kernels launched since a checkpoint last began to copy on write, and the
        program's suspects that were not (0 launches), suspects first: name, hash of the module,
        launches, whether it is a suspect.
        """

        def read(target: Target, process: ProcessId) -> list[KernelRow]:
            suspects = set(self._history.suspects.of(program(target)))
            launched = {KernelMark(k.name, k.module): k for k in self._engine.kernels(process)}
            rows: list[KernelRow] = [
                (mark.name, f"{mark.module:016x}", k.launches, k.suspect or mark in suspects)
                for mark, k in launched.items()
            ]
            # Suspects also apply to kernels that this process has not launched yet.
            rows += [
                (mark.name, f"{mark.module:016x}", 0, True) for mark in suspects - launched.keys()
            ]
            return sorted(rows, key=lambda row: (not row[3], -row[2], row[:2]))[: options.limit]

        return await self._ask(caller, view, read)

    @method("DescribeKernels")
    async def describe_kernels(
        self, caller: Caller, view: ProcessView, options: KernelOptions
    ) -> list[dict[str, Variant]]:
        """Tell of kernels that were launched since they are counted, those launched most first,
        what the analysis of their machine code knows, as docs/reference/dbus.md lists it.
        """
        uid = view.process.uid
        found = await self._ask(
            caller, view, lambda _, process: self._engine.known_kernels(process, uid)
        )
        found.sort(key=lambda one: (-one.kernel.launches, one.kernel.name))
        return [_known(one) for one in found[: options.limit]]

    @method("AnalyseKernels")
    async def analyse_kernels(
        self, caller: Caller, view: ProcessView, options: AnalyseOptions
    ) -> int:
        """Analyse the process's kernels before others. Returns how many wait."""
        uid, seconds = view.process.uid, options.count
        waiting = await self._ask(
            caller, view, lambda _, process: self._engine.hurry_analysis(process, uid, seconds)
        )
        self._wake_analysis()
        return waiting

    @method("TrustKernels")
    async def trust_kernels(self, caller: Caller, view: ProcessView, options: TrustOptions) -> int:
        """Clear suspects of the program: from the next checkpoint on, what they write is predicted
        from their arguments again. Returns how many.
        """
        target = _still(view)
        await self._rights.require(
            caller, Action.CHECKPOINT, target.uid, f"process {target.pid}", pid=str(target.pid)
        )

        def trust() -> int:
            known = program(target)
            suspects = self._history.suspects.of(known)
            meant = [mark for mark in suspects if options.kernel in ("", mark.name)]
            if options.kernel and not meant:
                raise InvalidOption(
                    f"{options.kernel!r} is no suspect of {known.executable}",
                    hint="`phos ps PID` lists the kernels and which of them are suspects",
                )
            self._history.suspects.trust(known, meant)
            self._history.flush()
            return len(meant)

        return await self._query_pool.run(caller.uid, trust)

    @method("ListDoors")
    async def list_doors(self, caller: Caller, view: ProcessView) -> list[str]:
        """List where the process, and those below it, listen."""
        return await self._ask(caller, view, lambda _, process: places_of(process))

    @method("ReadLog")
    async def read_log(self, caller: Caller, view: ProcessView) -> str:
        """Return what the hook in the process has counted and noted, a line each."""
        return await self._ask(caller, view, lambda _, process: self._engine.hook_log(process))

    async def _ask(
        self, caller: Caller, view: ProcessView, ask: Callable[[Target, ProcessId], _T]
    ) -> _T:
        now = _still(view)
        await self._rights.require_sight(caller, now.uid, f"process {now.pid}")
        return await self._query_pool.run(caller.uid, ask, now, now.id)


class ImageMethods:
    """Handlers of an image. Only the owner and administrators may call them. ``look_again`` has its
    properties read again.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        rights: Rights,
        query_pool: QueryPool,
        look_again: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._history = history
        self._rights = rights
        self._query_pool = query_pool
        self._look_again = look_again
        self._quiet_until: dict[int, float] = {}
        """When the next crash of a user's programs is an event: nobody fills the history."""

    @method("ListBlocks")
    async def list_blocks(
        self, caller: Caller, view: ImageView, options: ImageBlockOptions
    ) -> list[ImageBlockRow]:
        """List the device memory of the image in the order in which it is loaded: pid, id, address,
        size, GPU (-1: host memory), chunks (0: another row has them), stored bytes, bytes of those
        that an older image holds, too.
        """
        manifest = view.manifest
        await self._rights.require_sight(caller, manifest.owner, f"image {manifest.id}")
        return await self._query_pool.run(caller.uid, _content, view, options)

    @method("ListFiles")
    async def list_files(self, caller: Caller, view: ImageView) -> list[FileRow]:
        """List the files whose bytes the image holds: path, bytes, and what restores have left of
        it: path, bytes, time.
        """
        manifest = view.manifest
        await self._rights.require_sight(caller, manifest.owner, f"image {manifest.id}")
        found = await self._query_pool.run(caller.uid, self._engine.files_of, manifest.id)
        return [
            (path, size, [(each.path, each.size, microseconds(each.left)) for each in left])
            for path, size, left in found
        ]

    @method("SetNote")
    async def set_note(self, caller: Caller, view: ImageView, note: str) -> None:
        """Write a note of the image, a line of at most 200 characters, in place of the one that it
        has; empty: take that away.
        """
        image = view.manifest.id
        await self._rights.require(
            caller, Action.DELETE, view.manifest.owner, f"image {image}", image=image
        )
        await self._query_pool.run(caller.uid, self._engine.set_note, image, note)
        await self._look_again()

    @method("ReportCrashes")
    async def report_crashes(self, caller: Caller, view: ImageView, count: int) -> None:
        """Tell how often in a row the program has crashed soon after its restore from the image; 0:
        it goes on.
        """
        image, owner = view.manifest.id, view.manifest.owner
        await self._rights.require(caller, Action.RESTORE, owner, f"image {image}", image=image)

        now = time.monotonic()
        told = now >= self._quiet_until.get(owner, 0.0)
        if told:
            self._quiet_until[owner] = now + _QUIET

        def record() -> None:
            self._history.crashed(image, owner, count, told=told)
            self._history.flush()

        await self._query_pool.run(caller.uid, record)
        await self._look_again()


class GpuMethods:
    """Handlers of a GPU. Anybody may call them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    @method("ListSamples")
    async def list_samples(self, gpu: GpuInfo, options: SampleOptions) -> list[SampleRow]:
        """Return the samples of the last ten minutes, oldest first: time in microseconds since the
        epoch, utilisation, used memory, temperature, power, as the properties have them.
        """
        found = self._samples.of(gpu.uuid)
        if not found:
            raise Unsupported(
                f"there are no figures of {gpu.name}: NVML does not know it",
                hint="`ListProcesses` has the memory that each process uses",
                reason=Reason.NO_FIGURES,
            )
        return [_figures(each) for each in found if microseconds(each.time) >= options.since]


def _still(view: ProcessView) -> Target:
    """Return the process. Raises :class:`NoSuchProcess` when its pid now belongs to another."""
    now = identify(view.process.pid)
    if now.start_time != view.process.start_time:
        raise has_ended(view.process.pid)
    return now


def _figures(sample: Sample) -> SampleRow:
    return (
        microseconds(sample.time),
        or_unknown(sample.utilisation),
        sample.memory_used or 0,
        or_unknown(sample.temperature),
        or_unknown(sample.power),
    )


def _block(block: HookBlock, gpu: int) -> BlockRow:
    flags = [name for flag, name in _FLAGS.items() if block.flags & flag]
    return block.id, block.va, block.size, gpu, flags


def _known(one: KnownKernel) -> dict[str, Variant]:
    """Return what is known of a kernel; a state other than ``analysed`` has no facts."""
    said = {
        "Name": Variant("s", one.kernel.name),
        "Module": Variant("s", f"{one.kernel.module:016x}"),
        "Launches": Variant("t", one.kernel.launches),
        "Suspect": Variant("b", one.kernel.suspect),
        "InHook": Variant("b", one.kernel.summary is not None),
        "IdempotentLaunches": Variant("t", one.kernel.idempotent),
        "OverwritingLaunches": Variant("t", one.kernel.overwrites),
        "UndecidedLaunches": Variant("t", one.kernel.undecided),
        "State": Variant("s", one.state),
        "Reason": Variant("s", one.reason),
    }
    if (facts := one.facts) is not None:
        said |= {
            "ParameterBytes": Variant("u", facts.parameter_bytes),
            "Roles": Variant("a{ss}", facts.roles),
            "UnknownReads": Variant("as", list(facts.unknown_reads)),
            "UnknownWrites": Variant("as", list(facts.unknown_writes)),
            "RangesRead": Variant("b", facts.ranges_read),
            "RangesWritten": Variant("b", facts.ranges_written),
            "Idempotent": Variant("s", facts.idempotent),
            "IdempotentWhy": Variant("as", list(facts.idempotent_why)),
        }
    return said


def _content(view: ImageView, options: ImageBlockOptions) -> list[ImageBlockRow]:
    """List the blocks of an image. A chunk that several blocks share counts for the first."""
    manifest = view.manifest
    rows: list[ImageBlockRow] = []
    counted: set[tuple[int, int]] = set()
    held = chain(view.shared, repeat(0))
    for block in islice(manifest.blocks, options.offset + options.limit):
        new = {(c.pack, c.offset): (c.length, h) for c, h in zip(block.chunks, held, strict=False)}
        sizes = {place: size for place, size in new.items() if place not in counted}
        counted |= sizes.keys()
        older = sum(length for length, shared in sizes.values() if shared)
        gpu = HOST if block.host else block.gpu
        pid = manifest.processes[block.process].pid
        stored = sum(length for length, _ in sizes.values())
        rows.append((pid, block.id, block.va, block.size, gpu, len(block.chunks), stored, older))
    return rows[options.offset :]
