"""Containers of each runtime with a program, in which the container's root runs what it likes."""

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import cgroups
from tests.support import containers, cri
from tests.support.containers import Contained
from tests.support.cri import Container
from tests.support.harness import wait_until

GIVEN = "/opt/given"
"""Where a container sees the folder of the machine that it was given."""


@dataclass(frozen=True)
class Hostile:
    """A container whose program computes. ``enter`` begins the command by which its root runs
    another there; it is this ``user`` of the machine.
    """

    target: Contained
    enter: Sequence[str]
    user: int = 0

    def runs(self, code: str, *words: str) -> list[str]:
        """The command by which the container's root runs this Python there."""
        return [*self.enter, sys.executable, "-S", "-c", code, *words]


def by_runc(place: Path, device: str, given: Path | None) -> Iterator[Hostile]:
    more = [containers.bound(given, "rw") | {"destination": GIVEN}] if given else []
    with containers.run_by_runc("single", place, more=more) as target:
        assert target.runc is not None
        yield Hostile(target, [*target.runc.words, "exec", target.runc.name])


def by_podman(place: Path, device: str, given: Path | None, user: int = 0) -> Iterator[Hostile]:
    more = [f"--volume={given}:{GIVEN}"] if given else []
    with containers.run_by_podman("single", place, device, user=user, more=more) as target:
        assert target.podman is not None
        yield Hostile(target, [*target.podman.words, "exec", target.podman.name], user)


def by_users_podman(user: int) -> "Made":
    """A user's podman, in a folder and a cgroup of theirs: podman makes none where the cgroups are
    of version 1.
    """

    def made(place: Path, device: str, given: Path | None) -> Iterator[Hostile]:
        place.chmod(0o755)
        (own := place / "own").mkdir()
        with contextmanager(by_podman)(own, device, given, user) as hostile:
            name = f"libpod-{secrets.token_hex(32)}.scope"
            with delegated(hostile.target.pid, user, name):
                yield hostile

    return made


def by_cri(place: Path, device: str, given: Path | None) -> Iterator[Hostile]:
    with cri.containerd(place, "") as runtime, runtime.pod("hostile") as pod:
        settings = cri.with_volumes(cri.settings("single", place), runtime)
        if given:
            settings["mounts"].append({"container_path": GIVEN, "host_path": str(given)})
        container = pod.container(f"{runtime.registry.host}/folders:test", **settings)
        name = f"--exec-id={secrets.token_hex(4)}"
        enter = [*runtime.ctr, "tasks", "exec", name, container.id]
        yield Hostile(contained(container, place), enter)


Made = Callable[[Path, str, Path | None], Iterator[Hostile]]
Making = Callable[..., AbstractContextManager[Hostile]]


def making(by: Made, place: Path, device: str) -> Making:
    """A function that runs such a container, which is perhaps given a folder of the machine."""

    @contextmanager
    def made(given: Path | None = None) -> Iterator[Hostile]:
        with contextmanager(by)(place, device, given) as hostile:
            hostile.target.wait_for_steps(3)
            yield hostile

    return made


def contained(container: Container, place: Path) -> Contained:
    """The target program that runs in a container of a pod."""
    pid = container.pid
    log = Path(f"/proc/{pid}/root{cri.LOG}")
    wait_until(log.exists, "the log in the container")
    errors = containers.shared(place) / "errors"
    return Contained("single", log, errors, None, first=pid)  # type: ignore[arg-type]


@contextmanager
def delegated(pid: int, user: int, name: str) -> Iterator[None]:
    """Keep a process in a cgroup of that name, which its user has made in one of theirs."""
    known = cgroups.memberships(pid)
    hierarchy = "freezer" if "freezer" in known else cgroups.UNIFIED
    before = cgroups.folder(hierarchy, known[hierarchy])
    theirs = cgroups.folder(hierarchy, f"/phos-test-{secrets.token_hex(4)}")
    assert before is not None and theirs is not None
    made = (theirs, theirs / name)
    for folder in made:
        folder.mkdir()
        containers.give(user, folder, *folder.iterdir())
    (made[-1] / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        cgroups.thaw(made[-1])

        def gone() -> bool:
            for each in (made[-1] / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (before / "cgroup.procs").write_text(each)
            with contextlib.suppress(OSError):
                made[-1].rmdir()
            return not made[-1].exists()

        wait_until(gone, "an empty cgroup")
        theirs.rmdir()
