"""Copy-on-write with tables of what kernels access: what is only read is left alone."""

import os
import threading

from phosd.engine.analysis.summary import summarise
from phosd.engine.analysis.table import encode
from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.kernels.fetch import fetch
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions
from phosd.engine.system import procfs
from tests.native.analysis.oracle import machine_code
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.test_guesses import ITERATIONS, continues, guessed_wrong
from tests.node.concurrent.watch import braked_movers, watched
from tests.support.harness import Target


def give_tables(node: Node, target: Target, instead: dict[bytes, bytes] | None = None) -> int:
    """Give the hook what the analysis finds in all that the program has loaded, or ``instead`` of
    an image that has some text in another. Returns of how many kernels.
    """
    process = procfs.process_id(target.pid)
    assert process is not None
    kernels = 0
    with HookLink(target.pid, node.config.runtime_dir) as link:
        for image in link.images():
            with fetch(process, image, threading.Event()) as module:
                code = os.pread(module.file, module.size, 0)
            for text, other in (instead or {}).items():
                code = other if text in code else code
            file = os.memfd_create("table", os.MFD_CLOEXEC)
            try:
                os.write(file, encode(image.hash, 90, summarise(code, 90)))
                kernels += link.give_summaries(file)
            finally:
                os.close(file)
    return kernels


def test_what_is_only_read_is_left_alone(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """``readers`` reads 24 chunks and writes one."""
    shadowed = []
    for told in (False, True):
        target = start("readers")
        target.wait_for_steps(5)
        if told:
            assert give_tables(node, target) == 6  # with those of `gpu`
        options = CheckpointOptions(mode="concurrent", fallback="none")
        with braked_movers(node, target, ITERATIONS) as brake:
            manifest, watch = watched(node, target, options, brake)
        assert watch.progress.wrong_guesses == 0
        shadowed.append(watch.progress.figures.shadowed_chunks)
        continues(node, target, manifest.id, undisturbed("readers", compared=target))
    without, with_table = shadowed
    assert without is not None and with_table is not None
    assert with_table <= 1 < without, shadowed


LESS = """
extern "C" __global__ void gather(const unsigned* a, const unsigned* b, const unsigned* c,
                                  const unsigned* d, unsigned* out, unsigned count) {
    if (threadIdx.x > count) *out = *a + *b + *c + *d;
}
"""


def test_a_wrong_analysis_is_a_bug_by_name(node: Node, start: Starter) -> None:
    """A table that tells less than the kernel writes: its digest finds that out."""
    target = start("readers")
    target.wait_for_steps(5)
    assert give_tables(node, target, {b".entry gather": machine_code(LESS)[0]})
    manifest, watch = guessed_wrong(
        node, target, CheckpointOptions(mode="concurrent", fallback="none")
    )
    assert manifest is None
    assert [mark.name for mark in watch.progress.disproved] == ["gather"]
    assert watch.progress.suspects == watch.progress.disproved
    # Whoever is suspected is predicted to write everything, whatever the table says.
    known = CheckpointHistory(tuple(watch.progress.suspects))
    options = CheckpointOptions(mode="concurrent", fallback="none", experience=known)
    with braked_movers(node, target, ITERATIONS) as brake:
        again, watch = watched(node, target, options, brake)
    assert again.mode == "concurrent" and watch.progress.wrong_guesses == 0
