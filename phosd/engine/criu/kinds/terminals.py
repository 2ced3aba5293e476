"""Terminals."""

from collections.abc import Iterator

from phosd.engine.criu.files import stdio
from phosd.engine.criu.kinds.kind import Choices, FileKind, place
from phosd.engine.criu.run.tree_resources import TreeResources


class Terminals(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        """CRIU gives the new terminal to the owner of the old one."""
        for descriptor in tree.own_descriptors:
            owner = descriptor.file.st_uid
            if choices.user not in (None, owner) and stdio.is_terminal(descriptor):
                yield (
                    f"{place(descriptor)} is a terminal of user {owner}, which only root may give "
                    "back"
                )
