"""The ends of a dumped tree that lead outside, such as its standard output."""

from collections.abc import Sequence

from msgspec.structs import replace

from phosd.engine.criu.files import stdio
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import procfs
from phosd.errors import Busy


class Output(CriuPart):
    """Tells CRIU which ends lead outside, by a ``plan`` that was made while the ``tree`` ran."""

    def __init__(self, tree: ProcessTree, plan: stdio.StdioPlan) -> None:
        self._tree = tree
        self._plan = plan

    @property
    def words(self) -> Sequence[str]:
        return self._plan.words

    def frozen(self, tree: TreeResources) -> None:
        """Plan again. If something came or went while the tree ran, only one end of a pipe may have
        been seen; a restore would take its other end for lost.

        Raises :class:`Busy` if CRIU would have to be told something else.
        """
        before, self._plan = self._plan, stdio.plan(tree.tree, tree.descriptors)
        self._tree = tree.tree
        told, needed = set(before.words), set(self._plan.words)
        if needed - told or before.shell_job != self._plan.shell_job:
            raise Busy(
                f"{procfs.describe(tree.tree.root.pid)} changed its session, or where its output "
                "leads, while it was saved",
                hint="try again",
            )

    def record(self, details: CpuDetails) -> CpuDetails:
        own = self._tree.own
        endpoints = tuple(replace(each, pid=own(each.pid)) for each in self._plan.endpoints)
        return replace(details, endpoints=endpoints, shell_job=self._plan.shell_job)
