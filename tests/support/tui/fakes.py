"""Provide a fake node: a test decides what phosd reports, and sees which calls were made."""

import asyncio
from collections.abc import Callable
from typing import Any

from phosd.bus import ROOT
from phosd.client.errors import CommandError
from phosd.client.records import Gpu, Image, Job, Manager, Phase, Pool, Process, Record
from phosd.tui.node import Contact, Node, Update

NOW = 1_800_000_000.0
"""The clock of fake nodes, in seconds since the epoch."""
FEATURES = ("checkpoint", "restore", "verify", "queue", "periodic")
GPU_PATH = f"{ROOT}/gpu/GPU_2d1"


class FakeLink:
    """A fake link that records calls; ``answers`` by member are values, or errors to raise.

    A member in ``slow`` is not answered before its event is set.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {"ListHistory": [], "ListEvents": []}
        self.slow: dict[str, asyncio.Event] = {}
        self.deliver: Callable[[Update], None] = lambda update: None
        self.running = False

    def start(self, deliver: Callable[[Update], None]) -> None:
        self.deliver, self.running = deliver, True

    def stop(self) -> None:
        self.running = False

    async def call(
        self, path: str, interface: str, member: str, signature: str = "", *args: Any
    ) -> list[Any]:
        self.asked.append((member, *(a for a in args if a != {})))
        if member in self.slow:
            await self.slow[member].wait()
        answer = self.answers.get(member, f"{ROOT}/job/_1")
        if isinstance(answer, CommandError):
            raise answer
        return [answer]


def fake_node(*records: Record, features: tuple[str, ...] = FEATURES) -> tuple[Node, FakeLink]:
    """Return a node that has received these records from phosd 0.1.0, and its link."""
    link = FakeLink()
    node = Node(link, now=lambda: NOW)
    manager = Manager(ROOT, version="0.1.0", features=frozenset(features))
    there = {record.path: record for record in (manager, *records)}
    node.apply(Update(there, whole=True, contact=Contact.HERE))
    return node, link


def gpu(ordinal: int = 0, **changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "ordinal": ordinal,
        "uuid": f"GPU-{ordinal}",
        "name": "NVIDIA H200",
        "memory_total": 141 << 30,
        "memory_used": 43 << 30,
        "utilisation": 0.87,
        "temperature": 61.0,
        "power": 412.0,
        "pids": (),
    }
    return Gpu(f"{ROOT}/gpu/GPU_2d{ordinal}", **(values | changes))


def process(pid: int = 4711, **changes: Any) -> Process:
    values: dict[str, Any] = {
        "start_time": 99,
        "user": 0,
        "user_name": "root",
        "command": ("python", "train.py", "--epochs", "3"),
        "gpus": (f"{ROOT}/gpu/GPU_2d0",),
        "device_bytes": 40 << 30,
        "hook": "hooked",
        "state": "running",
    }
    return Process(f"{ROOT}/process/_{pid}_99", pid, **(values | changes))


def image(image_id: str = "20270115T080000-5f3a", **changes: Any) -> Image:
    values: dict[str, Any] = {
        "created": NOW - 300,
        "owner": 0,
        "pid": 4711,
        "command": ("python", "train.py"),
        "gpus": (("GPU-0", "GH100"),),
        "total_bytes": 41 << 30,
        "device_bytes": 40 << 30,
        "stored_bytes": 41 << 30,
        "mode": "concurrent",
        "stop_seconds": 0.84,
    }
    return Image(f"{ROOT}/image/{image_id.replace('-', '_2d')}", image_id, **(values | changes))


def pool(name: str = "chat", **changes: Any) -> Pool:
    values: dict[str, Any] = {
        "owner": 0,
        "owner_name": "root",
        "image": "20270115T080000-5f3a",
        "hollow": 2,
        "ready": 1,
        "max": 8,
        "waiting": 3,
        "waiting_ready": 1,
        "running": 2,
    }
    return Pool(f"{ROOT}/pool/{name}", name, **(values | changes))


def job(number: int = 1, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "operation": "checkpoint",
        "target": "4711",
        "state": "running",
        "phase": "drain",
        "progress": 0.5,
        "bytes_done": 20 << 30,
        "bytes_total": 40 << 30,
        "rate": 20.0 * (1 << 30),
        "started": NOW - 3,
        "expected_end": NOW + 1,
        "stop_seconds": 0.84,
        "mode": "auto",
        "phases": (
            Phase("prepare", False, 0.4, 0, 0),
            Phase("quiesce", True, 0.02, 0, 0),
            Phase("digest", True, 0.012, 40 << 30, 40 << 30),
            Phase("control", True, 0.8, 0, 0),
            Phase("drain", False, 1.0, 20 << 30, 40 << 30),
        ),
        "cancelable": True,
    }
    return Job(f"{ROOT}/job/_{number}", number, **(values | changes))
