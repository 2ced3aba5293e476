"""What cannot be restored into a pid namespace of its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from phosd.engine.operations.restore import cpu_side
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.errors import Unsupported
from tests.support.fake_engine import manifest

NODE: Any = SimpleNamespace(
    criu=None, store=SimpleNamespace(image_folder=lambda _image: Path("/nowhere"))
)


@pytest.mark.parametrize("pids", [(7, 8), (1,)])
def test_pids_that_a_namespace_would_change_or_has_taken(pids: tuple[int, ...]) -> None:
    """Programs that share memory would not find each other; pid 1 is the keeper's."""
    each = [manifest("20260102T030405-0000", pid=pid) for pid in pids]
    image = replace(
        each[0],
        trees=tuple(one.trees[0] for one in each),
        processes=tuple(replace(one.processes[0], tree=n) for n, one in enumerate(each)),
    )
    options = RestoreOptions(pid_namespace=True)
    with cpu_side.CpuSide(NODE, image, options) as cpu:
        checks = dict(cpu.admission())
    failing, why = ("pids", "keeper") if 1 in pids else ("pid namespaces", "share device memory")
    with pytest.raises(Unsupported, match=why):
        checks[failing]()
