"""Files without a name, such as those of ``eventfd(2)`` and ``inotify(7)``."""

from collections.abc import Iterator

from phosd.engine.criu.kinds.kind import Choices, FileKind, place
from phosd.engine.criu.run.tree_resources import TreeResources

_PREFIX = "anon_inode:"
_SAVED = ("eventfd", "eventpoll", "signalfd", "timerfd", "inotify", "fanotify", "pidfd")
_REMEDIES = {"io_uring": " (libuv makes none in a program that `phos run` starts)"}


class AnonymousFiles(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        for descriptor in tree.own_descriptors:
            if not descriptor.target.startswith(_PREFIX):
                continue
            kind = descriptor.target.removeprefix(_PREFIX).strip("[]")
            if kind not in _SAVED:
                remedy = _REMEDIES.get(kind, "")
                yield f"{place(descriptor)} is of a kind that cannot be saved{remedy}"
            elif descriptor.watches and choices.user is not None:
                # It names files by handles, and to open those would be to open any file.
                yield (
                    f"{place(descriptor)} watches files, which only a root program may have saved"
                )
