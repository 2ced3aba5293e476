"""phosd's OCI image: podman runs it as docs/operate/image.md says, and it saves, parks and restores
programs of the host.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd import __version__
from tests.node.checkpoint_restore.conftest import undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed, computed_right
from tests.packaging.built import only_when_built, the_only
from tests.support import containers
from tests.support.harness import wait_until
from tests.support.host import FEWEST, RIGHTS, Host, host

__all__ = ["undisturbed"]

pytestmark = [
    only_when_built,
    pytest.mark.skipif(
        not containers.installed("podman", "runc"), reason="`make setup-containers` installs them"
    ),
]
STRANGER = 65534


@pytest.fixture(scope="module")
def node() -> Iterator[Host]:
    """A host that has the image, and nothing of phosd."""
    place = Path(tempfile.mkdtemp(prefix="phos-"))
    with host(place) as made:
        made.load(the_only("phosd_*.oci.tar", "image"))
        yield made
    shutil.rmtree(place)


@pytest.mark.parametrize("uid", [0, STRANGER])
def test_a_program_of_the_host_is_saved_parked_and_restored(
    node: Host, uid: int, undisturbed: Undisturbed
) -> None:
    node.start_phosd()
    target = node.start("single", uid)
    pid = str(target.inside)
    target.wait_for_steps(3)
    (found,) = (each for each in node.phos("ps", uid=uid) if each["pid"] == target.inside)
    assert (found["hook"], found["container"]) == ("hooked", None), found
    node.phos("checkpoint", pid, uid=uid)
    target.more_steps(2)
    node.phos("suspend", pid, uid=uid)
    # What is parked outlives the container: killed, as by a runtime that has lost its patience.
    assert node.podman("kill", "phosd").returncode == 0
    node.start_phosd()
    node.phos("resume", pid, uid=uid)
    target.more_steps(2)
    image = str(node.phos("checkpoint", pid, "--end", uid=uid)[-1]["result"])
    wait_until(lambda: not target.pid, "the program to end")
    position = target.position()
    node.phos("restore", image, uid=uid)
    target.wait_for_steps(3, since=position)
    # It is no part of the container, which stops at once.
    assert node.podman("stop", "phosd").returncode == 0
    computed_right(target, undisturbed)
    target.kill()


def test_with_the_fewest_rights_a_program_is_parked_and_not_saved(
    node: Host, undisturbed: Undisturbed
) -> None:
    node.start_phosd(FEWEST)
    target = node.start("single", STRANGER)
    pid = str(target.inside)
    target.wait_for_steps(3)
    for where in ("memory", "disk"):
        node.phos("suspend", pid, "--where", where, uid=STRANGER)
        node.phos("resume", pid, uid=STRANGER)
        target.more_steps(2)
    refused = node.run("/usr/lib/phos/bin/phos", "checkpoint", pid, uid=STRANGER)
    assert refused.returncode != 0
    assert "in its bounding set that phosd was started without" in refused.stdout
    target.more_steps(2)
    computed_right(target, undisturbed)
    target.kill()


@pytest.mark.parametrize(
    ("rights", "missing"),
    [
        (("--security-opt=seccomp=unconfined", "--cap-add=ALL"), "--pid=host"),
        (("--pid=host", "--cap-add=ALL"), "seccomp=unconfined"),
        (("--pid=host", "--security-opt=seccomp=unconfined"), "CAP_SYS_PTRACE"),
        ((*RIGHTS, "--cap-drop=SYS_CHROOT"), "CAP_SYS_CHROOT"),
        ((*RIGHTS, "--uidmap=0:100000:65536"), "user namespace"),
    ],
)
def test_what_the_container_lacks_is_named(
    node: Host, rights: tuple[str, ...], missing: str
) -> None:
    done = node.run_image(*rights)
    assert done.returncode == 1
    assert "phosd does not start from its image: " in done.stdout
    assert missing in done.stdout


def test_what_is_on_the_host_is_that_of_the_image(node: Host) -> None:
    home = node.place / "usr/lib/phos"
    node.start_phosd()
    mark = (home / "image").read_text()
    assert mark.startswith(f"{__version__} ")
    (kept,) = (home / "kept").iterdir()
    mounted = node.run("findmnt", "--noheadings", "--output=OPTIONS", "/run/phos/hook").stdout
    assert {"nosuid", "nodev", "noexec", "mode=755", "size=4096k"} <= {*mounted.strip().split(",")}
    second = node.run_image(*RIGHTS)
    assert (second.returncode, "runs on this host already" in second.stdout) == (1, True)
    assert node.podman("stop", "phosd").returncode == 0
    # As another image, and an installation that was interrupted, leave it.
    (home / "kept/other").mkdir()
    (home / "image").write_text("unfinished\n")
    (home / "python/phosd/__init__.py").write_text('__version__ = "0.0.9"\n')
    node.start_phosd()
    assert (home / "image").read_text() == mark
    assert {each.name for each in (home / "kept").iterdir()} == {kept.name, "other"}
    assert node.run("/usr/lib/phos/bin/phosd", "--version").stdout == f"phosd {__version__}\n"
    assert not [each for each in home.iterdir() if each.name.startswith(".")]
    assert node.podman("stop", "phosd").returncode == 0
    # A phosd that is not from an image is left alone.
    (home / "image").unlink()
    refused = node.run_image(*RIGHTS)
    assert (refused.returncode, "has a phosd of its own" in refused.stdout) == (1, True)
    assert not (home / "image").exists()
    (home / "image").write_text(mark)
