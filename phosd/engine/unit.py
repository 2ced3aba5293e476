"""What one operation works on: the process trees that must be treated together, and their hooks.

Processes that share device memory are one unit (hazard 5). A tree is saved from its root, so a
unit is a set of whole trees.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine import driver, process
from phosd.engine.errors import NoSuchProcess, Unsupported
from phosd.engine.holdings import same_file
from phosd.engine.hooklink import BlockFlag, Hello, HookLink
from phosd.engine.tree import ProcessTree, scan


@dataclass(frozen=True)
class Member:
    """One GPU process of a unit. ``gpus`` are the node's ordinals of the devices that it sees."""

    pid: int
    gpus: list[int]
    link: HookLink | None
    hello: Hello | None


@dataclass
class Unit:
    """Whole process trees, and the GPU processes in them."""

    runtime_dir: Path
    check: Callable[[ProcessTree], object]
    trees: list[ProcessTree] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)

    @property
    def links(self) -> list[HookLink]:
        """The connected hooks."""
        return [m.link for m in self.members if m.link is not None]

    @property
    def gpu_pids(self) -> list[int]:
        """Every GPU process."""
        return [m.pid for m in self.members]

    @property
    def pids(self) -> list[int]:
        """Every process."""
        return [p.pid for tree in self.trees for p in tree]

    def why_not_parked(self) -> str:
        """Why mode ``stop`` cannot be used, or an empty text."""
        for member in self.members:
            if member.hello is None:
                return f"process {member.pid} runs without the hook"
            if not member.hello.parkable:
                return f"process {member.pid} cannot be parked: {member.hello.reason}"
        return ""

    def add_tree(self, tree: ProcessTree) -> None:
        """Take in a tree, connecting to the hooks in it. Raises what makes it impossible."""
        self.check(tree)  # before the connections, which the dump will not meet
        self.trees.append(tree)
        for pid in (p.pid for p in tree.living):
            if not process.uses_cuda(pid):
                continue
            state = driver.state(pid)
            if state is None:
                continue  # CUDA is loaded, never initialised: a data-loader worker
            if state is not driver.State.RUNNING:
                raise Unsupported(
                    f"process {pid} is {state.name.lower()} by the driver's checkpoint",
                    hint="another tool holds it; run `cuda-checkpoint --toggle` or wait",
                )
            self.members.append(self._member(pid))

    def _member(self, pid: int) -> Member:
        link: HookLink | None = None
        hello: Hello | None = None
        with contextlib.suppress(NoSuchProcess):  # no hook in it
            link = HookLink(pid, self.runtime_dir).connect()
            hello = link.hello()
            if hello.uses_unsupported:
                link.close()
                raise Unsupported(
                    f"process {pid} cannot be saved: {hello.reason}",
                    hint="neither phosd nor the driver can checkpoint that",
                )
        return Member(pid, process.visible_gpus(pid), link, hello)

    def close(self) -> None:
        """Drop the connections."""
        for link in self.links:
            link.close()


@contextlib.contextmanager
def gather(pid: int, runtime_dir: Path, check: Callable[[ProcessTree], object]) -> Iterator[Unit]:
    """The unit of the process tree with root ``pid``, connected.

    ``check`` raises what is wrong with a tree before anything is asked of the processes in it.
    Raises :class:`NoSuchProcess` when there is no such process or no GPU process in its tree.
    """
    unit = Unit(runtime_dir, check)
    with contextlib.closing(unit):
        unit.add_tree(scan(pid))
        if not unit.members:
            raise NoSuchProcess(
                f"neither process {pid} nor a child of it is a GPU process",
                hint="`phos ps` lists the GPU processes",
            )
        _add_sharers(unit)
        yield unit


def _add_sharers(unit: Unit) -> None:
    """Add the trees of hooked processes that share device memory with the unit."""
    with contextlib.ExitStack() as borrowed:
        ours = [fd for link in unit.links for fd in _shared(link, borrowed)]
        if not ours:
            return
        for path in sorted((unit.runtime_dir / "hook").glob("*.sock")):
            if not path.stem.isdigit() or int(path.stem) in unit.pids:
                continue
            with contextlib.suppress(NoSuchProcess):  # ended, or not ours to look at
                with HookLink(int(path.stem), unit.runtime_dir) as other:
                    theirs = _shared(other, borrowed)
                if any(same_file(a, b) for a in ours for b in theirs):
                    unit.add_tree(scan(int(path.stem)))
                    ours += theirs


def _shared(link: HookLink, borrowed: contextlib.ExitStack) -> list[int]:
    """Descriptors of the memory that the process exported or imported."""
    shared = BlockFlag.EXPORTED | BlockFlag.IMPORTED
    ids = [b.id for b in link.list_blocks() if b.flags & shared]
    found = []
    if ids:
        for block, descriptor in link.export_blocks(ids[0] - 1):
            if descriptor is not None:
                borrowed.callback(os.close, descriptor)
                if block.flags & shared:
                    found.append(descriptor)
    return found
