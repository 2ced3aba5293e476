"""The GPUs that a container was given: the others are no place for its programs."""

import os
import stat
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import process_gpus
from phosd.engine.system import device_nodes
from phosd.errors import Reason, Unsupported
from tests.node.checkpoint_restore.cycle import Undisturbed, computed_right
from tests.support import containers

MAJOR = 240
"""The kernel leaves this number to experiments."""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    """Devices for the software GPUs, as a driver has them."""
    made = []
    for minor, uuid in enumerate(process_gpus.gpu_uuids()):
        made.append(tmp_path / f"nvidia{minor}")
        os.mknod(made[-1], 0o666 | stat.S_IFCHR, os.makedev(MAJOR, minor))
        (folder := tmp_path / f"0000:{minor}").mkdir()
        lines = ["Model: \t\t A", f"GPU UUID: \t {uuid}", f"Device Minor: \t {minor}", ""]
        (folder / "information").write_text("\n".join(lines))
    monkeypatch.setattr(device_nodes, "_GPUS", tmp_path)
    monkeypatch.setattr(device_nodes, "_DEVICE", f"{tmp_path}/nvidia{{minor}}")
    return tuple(made)


def test_a_gpu_without_a_device_is_refused_before_anything_is_touched(
    node: Node, place: Path, devices: tuple[Path, ...], undisturbed: Undisturbed
) -> None:
    given = containers.bound(devices[0], "rw")
    with containers.run_by_runc("single", place, more=[given]) as target:
        target.wait_for_steps(3)
        assert process_gpus.unseen_gpus(target.pid) == {1}
        assert process_gpus.unseen_gpus(os.getpid()) == frozenset()
        with pytest.raises(Unsupported, match="not given GPU 1") as refused:
            migrate(node, target.pid, MigrateOptions("1"), Progress())
        assert refused.value.reason == Reason.MISSING_DEVICE
        suspend(node, target.pid, SuspendOptions(), Progress())
        with pytest.raises(Unsupported, match="not given GPU 1"):
            resume(node, target.pid, ResumeOptions(gpu="1"), Progress())
        resume(node, target.pid, ResumeOptions(), Progress())
        target.more_steps(2)
    computed_right(target, undisturbed)
