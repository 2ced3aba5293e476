"""What the screens look like: small and large, light and dark, in order and in trouble."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from phosd.client.errors import CommandError
from phosd.client.records import Gpu, Phase
from phosd.tui.node import Contact, Node, Sample, Update
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node, gpu, image, job, process
from tests.support.tui.opened import LARGE, SMALL, opened, run
from tests.support.tui.snapshots import compare, compare_all

LIST_FEATURES = ("process-log", "process-blocks", "process-kernels")
PHASES = (
    Phase("prepare", False, 0.41, 0, 0),
    Phase("quiesce", True, 0.02, 0, 0),
    Phase("digest", True, 0.013, 40 << 30, 40 << 30),
    Phase("park", True, 0.006, 0, 0),
    Phase("control", True, 0.62, 0, 0),
    Phase("cpu", True, 0.14, 0, 0),
    Phase("unpark", True, 0.05, 0, 0),
    Phase("drain", False, 2.3, 40 << 30, 40 << 30),
    Phase("persist", False, 1.2, 41 << 30, 41 << 30),
    Phase("publish", False, 0.03, 0, 0),
)


def busy_node() -> tuple[Node, FakeLink]:
    """Two GPUs, processes of every kind, jobs in every state."""
    first = image(pid=4711, created=NOW - 754, name="llama-ft", number=3)
    done = job(2, target="4711", state="done", phase="publish", progress=None, phases=PHASES,
               mode="concurrent", why="enough device memory is free", result=first.id,
               started=NOW - 900, ended=NOW - 895.2, expected_end=None, cancelable=False,
               drained_bytes=40 << 30, drain_rate=17.4 * (1 << 30),
               details=(("shadowed_chunks", 211.0),), notes=("TCP is closed",))  # fmt: skip
    node, link = fake_node(
        gpu(0),
        gpu(1, utilisation=0.03, memory_used=3 << 30, temperature=88.0, power=96.0),
        process(4711, last_image=first.id, every=600.0, keep=5, name="llama-ft"),
        process(4712, user_name="alice", gpus=(), hook="driver", state="locked", command=("vllm",),
                reason="started without `phos run`", device_bytes=3 << 30),
        process(815, user_name="bob", hook="unsupported", reason="it uses managed memory",
                command=("[red]x[/]", "\x1b[31m", "模型训练", "\u202e")),
        process(4713, command=()),
        first,
        job(1, target="4711"),
        done,
        job(3, target="4712", state="failed", error="OutOfSpace", phase="prepare", progress=None,
            message="the disk has 1 GiB free and 3 GiB are needed; remove images",
            started=NOW - 4000, ended=NOW - 3999, cancelable=False),
        job(4, target="815", state="queued", position=1, phase="", progress=None),
        job(5, target="4713", state="cancelled", phase="drain", cancelable=False),
        job(6, target="9", operation="restore", phase="load", stopped=True, progress=0.1),
        features=(*FEATURES, *LIST_FEATURES),
    )  # fmt: skip
    for path in node.of(Gpu):
        samples = node.samples.setdefault(path, deque(maxlen=150))
        samples.extend(
            Sample(NOW - 60 + 2 * n, n / 30, n << 32, 40.0 + n, n * 20.0) for n in range(30)
        )
    link.answers["ListBlocks"] = [
        [1, 0x7F0000000000, 2 << 30, 0, []],
        [2, 0x7F2000000000, 38 << 30, -1, ["exported", "host"]],
    ]
    link.answers["ListKernels"] = [["scatter[x]", "00ff", 12, True], ["sgemm", "00fe", 99, False]]
    link.answers["ReadLog"] = "launches 111\nparked 1\nhook: gate closed\n"
    return node, link


SCREENS: dict[str, list[str]] = {
    "processes": [],
    "jobs": ["2"],
    "job-running": ["2", "end", "enter"],
    "job-done": ["2", "end", "up", "enter"],
    "process": ["end", "enter"],
    "process-blocks": ["end", "enter", "right", "right"],
    "ring": ["end", "L"],
    "form": ["end", "C"],
    "help": ["question_mark"],
}


@pytest.mark.parametrize("screen", SCREENS)
def test_screen(screen: str) -> None:
    node, _ = busy_node()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press(*SCREENS[screen])
            await compare_all(pilot, screen)

    run(body)


def gone(node: Node, link: FakeLink) -> None:
    trouble = "phosd does not run on this bus; start it (`systemctl start phosd`)"
    node.apply(Update(contact=Contact.GONE, trouble=trouble))


def never_there(node: Node, link: FakeLink) -> None:
    node.apply(Update(whole=True))
    node.heard = 0.0
    gone(node, link)


def slow(node: Node, link: FakeLink) -> None:
    node.apply(Update(contact=Contact.SEEKING))
    node.since = NOW - 10


def troubled(node: Node, link: FakeLink) -> None:
    trouble = "the history cannot be written (no space left); free some"
    manager = replace(node.manager, troubles=(trouble,))
    node.apply(Update({manager.path: manager}))


def no_nvml(node: Node, link: FakeLink) -> None:
    node.apply(Update({g.path: g for g in [gpu(utilisation=None, temperature=None, power=None)]}))


def refused(node: Node, link: FakeLink) -> None:
    link.answers["Checkpoint"] = CommandError(
        "NotAuthorized", "process 4711 belongs to uid 7; ask as its owner or as root"
    )


def old_service(node: Node, link: FakeLink) -> None:
    manager = replace(node.manager, version="0.0.9", features=frozenset())
    node.apply(Update({manager.path: manager}))


TROUBLES: dict[str, tuple[Callable[[Node, FakeLink], None], list[str]]] = {
    "gone": (gone, []),
    "never-there": (never_there, []),
    "slow": (slow, []),
    "troubled": (troubled, []),
    "no-nvml": (no_nvml, []),
    "not-authorized": (refused, ["end", "c"]),
    "old-service": (old_service, ["end", "c"]),
}


@pytest.mark.parametrize("size", [(60, 20), SMALL], ids=["60x20", "80x24"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble(trouble: str, size: tuple[int, int]) -> None:
    node, link = busy_node()
    happen, keys = TROUBLES[trouble]

    async def body() -> None:
        async with opened(node, size) as pilot:
            happen(node, link)
            await pilot.press(*keys)
            await compare(pilot, f"trouble-{trouble}-{size[0]}x{size[1]}")

    run(body)


def test_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a colour says is said by a sign or a word, too."""
    monkeypatch.setenv("NO_COLOR", "1")
    node, _ = busy_node()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await compare(pilot, "no-colour-160x48")

    run(body)
