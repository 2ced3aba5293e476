"""Give processes back the memory that was parked."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.digest import DigestKey
from phosd.engine.hook_client.link import (
    BlockFlag,
    HookBlock,
    HookLink,
    HookState,
    NotImportable,
    reach,
)
from phosd.engine.memory.exported import new_key
from phosd.engine.memory.handing_back import HeldBlock, hand_back
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.ring import SOFTWARE_RING_BYTES
from phosd.engine.program import driver_checkpoint, process
from phosd.engine.recovery.account import Account
from phosd.errors import Internal, PhosError
from phosd.units import counted

GuardedBlocks = Mapping[int, Mapping[int, int]]
"""The guarded memory of one process: a descriptor by GPU and block."""


@dataclass(frozen=True)
class Seen:
    """What a look at a process whose memory may be parked finds."""

    uses_cuda: bool
    has_hook: bool
    is_known: bool
    """Whether the driver tells its state."""


def look_at(pid: int) -> Seen:
    """Return what a look at a process finds; the process itself may keep it waiting."""
    untold = (None, driver_checkpoint.State.UNKNOWN)
    known, hooked = driver_checkpoint.state(pid) not in untold, process.has_hook(pid)
    return Seen(process.uses_cuda(pid), hooked, known)


def back_from_parking(
    pid: int,
    seen: Seen,
    runtime_dir: Path,
    memory: GuardedBlocks,
    silent: Sequence[PhosError],
    account: Account,
) -> None:
    """Hand a process the memory that movers guard for it, and open its gate."""
    if not (seen.is_known and seen.has_hook):
        if memory and seen.uses_cuda:
            raise Internal(
                f"the driver does not tell the state of process {pid}, whose memory is kept",
                hint=f"see its log (dmesg), then `phos recover {pid}`",
            )
        return
    deeds = account.deeds.setdefault(pid, [])
    with reach(pid, runtime_dir) as link:
        hello = link.hello()
        if hello.state is HookState.PARKED:
            blocks = process.placed(hello, link.list_blocks())
            found = {
                block.id: _kept(memory, gpu, block.id)
                for block, gpu in blocks
                if not block.flags & BlockFlag.HAS_DESCRIPTOR  # else it was handed back, and made
            }
            missing = [block for block, descriptor in found.items() if descriptor is None]
            if missing and silent:  # that mover may have it
                raise silent[0]
            if missing:
                raise Internal(
                    f"nobody holds the memory of {len(missing)} of its "
                    f"{counted(len(found), 'block')}",
                    hint=f"it is lost: end process {pid} and restore its last image",
                )
            kept = {block: fd for block, fd in found.items() if fd is not None}
            try:
                link.unpark(kept.items())
            except NotImportable:
                _hand_back_copies(link, blocks, kept)
            link.open_gate()
            deeds.append("given back its parked memory")
        link.forget()


def _hand_back_copies(
    link: HookLink, blocks: Sequence[tuple[HookBlock, int]], kept: Mapping[int, int]
) -> None:
    """Let our own movers copy the memory into what the process makes: those that guard it may
    have no engine, and obey no visitor. A phosd that runs may hold the memory, too: not for long.
    """
    with contextlib.ExitStack() as movers:
        running: dict[int, Mover] = {}
        held = []
        for block, gpu in blocks:
            if block.id not in kept:
                continue
            if (at := max(gpu, 0)) not in running:
                key = DigestKey(os.urandom(32))
                running[at] = movers.enter_context(Mover.start(at, SOFTWARE_RING_BYTES, key))
            memory = HeldBlock(block.id, block.size, at, new_key(), kept[block.id])
            running[at].adopt([(memory.key, memory.size, memory.descriptor)])
            held.append(memory)
        hand_back(link, held, running.__getitem__, None)


def _kept(memory: GuardedBlocks, gpu: int, block: int) -> int | None:
    """Return a descriptor of a block of a process that is on ``gpu`` now.

    In the middle of a migration two GPUs have the block, and that of the process counts.
    """
    for place in (gpu, *memory):
        if (descriptor := memory.get(place, {}).get(block)) is not None:
            return descriptor
    return None
