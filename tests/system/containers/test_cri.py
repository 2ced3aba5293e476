"""A GPU program in a pod is saved and restored by containerd's CRI, as the kubelet asks for it."""

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.system import containers as names
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.containers.conftest import place, undisturbed
from tests.node.containers.test_podman import device
from tests.support import containers, cri
from tests.support.harness import wait_until
from tests.support.hostile import contained
from tests.support.rotation import EVERYTHING
from tests.support.service import bus
from tests.system.containers.test_runc import LIBDIR, right
from tests.system.service.test_end_to_end import phos, phosd

__all__ = ["bus", "device", "place", "undisturbed"]

pytestmark = pytest.mark.skipif(
    not (cri.PREFIX / "bin/containerd").exists(),
    reason="`make setup-containers` fetches containerd 2.1",
)
IS_CHECKPOINT = {"org.criu.checkpoint.container.name": "main"}
"""The annotation by which containerd knows the image of a checkpoint."""


@pytest.mark.parametrize("by", ["volumes"] * containers.ROUNDS + ["device"] * EVERYTHING)
def test_saved_and_restored_in_another_pod(
    by: str,
    bus: str,
    place: Path,
    device: str,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with phosd(bus, place), cri.containerd(place, LIBDIR) as runtime:

        def given() -> dict[str, Any]:
            needed = cri.settings("single", place)
            if by == "device":
                return needed | {"CDI_devices": [{"name": device}]}
            return cri.with_volumes(needed, runtime)

        with runtime.pod("trainer-0") as pod:
            container = pod.container(f"{runtime.registry.host}/folders:test", **given())
            target = contained(container, place)
            monkeypatch.setattr(names, "CONTAINERD", str(runtime.tasks / "{id}"))
            named = names.container_of(target.pid)
            assert named == names.Container("kubernetes", container.id, "main", "team/trainer-0")
            target.wait_for_steps(3)
            for _ in range(2):
                (archive := place / "archive.tar").unlink(missing_ok=True)
                container.checkpoint(archive)
                target.more_steps(2)
            right(target, undisturbed)
        image = runtime.pull("saved", archive.read_bytes(), IS_CHECKPOINT)
        with runtime.pod("trainer-1") as pod:
            container = pod.container(image, **given())
            restored = contained(container, place)
            restored.more_steps(2)
            right(restored, undisturbed)
            (found,) = in_pods(bus, place)
            assert found["pid"] == restored.pid
            assert (found["state"], found["hook"]) == ("running", "hooked")


def in_pods(bus: str, place: Path) -> list[dict[str, object]]:
    """What of containers uses a GPU; an earlier test may have left something else."""
    return [row for row in phos(bus, place, "ps") if row["container"] is not None]


def changed(archive: Path, kind: str, elsewhere: Path) -> bytes:
    """The archive of a checkpoint, as a pod's user may have made it: other memory, or a link to a
    file of the machine that has what was there.
    """
    made = io.BytesIO()
    with tarfile.open(archive) as saved, tarfile.open(fileobj=made, mode="w") as tar:
        for member in saved:
            file = saved.extractfile(member) if member.isfile() else None
            data = file.read() if file is not None else b""
            if re.search(r"phos-[^/]*\.pack$", member.name):
                if kind == "memory":
                    data = data[:-1] + bytes([data[-1] ^ 1])
                else:
                    elsewhere.write_bytes(data)
                    member.type, member.linkname, member.size = tarfile.SYMTYPE, str(elsewhere), 0
            tar.addfile(member, io.BytesIO(data) if member.isfile() else None)
    return made.getvalue()


def test_an_image_that_its_pods_user_has_changed(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """Nothing of it runs, and the one that was saved is restored afterwards."""
    import grpc

    with phosd(bus, place), cri.containerd(place, LIBDIR) as runtime:
        given = cri.with_volumes(cri.settings("single", place), runtime)
        archive = place / "archive.tar"
        with runtime.pod("trainer-0") as pod:
            container = pod.container(f"{runtime.registry.host}/folders:test", **given)
            contained(container, place).wait_for_steps(3)
            container.checkpoint(archive)
        for kind, refusal in {"memory": "criu failed", "link": "refusing to restore"}.items():
            data = changed(archive, kind, place / "elsewhere")
            image = runtime.pull(kind, data, IS_CHECKPOINT)
            with (
                runtime.pod(kind) as pod,
                pytest.raises(grpc.RpcError, match=refusal),
            ):
                pod.container(image, **given)
            assert not in_pods(bus, place)
        image = runtime.pull("saved", archive.read_bytes(), IS_CHECKPOINT)
        with runtime.pod("trainer-1") as pod:
            restored = contained(pod.container(image, **given), place)
            restored.more_steps(2)
            right(restored, undisturbed)


def states(bus: str, place: Path) -> set[str]:
    """The states of all programs, and of jobs that have not ended."""
    ended = {"done", "failed", "cancelled"}
    return {str(row["state"]) for row in phos(bus, place, "ps")} | {
        f"job {row['state']}" for row in phos(bus, place, "jobs") if row["state"] not in ended
    }


def test_a_call_that_fails_leaves_the_program_running(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """There is no phosd, or the call's time is over when phosd has begun. containerd 2.1 may leave
    the container paused then.
    """
    import grpc

    with cri.containerd(place, LIBDIR) as runtime, runtime.pod("trainer-0") as pod:
        needed = cri.with_volumes(cri.settings("single", place), runtime)
        container = pod.container(f"{runtime.registry.host}/folders:test", **needed)
        target = contained(container, place)
        target.wait_for_steps(3)
        archive = place / "archive.tar"
        with pytest.raises(grpc.RpcError, match="criu failed"):
            container.checkpoint(archive)
        log = runtime.tasks / container.id / "criu-dump.log"
        assert "phosd does not answer" in log.read_text()
        target.more_steps(2)

        with phosd(bus, place):
            call = container.begin_checkpoint(archive)
            wait_until(lambda: phos(bus, place, "jobs"), "phosd's part", every=0)
            call.cancel()
            steps = len(target.values())

            def runs_on() -> bool:
                container.resume()
                return len(target.values()) > steps + 2

            wait_until(runs_on, "steps after the call", every=0.5)
            # What the call has begun may only now be undone.
            wait_until(lambda: states(bus, place) == {"running"}, "the program to be left alone")
            archive.unlink(missing_ok=True)
            container.checkpoint(archive)
            target.more_steps(2)
            right(target, undisturbed)
