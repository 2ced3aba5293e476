"""Tell processes that only inherited the GPU driver's devices from those that may use a GPU.

The driver tells that, but not of a process that stands still. CUDA opens devices when it starts: so
one that has those of its parent alone has not started it, and has not as long as it opens no more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from phosd.engine.criu.run.driver_devices import DriverDevices
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system.kcmp import same_open_file
from phosd.engine.system.procfs import Descriptor, ProcessId

_Places = frozenset[tuple[int, str]]
"""Numbers of descriptors, and what they lead to."""


@dataclass(frozen=True)
class InheritedDevices:
    """The devices that processes had when it was known that all of them were their parents'."""

    known: Mapping[ProcessId, _Places]

    @classmethod
    def of(cls, trees: Iterable[ProcessTree], users: Collection[int]) -> Self:
        """Look at running trees. ``users`` use GPUs; of others, those are known whose devices are
        their parents', which still have them.
        """
        known: dict[ProcessId, _Places] = {}
        for tree in trees:
            opened = _opened(tree)
            for process in tree.living:
                ours, theirs = opened[process.pid], opened[process.parent]
                if process.pid not in users and all(_in(theirs, each) for each in ours):
                    known[process.id] = _places(ours)
        return cls(known)

    def doubtful(self, tree: ProcessTree, users: Collection[int]) -> list[int]:
        """Return the processes of a tree, which stands still, that may have begun to use a GPU."""
        opened = _opened(tree)
        return [
            process.pid
            for process in tree.living
            if process.pid not in users
            and not _places(opened[process.pid]) <= self.known.get(process.id, frozenset())
        ]


def _opened(tree: ProcessTree) -> defaultdict[int, list[Descriptor]]:
    found: defaultdict[int, list[Descriptor]] = defaultdict(list)
    for each in DriverDevices.here().open_in(TreeResources.of(tree).descriptors):
        found[each.pid].append(each)
    return found


def _in(theirs: Iterable[Descriptor], ours: Descriptor) -> bool:
    return any(
        ours.target == each.target
        and same_open_file((ours.pid, ours.number), (each.pid, each.number))
        for each in theirs
    )


def _places(opened: Iterable[Descriptor]) -> _Places:
    return frozenset((each.number, each.target) for each in opened)
