"""What a container, or a user with namespaces of theirs, has at the names of hooks' files."""

import json
import os
import pwd
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.listeners import Listeners
from phosd.engine.hook_client.places import IN_CONTAINERS, hook_socket
from phosd.engine.system import containers, procfs
from phosd.errors import NotAuthorized, Timeout
from tests.support import harness
from tests.support.hanging_folder import hanging_folder
from tests.support.hostile import delegated

MALLORY, ANN = pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("daemon").pw_uid
RUN = f"mount -t tmpfs run /run && mkdir -p {IN_CONTAINERS}"
MEMORY = f"mount -t tmpfs -o mode=1733 hook {IN_CONTAINERS} && mkdir -m 700 {IN_CONTAINERS}/0"
SOCKET = f"{IN_CONTAINERS}/0/$$.sock"
"""That name for the shell, and for what it executes."""
_AS_MALLORY = ("setpriv", f"--reuid={MALLORY}", f"--regid={MALLORY}", "--clear-groups")


@contextmanager
def inside(script: str, *before: str) -> Iterator[int]:
    """A process that has a mount namespace of its own, and did this there."""
    words = [*before, "--mount", "sh", "-ec", f"{script}; echo made; exec cat"]
    with harness.running(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "made\n"
        yield process.pid
        process.stdin.close()


def test_what_is_mounted_on_a_sockets_name_is_not_asked(tmp_path: Path) -> None:
    """A user namespace may have FUSE below an overlay there, which asks its server whoever looks:
    who waits for that cannot even be killed.
    """
    (served := tmp_path / "served").mkdir()
    mount = f"touch {SOCKET} && mount --bind {served}/file {SOCKET}"
    runtime = tmp_path / "run"
    with hanging_folder(served) as server, ThreadPoolExecutor() as pool:
        (served / "file").touch()
        with inside(f"{RUN} && {MEMORY} && {mount}", "unshare") as pid:
            server.hang()
            try:
                assert pid in pool.submit(Listeners(runtime).pids).result(20)
                for ask in (HookLink(pid, runtime).connect, HookLink(pid, runtime).reattach):
                    with pytest.raises((NotAuthorized, Timeout)):
                        pool.submit(ask).result(50)
            finally:
                server.answer()


def test_a_link_in_the_place_of_a_socket_leads_nowhere(tmp_path: Path) -> None:
    """It is put there when phosd has looked. A listener elsewhere, for root alone, or one that
    a connection starts, hears nothing.
    """
    path = tmp_path / "listener"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(0)
        with (
            inside(f"{RUN} && {MEMORY} && ln -s {path} {SOCKET}", "unshare") as pid,
            hook_socket(tmp_path / "run", pid) as place,
        ):
            with pytest.raises(FileNotFoundError):
                place.connect(connection, procfs.status(pid).uids[1])
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.fixture
def open_memory(place: Path) -> Iterator[Path]:
    """A file system in memory in which everybody has files, as /dev/shm is."""
    place.chmod(0o755)
    (folder := place / "shm").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "shm", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("suffix", ["wake", "sock"])
def test_others_files_are_not_put_aside(suffix: str, open_memory: Path, tmp_path: Path) -> None:
    """A user mounts a folder of everybody's where hooks listen in a namespace of theirs."""
    here = f"{RUN} && mount --bind {open_memory} {IN_CONTAINERS}"
    with inside(here, *_AS_MALLORY, "unshare", "--user", "--map-root-user") as pid:
        (anns := open_memory / f"{pid}.{suffix}").write_text("hers")
        os.chown(anns, ANN, ANN)
        with pytest.raises(Timeout, match="did not come back"):
            HookLink(pid, tmp_path / "run").reattach(0.5)
        assert anns.read_text() == "hers"
        assert {path.name for path in open_memory.iterdir()} <= {anns.name, "0"}


BOBS = {
    "io.kubernetes.cri.container-name": "main",
    "io.kubernetes.cri.sandbox-name": "secret",
    "io.kubernetes.cri.sandbox-namespace": "bobs",
}
_OF_A_USER = (*_AS_MALLORY, "unshare", "--user", "--map-root-user")


@pytest.mark.parametrize("form", ["cri-containerd-{}.scope", "libpod-{}.scope", "docker-{}.scope"])
def test_a_users_cgroup_with_the_name_of_anothers_container(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user is not told what the other one is, and does not pass for it."""
    bobs = "b" * 64
    (folder := tmp_path / bobs).mkdir()
    (folder / "config.json").write_text(json.dumps({"annotations": BOBS}))
    (folder / "config.v2.json").write_text(json.dumps({"Name": "/main"}))
    monkeypatch.setattr(containers, "CONTAINERD", str(tmp_path / "{id}"))
    monkeypatch.setattr(containers, "DOCKER", tmp_path)
    with inside("true", *_OF_A_USER) as pid, delegated(pid, MALLORY, form.format(bobs)):
        found = containers.container_of(pid)
    assert found is not None and found.id == bobs
    assert (found.name, found.pod) == ("", "")


_MONITOR = """
import os, sys
if child := os.fork():
    sys.stdin.read()
os.execvp("unshare", ["unshare", "--mount", "sh", "-c", "echo $$; exec cat"])
"""


def test_what_a_users_monitor_says_of_its_container(tmp_path: Path) -> None:
    """Whoever starts a container may be called as podman's, and have any file as its settings."""
    tmp_path.chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"annotations": BOBS}))
    words = [*_OF_A_USER, "bash", "-c", 'exec -a conmon "$0" "$@"', "/usr/bin/python3", "-S", "-c"]
    words += [_MONITOR, "-b", str(tmp_path)]
    with harness.running(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as monitor:
        assert monitor.stdout is not None and monitor.stdin is not None
        pid = int(monitor.stdout.readline())
        with delegated(pid, MALLORY, f"libpod-{'a' * 64}.scope"):
            assert containers._monitor(pid)[0][0] == "conmon"
            found = containers.container_of(pid)
        monitor.stdin.close()
    assert found == containers.Container("podman", "a" * 64)
