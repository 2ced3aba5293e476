"""A container of podman's gets the hook by the device that `phos setup-container-runtime` makes."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.cli.commands import setup_container_runtime as setup
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.system.native import hook_library
from tests.node.checkpoint_restore.cycle import Undisturbed, computed_right
from tests.node.containers.conftest import seen
from tests.support import containers

pytestmark = pytest.mark.skipif(
    not containers.installed("podman"), reason="`make setup-containers` installs podman"
)
FOLDER = Path("/run/cdi")
"""Where runtimes look for devices, besides ``/etc/cdi``, which is the machine's."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device as the command describes it, by a name of its own. The hook has another place in the
    container: /usr is the machine's, where nothing can be mounted.
    """
    monkeypatch.setattr(setup, "_HOOK", "/opt/phos/libphos_hook.so")
    made = setup.description(hook_library())
    made["kind"] = f"phos.io/test-{secrets.token_hex(4)}"
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{made['kind'].replace('/', '-')}.json"
    file.write_text(json.dumps(made))
    yield f"{made['kind']}=all"
    file.unlink()


def test_named_suspended_resumed_and_right(
    device: str, node: Node, place: Path, undisturbed: Undisturbed
) -> None:
    with containers.run_by_podman("single", place, device) as target:
        target.wait_for_steps(3)
        found = seen(node, target.pid)
        assert found.container is not None
        assert (found.container.runtime, found.container.pod) == ("podman", "")
        assert found.container.name.startswith("phos-test-")
        suspend(node, target.pid, SuspendOptions(), Progress())
        position = target.position()
        resume(node, target.pid, ResumeOptions(), Progress())
        target.wait_for_steps(2, since=position)
    computed_right(target, undisturbed)
