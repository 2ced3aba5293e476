"""A program replaces what it runs from during a checkpoint: its executable, a library, the hook.

It goes on in any case. Either nothing is saved, and it is said why, or what was saved computes on.
"""

import os
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.system.native import hook_library
from phosd.errors import PhosError
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, bring_back, computed_right
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.harness import Target, alive, wait_until

PROGRAM = """
import ctypes, runpy, sys
ctypes.CDLL(sys.argv[1])
sys.path.insert(0, sys.argv[2].rpartition("/")[0])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FILES = {"executable": "bin/python", "library": "library.so", "hook": "libphos_hook.so"}
PHASES = ("prepare", "quiesce", "cpu", "publish")
CASES = [f"{what}-{phase}" for what, phase in product(FILES, PHASES)]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with the program's own executable, library and hook."""
    folder = tmp_path / "own"
    (folder / "bin").mkdir(parents=True)
    # A virtual environment, as ours.
    (folder / "pyvenv.cfg").write_text(f"home = {sys.base_exec_prefix}/bin\n")
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.executable).resolve(), folder / FILES["executable"])
    shutil.copy(hook_library().with_name("libphos_digest.so"), folder / FILES["library"])
    shutil.copy(hook_library(), folder / FILES["hook"])
    return folder


def start_from(own: Path, start: Starter, program: str = PROGRAM) -> Target:
    """Start the program, which runs from these files."""
    return start(
        "single",
        interpreter=[own / FILES["executable"], "-c", program, own / FILES["library"]],
        extra={"LD_PRELOAD": str(own / FILES["hook"])},
    )


@pytest.fixture
def target(start: Starter, own: Path) -> Target:
    return start_from(own, start)


@pytest.mark.rotated(of=6)
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on(
    case: str, own: Path, node: Node, target: Target, undisturbed: Undisturbed
) -> None:
    what, phase = case.split("-")
    file = own / FILES[what]
    target.wait_for_steps(3)

    def replace(_: Progress) -> None:
        (own / "another").write_bytes(os.urandom(1000))
        (own / "another").chmod(0o755)
        (own / "another").rename(file)

    image = None
    try:
        progress = at_phase(phase, replace)
        image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress).id
    except PhosError as error:
        print(f"not saved: {error}")
    assert file.stat().st_size == 1000, f"there was no {phase}"
    target.more_steps(AFTER)
    computed_right(target, undisturbed)
    target.kill()
    if image is None:
        assert not node.store.list()
        return
    try:
        bring_back(node, target, image)
        computed_right(target, undisturbed)
    except PhosError as error:
        print(f"not restored: {error}")
        wait_until(lambda: not alive(target.pid), "the end of what was restored in part")


def test_a_program_with_much_memory(
    own: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its processes are found, to get their memory from many threads, though CRIU has to give the
    executable that was replaced another name.
    """
    target = start_from(own, start, f"memory = bytearray(b'x') * (192 << 20)\n{PROGRAM}")
    target.wait_for_steps(3)
    (own / "another").write_bytes(os.urandom(1000))
    (own / "another").rename(own / FILES["executable"])
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress()).id
    target.more_steps(AFTER)
    target.kill()
    bring_back(node, target, image)
    assert "cr_link" in str(Path(f"/proc/{target.pid}/exe").readlink())
    computed_right(target, undisturbed)


def test_as_it_is(own: Path, node: Node, target: Target, undisturbed: Undisturbed) -> None:
    """Else nothing here would be shown."""
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress()).id
    target.more_steps(AFTER)
    target.kill()
    bring_back(node, target, image)
    computed_right(target, undisturbed)
