"""Find the kernels that may have written what the hook did not predict."""

from collections.abc import Iterable
from dataclasses import dataclass

from phosd.engine.hook_client.answers import LaunchedKernel
from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.errors import Internal


@dataclass(frozen=True)
class Blame:
    """At least one of these kernels wrote where it was not predicted to. ``disproved``: what all of
    them write was predicted by the analysis of their machine code, which is wrong.
    """

    suspects: list[KernelMark]
    disproved: bool


def blame(links: Iterable[HookLink]) -> Blame:
    """Return who may have written it, of the kernels that these processes have launched since the
    stop: those that were predicted by their arguments, or else those that their analysis told of. A
    suspect was predicted to write everything, and is innocent unless all are.
    """
    launched = [kernel for link in links for kernel in _launched(link)]
    tried = [kernel for kernel in launched if not kernel.suspect] or launched
    guessed = [kernel for kernel in tried if kernel.guessed or kernel.summary is None]
    found = guessed or tried
    return Blame(
        [KernelMark(kernel.name, kernel.module) for kernel in found],
        disproved=bool(found) and not guessed,
    )


def _launched(link: HookLink) -> list[LaunchedKernel]:
    # On a connection of its own: an old hook ends one on which it is asked for what it has not.
    try:
        with HookLink(link.pid, link.runtime_dir) as another:
            return another.launches()
    except Internal:
        return [
            LaunchedKernel(
                *(kernel.name, kernel.module, kernel.launches, 0, 0),
                suspect=kernel.suspect,
                guessed=True,
                summary=None,
            )
            for kernel in link.kernels()
        ]
