"""What a container has in the place of the folder of its hooks, and how containers are named."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.hook_client.places import IN_CONTAINERS
from phosd.engine.system import cgroups, containers, procfs
from phosd.engine.system.containers import Container
from tests.support import harness
from tests.support.hanging_folder import hanging_folder
from tests.support.harness import wait_until

ID = "45d7da729f50835b1150611d96591d14da1d10d6ad6fb7b177c22175adb032f9"
POD = "3f1e6d0c-0000-4000-8000-9a2b3c4d5e6f"
RUN = "mount -t tmpfs run /run && mkdir -p /run/phos/hook /run/other/hook"
MEMORY = f"mount -t tmpfs -o mode=1733 hook {IN_CONTAINERS}"


@contextmanager
def _in_mounts(script: str) -> Iterator[int]:
    """A process that has a mount namespace of its own, and made mounts there."""
    words = ["unshare", "--mount", "sh", "-ec", f"{script}; echo made; exec cat"]
    with harness.running(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "made\n"
        yield process.pid
        process.stdin.close()


@pytest.mark.parametrize(
    ("script", "opened"),
    [
        (f"{RUN} && {MEMORY}", True),
        (RUN, False),
        (f"{RUN} && {MEMORY} && mount --bind /etc {IN_CONTAINERS}", False),
        (f"{RUN} && {MEMORY} && mkdir {IN_CONTAINERS}/a && mount --bind {IN_CONTAINERS}/a "
         f"{IN_CONTAINERS}", False),
        (f"{RUN} && rmdir {IN_CONTAINERS} && ln -s /etc {IN_CONTAINERS}", False),
        # Hidden by what is mounted above it, where a link leads to the machine's own files.
        (f"{RUN} && {MEMORY} && mount -t tmpfs more /run/phos && ln -s /etc {IN_CONTAINERS}",
         False),
        (f"{RUN} && {MEMORY} && mount -t tmpfs more /run/phos && mkdir {IN_CONTAINERS}", False),
    ],
)  # fmt: skip
def test_only_memory_of_its_own_is_opened(script: str, opened: bool) -> None:
    with _in_mounts(script) as pid, containers.own_memory(pid, IN_CONTAINERS) as folder:
        assert (folder is not None) == opened
        if folder is not None:
            assert Path(f"/proc/{pid}/root{IN_CONTAINERS}").stat() == os.fstat(folder)
    with containers.own_memory(os.getpid(), IN_CONTAINERS) as folder:
        assert folder is None


def test_no_server_of_a_file_system_holds_up_who_looks(tmp_path: Path) -> None:
    """A container may have FUSE above the folder of its hooks: the look is left behind."""
    served = tmp_path / "served"
    served.mkdir()

    def look(pid: int) -> tuple[int | None, float]:
        began = time.monotonic()
        with containers.own_memory(pid, IN_CONTAINERS) as folder:
            return folder, time.monotonic() - began

    script = f"mount --bind {served} /run && mkdir -p {IN_CONTAINERS} && {MEMORY}"
    with hanging_folder(served) as server, _in_mounts(script) as pid, ThreadPoolExecutor() as pool:
        server.hang()
        try:
            first, slow = pool.submit(look, pid).result(60)
            again, fast = pool.submit(look, pid).result(60)
            assert first is again is None
            assert fast < slow, "the container was asked again before it had answered"
        finally:
            server.answer()

        def found() -> bool:
            with containers.own_memory(pid, IN_CONTAINERS) as folder:
                return folder is not None

        wait_until(found, "the container to be looked at again")


@pytest.mark.parametrize(
    ("cgroup", "named"),
    [
        (f"/machine.slice/libpod-{ID}.scope/container", ("podman", "")),
        (f"/libpod_parent/libpod-{ID}", ("podman", "")),
        (f"/system.slice/docker-{ID}.scope", ("docker", "")),
        (f"/docker/{ID}", ("docker", "")),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"
            f"{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
            ("containerd", POD),
        ),
        (f"/kubepods/burstable/pod{POD}/{ID}", ("kubernetes", POD)),
        (f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope",
         ("cri-o", POD)),
        ("/user.slice/user-1000.slice/session-2.scope", None),
        ("/machine.slice/libpod-conmon.scope", None),
    ],
)  # fmt: skip
def test_a_container_is_named_by_its_cgroup(
    cgroup: str, named: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "is_apart", lambda pid: pid == os.getpid())
    monkeypatch.setattr(cgroups, "memberships", lambda _pid: {"": "/", "pids": cgroup})
    found = containers.container_of(os.getpid())
    assert (found and (found.runtime, found.pod)) == named
    assert found is None or found.id == ID


@pytest.mark.parametrize(
    ("annotations", "name", "pod"),
    [
        (
            {
                "io.kubernetes.cri.container-name": "main",
                "io.kubernetes.cri.sandbox-name": "trainer-0",
                "io.kubernetes.cri.sandbox-namespace": "research",
            },
            "main",
            "research/trainer-0",
        ),
        ({"io.kubernetes.cri.container-name": ["main"]}, "", POD),
        (["no object"], "", POD),
        (None, "", POD),
    ],
)
def test_a_pod_is_named_by_its_runtime(
    annotations: object, name: str, pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "CONTAINERD", str(tmp_path / "{id}"))
    if annotations is not None:
        (tmp_path / ID).mkdir()
        (tmp_path / ID / "config.json").write_text(json.dumps({"annotations": annotations}))
    found = containers.named(Container("containerd", ID, pod=POD), os.getpid())
    assert (found.name, found.pod) == (name, pod)


def test_a_process_above_us_is_in_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user namespace above ours keeps root from looking, as at the first process of a machine
    where phosd is in a container. A list of all processes does not fail for that.
    """

    def refused(pid: int, kind: str) -> str:
        raise PermissionError(kind, pid)

    monkeypatch.setattr(procfs, "namespace", refused)
    assert containers.container_of(1) is None
