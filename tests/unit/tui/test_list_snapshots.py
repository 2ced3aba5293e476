"""What images, history, GPUs and log look like: small and large, light and dark, and in trouble."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from phosd.client.errors import CommandError
from phosd.tui.node import Contact, Node, Sample, Update
from phosd.tui.widgets.table import RecordTable
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node, gpu, image, job, process
from tests.support.tui.opened import opened, run, until
from tests.support.tui.snapshots import compare, compare_all, text
from tests.unit.tui.test_events import row as noted
from tests.unit.tui.test_history import RESTORE
from tests.unit.tui.test_past import ROW

OFFERED = (*FEATURES, "image-blocks", "history-filters", "events", "gpu-samples")
OLD, NEW, ODD = "20270115T070000-aaaa", "20270115T080000-bbbb", "20270115T080000-cccc"


def full_node() -> tuple[Node, FakeLink]:
    """Images of every kind, a history of a day, two GPUs that did something, a log."""
    node, link = fake_node(
        gpu(0),
        gpu(1, memory_used=3 << 30, temperature=88.0),
        process(4711, last_image=NEW, name="llama-ft"),
        process(4712, user_name="alice", command=("[red]x[/]", "\x1b[31m", "模型训练")),
        image(OLD, created=NOW - 3900, whole=True, verified=NOW - 60, owner_name="root",
              name="llama-ft", number=1),
        image(NEW, parent=OLD, shared_bytes=30 << 30, why="it is hooked", owner_name="root",
              name="llama-ft", number=2),
        image(ODD, pid=815, owner_name="bob", whole=False, verified=NOW - 9, parent="gone",
              command=("[red]x[/]", "\x1b[31m", "模型训练")),
        job(1, operation="verify", target=NEW),
        features=OFFERED,
    )  # fmt: skip
    link.answers["ListBlocks"] = [
        [4711, 9, 0x7F0000200000, 2 << 20, 0, 2, 2 << 20, 1 << 20],
        [4711, 3, 0x7F0000000000, 2 << 20, -1, 0, 0, 0],
    ]
    link.answers["ListHistory"] = [
        RESTORE,
        *({**ROW, "id": n, "started": NOW - 3600.0 * (13 - n), "stop_seconds": n / 8,
           "drain_rate": 2e10 + n * 1e8, "drained_bytes": n << 32, "result": NEW}
          for n in range(12, 0, -1)),
    ]  # fmt: skip
    link.answers["ListEvents"] = [
        noted(3, "error", kind="image-unreadable", subject=ODD, text="its manifest is damaged"),
        noted(2, "warning", kind="wrong-guess", text="suspects: [b]scatter\x1b"),
        noted(1),
    ]
    for path, first in ((gpu(0).path, 0), (gpu(1).path, 40)):
        node.samples[path] = deque(
            Sample(NOW - 300 + 2 * n, n % 50 / 50, n << 29, 40.0 + n / 5, 100.0 + n)
            for n in range(first, 150)
        )
    return node, link


def rows(pilot: Pilot[None]) -> int:
    """How many the table of the screen has."""
    tables = pilot.app.screen.query(RecordTable)
    return tables.first().shown if tables else 0


async def answered(pilot: Pilot[None]) -> None:
    """Wait until the screen has what it has asked for."""

    def waiting() -> bool:
        return any(words in text(pilot) for words in ("not asked yet", "waiting for the answer"))

    await until(pilot, lambda: not waiting(), "the answer")


SCREENS: dict[str, list[str]] = {
    "images": ["3", "down"],
    "image": ["3", "down", "enter"],
    "delete": ["3", "down", "d"],
    "restore-with": ["3", "down", "R"],
    "history": ["4", "down"],
    "history-job": ["4", "down", "enter"],
    "history-filters": ["4", "down", "f"],
    "history-export": ["4", "down", "w"],
    "gpus": ["5"],
    "gpus-other": ["5", "right", "n"],
    "log": ["6"],
    "log-severity": ["6", "i"],
}


@pytest.mark.parametrize("screen", SCREENS)
def test_screen(screen: str) -> None:
    node, _ = full_node()

    async def body() -> None:
        async with opened(node) as pilot:
            number, *others = SCREENS[screen]
            await pilot.press(number)
            await until(pilot, lambda: rows(pilot), "what the screen has asked for")
            await pilot.press(*others)
            await answered(pilot)
            await compare_all(pilot, screen)

    run(body)


def empty(node: Node, link: FakeLink) -> None:
    node.apply(Update({node.manager.path: node.manager}, whole=True))
    for answer in ("ListHistory", "ListEvents"):
        link.answers[answer] = []


def gone(node: Node, link: FakeLink) -> None:
    trouble = "phosd does not run on this bus; start it (`systemctl start phosd`)"
    node.apply(Update(contact=Contact.GONE, trouble=trouble))


def old_service(node: Node, link: FakeLink) -> None:
    manager = replace(node.manager, version="0.0.9", features=frozenset())
    node.apply(Update({manager.path: manager}))


def refused(node: Node, link: FakeLink) -> None:
    for member in ("ListHistory", "ListEvents", "ListBlocks"):
        link.answers[member] = CommandError("Internal", "it cannot be read; see phosd's log")


def no_nvml(node: Node, link: FakeLink) -> None:
    silent = gpu(0, utilisation=None, temperature=None, power=None)
    node.apply(Update({silent.path: silent}, gone=frozenset({gpu(1).path})))
    node.samples.clear()
    node.sample()


TROUBLES: dict[str, tuple[Callable[[Node, FakeLink], None], list[str]]] = {
    "no-images": (empty, ["3"]),
    "no-history": (empty, ["4"]),
    "no-gpus": (empty, ["5"]),
    "no-events": (empty, ["6"]),
    "images-gone": (gone, ["3"]),
    "history-gone": (gone, ["4"]),
    "log-old-service": (old_service, ["6"]),
    "history-refused": (refused, ["4"]),
    "log-refused": (refused, ["6"]),
    "image-refused": (refused, ["3", "enter"]),
    "gpus-no-nvml": (no_nvml, ["5"]),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble(trouble: str) -> None:
    node, link = full_node()
    happen, keys = TROUBLES[trouble]

    async def body() -> None:
        async with opened(node) as pilot:
            happen(node, link)
            await pilot.press(*keys)
            await answered(pilot)
            await compare(pilot, f"trouble-{trouble}-80x24")

    run(body)
