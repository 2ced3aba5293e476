"""What is told of one process, image or GPU to whoever looks at it closely, and what can be set
right there.

Each method gets the caller, what the object is about, then its arguments. What is told of processes
and images is for the owner and for administrators.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from phosd.engine.hook_client.link import Block, BlockFlag
from phosd.engine.job.experience import KernelMark
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.system.procfs import ProcessId
from phosd.errors import InvalidOption, Unsupported
from phosd.service.api.views import ImageView, ProcessView, microseconds, or_unknown
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import Readers
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import (
    BlockOptions,
    ImageBlockOptions,
    KernelOptions,
    Options,
    SampleOptions,
    TrustOptions,
    parse_options,
)
from phosd.service.process_identity import Target, has_ended, identify, program
from phosd.service.samples import Sample, Samples

HOST = -1
"""Instead of a GPU's ordinal: the memory is the machine's."""
_FLAGS = {
    BlockFlag.EXPORTED: "exported",
    BlockFlag.IMPORTED: "imported",
    BlockFlag.PROGRAM_VMM: "program",
    BlockFlag.HOST_LOCATED: "host",
}
"""What a block is called that is not just memory of the process's own, made by the hook."""

_T = TypeVar("_T")


class Details:
    """Answers by the engine and the history, from threads of its own. For the event loop."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        rights: Rights,
        readers: Readers,
        samples: Samples,
    ) -> None:
        self._engine = engine
        self._history = history
        self._rights = rights
        self._readers = readers
        self._samples = samples

    async def process_blocks(
        self, caller: Caller, view: ProcessView, options: dict[str, Any]
    ) -> list[Any]:
        request = parse_options(options, BlockOptions)
        found = await self._ask(caller, view, lambda _, process: self._engine.blocks(process))
        return [[_block(block, gpu) for block, gpu in found[: request.limit]]]

    async def process_kernels(
        self, caller: Caller, view: ProcessView, options: dict[str, Any]
    ) -> list[Any]:
        request = parse_options(options, KernelOptions)

        def read(target: Target, process: ProcessId) -> list[list[Any]]:
            suspects = set(self._history.suspects.of(program(target)))
            launched = {KernelMark(k.name, k.module): k for k in self._engine.kernels(process)}
            rows: list[list[Any]] = [
                [mark.name, f"{mark.module:016x}", k.launches, k.suspect or mark in suspects]
                for mark, k in launched.items()
            ]
            # In force, too, though the hook has met none of them since its process began.
            rows += [
                [mark.name, f"{mark.module:016x}", 0, True] for mark in suspects - launched.keys()
            ]
            return sorted(rows, key=lambda row: (not row[3], -row[2], row[:2]))[: request.limit]

        return [await self._ask(caller, view, read)]

    async def trust_kernels(
        self, caller: Caller, view: ProcessView, options: dict[str, Any]
    ) -> list[Any]:
        """Have suspects of the process's program taken for what their arguments tell again; how
        many.
        """
        request = parse_options(options, TrustOptions)
        target = _still(view)
        await self._rights.require(
            caller, Action.CHECKPOINT, target.uid, f"process {target.pid}", pid=str(target.pid)
        )

        def trust() -> int:
            known = program(target)
            suspects = self._history.suspects.of(known)
            meant = [mark for mark in suspects if request.kernel in ("", mark.name)]
            if request.kernel and not meant:
                raise InvalidOption(
                    f"{request.kernel!r} is no suspect of {known.executable}",
                    hint="`phos ps PID` lists the kernels and which of them are suspects",
                )
            self._history.suspects.trust(known, meant)
            self._history.flush()
            return len(meant)

        return [await self._readers.run(caller.uid, trust)]

    async def process_log(
        self, caller: Caller, view: ProcessView, options: dict[str, Any]
    ) -> list[Any]:
        parse_options(options, Options)
        return [await self._ask(caller, view, lambda _, process: self._engine.hook_log(process))]

    async def image_blocks(
        self, caller: Caller, view: ImageView, options: dict[str, Any]
    ) -> list[Any]:
        request = parse_options(options, ImageBlockOptions)
        manifest = view.manifest
        await self._rights.require_sight(caller, manifest.owner, f"image {manifest.id}")
        return [await self._readers.run(caller.uid, _content, view, request)]

    async def gpu_samples(self, _: Caller, gpu: GpuInfo, options: dict[str, Any]) -> list[Any]:
        request = parse_options(options, SampleOptions)
        found = self._samples.of(gpu.uuid)
        if not found:
            raise Unsupported(
                f"{gpu.name} tells no figures: there is no NVML for it",
                hint="`ListProcesses` tells what each process holds of its memory",
            )
        return [[_figures(each) for each in found if microseconds(each.time) >= request.since]]

    async def _ask(
        self, caller: Caller, view: ProcessView, ask: Callable[[Target, ProcessId], _T]
    ) -> _T:
        now = _still(view)
        await self._rights.require_sight(caller, now.uid, f"process {now.pid}")
        return await self._readers.run(caller.uid, ask, now, now.id)


def _still(view: ProcessView) -> Target:
    """The process as it is now. Raises :class:`NoSuchProcess` when it is another."""
    now = identify(view.process.pid)
    if now.start_time != view.process.start_time:
        raise has_ended(view.process.pid)
    return now


def _figures(sample: Sample) -> list[Any]:
    return [
        microseconds(sample.time),
        or_unknown(sample.utilisation),
        sample.memory_used or 0,
        or_unknown(sample.temperature),
        or_unknown(sample.power),
    ]


def _block(block: Block, gpu: int) -> list[Any]:
    flags = [name for flag, name in _FLAGS.items() if block.flags & flag]
    return [block.id, block.va, block.size, gpu, flags]


def _content(view: ImageView, request: ImageBlockOptions) -> list[list[Any]]:
    """A chunk that several blocks have counts for the first."""
    manifest = view.manifest
    rows = []
    counted: set[tuple[int, int]] = set()
    for block in islice(manifest.blocks, request.offset + request.limit):
        new = {(chunk.pack, chunk.offset): chunk.length for chunk in block.chunks}
        sizes = {place: length for place, length in new.items() if place not in counted}
        counted |= sizes.keys()
        older = sum(length for (pack, _), length in sizes.items() if pack in view.shared)
        gpu = HOST if block.host else block.gpu
        pid = manifest.processes[block.process].pid
        stored = sum(sizes.values())
        rows.append([pid, block.id, block.va, block.size, gpu, len(block.chunks), stored, older])
    return rows[request.offset :]
