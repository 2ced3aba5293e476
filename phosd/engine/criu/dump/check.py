"""Check whether CRIU can dump a tree, which runs on."""

import contextlib
import time

from phosd.engine.criu.dump import preflight
from phosd.engine.criu.dump.credentials import require_plain
from phosd.engine.criu.files import stdio
from phosd.engine.criu.images.rights import Rights
from phosd.engine.criu.run.program import Criu
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.program.tree import ProcessTree, scan
from phosd.engine.system import procfs
from phosd.errors import Busy, InvalidOption, NoSuchProcess, Unsupported

_LOOKS = 5
_BETWEEN_LOOKS = 0.05


def check(criu: Criu, tree: ProcessTree, tcp: str = "refuse") -> stdio.StdioPlan:
    """Check whether ``criu`` can dump ``tree``, which runs on. Returns where its output leads.

    Raises :class:`Unsupported` naming what cannot be dumped, :class:`NoSuchProcess` if the root has
    ended.
    """
    if tcp not in preflight.TCP_POLICIES:
        choices = ", ".join(preflight.TCP_POLICIES)
        raise InvalidOption(f"there is no tcp policy {tcp!r}", hint=f"use one of {choices}")
    refused: Unsupported | None = None
    for _ in range(_LOOKS):
        # A descriptor that the running program closes during the check can no longer be read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rights = Rights.known_to_kernel(tree.ids)
            if criu.service is None:
                rights.require_attainable()
            resources = TreeResources.of(tree)
            try:
                preflight.require_dumpable(resources, tcp, criu.namespaces_for(tree.root.pid))
            except Unsupported as error:
                # What leads to a process that was forked meanwhile seems to lead outside, and a
                # connection may be about to be accepted: what is there twice is there to stay.
                if refused is not None and str(refused) == str(error):
                    raise
                refused = error
                tree = scan(tree.root.pid)
                time.sleep(_BETWEEN_LOOKS)
                continue
            require_plain(tree, rights)
            return stdio.plan(tree, resources.descriptors)
        if not tree.root.alive:
            raise NoSuchProcess(f"process {tree.root.pid} has ended", hint="start it again")
    if refused is not None:
        raise refused
    raise Busy(
        f"{procfs.describe(tree.root.pid)} opens and closes files too quickly to be looked at",
        hint="try again",
    )
