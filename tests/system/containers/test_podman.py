"""A GPU program in a podman container is saved and restored by podman's own commands."""

from pathlib import Path

import pytest

from phosd.engine.system.native import runtime_plugins
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.containers.conftest import place, undisturbed
from tests.node.containers.test_podman import device
from tests.support import containers
from tests.support.harness import alive, wait_until
from tests.support.service import bus
from tests.system.containers.test_runc import right
from tests.system.service.test_end_to_end import phosd

__all__ = ["bus", "device", "place", "undisturbed"]

pytestmark = pytest.mark.skipif(
    not containers.installed("podman"), reason="`make setup-containers` installs podman"
)


def test_saved_while_it_runs_on_then_ended_and_restored(
    bus: str, place: Path, device: str, undisturbed: Undisturbed
) -> None:
    criu = f"libdir {runtime_plugins()}\n"
    with phosd(bus, place), containers.run_by_podman("single", place, device, criu) as target:
        assert target.podman is not None
        target.wait_for_steps(3)
        for _ in range(containers.ROUNDS):
            target.podman.container("checkpoint", "--leave-running", f"--export={place / 'a.tar'}")
            target.more_steps(2)
            target.podman.container("checkpoint")
            wait_until(lambda: not alive(target.first), "the container to end")
            position = target.position()
            target.podman.container("restore")
            target.first = target.podman.pid
            target.wait_for_steps(2, since=position)
            right(target, undisturbed)
