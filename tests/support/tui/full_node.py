"""Provide a full node: eight programs of three users on four GPUs, of which some need somebody."""

from collections import deque
from pathlib import Path

from phosd.client.records import Image, Process
from phosd.tui.node import Node, Sample
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node, gpu, image, job, process

_OFFERED = (*FEATURES, "storage", "history-filters", "suspend", "migrate")
_UIDS = {"ann": 1000, "bob": 1001, "cy": 1002}
_GIB = 1 << 30


def _program(number: int, name: str, user: str, gpus: str, size: int, **changes: object) -> Process:
    values: dict[str, object] = {
        "name": name,
        "user": _UIDS[user],
        "user_name": user,
        "gpus": tuple(gpu(int(each)).path for each in gpus.split()),
        "device_bytes": size * _GIB,
        "command": ("python", f"{name or 'notebook'}.py", "--lr", "3e-4"),
        "last_image": f"{name}-4",
        "keep": 4,
    }
    return process(11250 + number, **(values | changes))


def _images(name: str, user: str, age: float, every: float, size: float) -> list[Image]:
    stops = (0.61, 0.72, 0.58, 0.66)
    return [
        image(f"{name}-{number}", name=name, number=number, owner=_UIDS[user], owner_name=user,
              created=NOW - age - every * (4 - number), stored_bytes=int(size * _GIB),
              stop_seconds=stop)
        for number, stop in enumerate(stops, 1)
    ]  # fmt: skip


def full_node(output: Path | None = None) -> tuple[Node, FakeLink]:
    """Return the node, one of whose programs writes to this file."""
    node, link = fake_node(
        gpu(0, memory_used=95 * _GIB, utilisation=0.97, temperature=71.0, power=612.0),
        gpu(1, memory_used=126 * _GIB, utilisation=0.88, temperature=78.0, power=540.0),
        gpu(2, memory_used=129 * _GIB, utilisation=1.0, temperature=86.0, power=688.0),
        gpu(3, memory_used=17 * _GIB, utilisation=0.21, temperature=44.0, power=160.0),
        _program(1, "llama-ft", "ann", "0", 74, every=20.0, restarter="unit llama-ft.service",
                output=(str(output),) if output else ()),
        _program(2, "bert-eval", "ann", "0", 18, every=1800.0),
        _program(3, "vae", "cy", "3", 8, every=1800.0),
        _program(4, "diffusion", "cy", "1", 60, last_image="", restarter="Slurm job 4711"),
        _program(5, "moe-pretrain", "bob", "2 1", 128, every=600.0, restarter="pod bob/moe-0"),
        _program(6, "whisper", "bob", "", 0, state="suspended", reason="its memory is in RAM"),
        _program(7, "", "cy", "3", 7, last_image="", hook="driver",
                reason="started without `phos run`"),
        _program(8, "rl-agent", "bob", "2", 63, every=900.0),
        *_images("llama-ft", "ann", 12, 20, 74.2),
        *_images("bert-eval", "ann", 700, 1800, 18.1),
        *_images("vae", "cy", 2460, 1800, 8.3),
        *_images("moe-pretrain", "bob", 432, 600, 128.9),
        *_images("whisper", "bob", 86_400 * 3, 86_400, 4.4),
        *_images("rl-agent", "bob", 11_000, 900, 63.4),
        job(21, target="11258", state="failed", error="OutOfSpace", started=NOW - 125,
            ended=NOW - 120, message="the disk has 1.2 GiB free and 63.0 GiB are needed; remove "
            "images", cancelable=False),
        *(job(number, target=str(11250 + target), state="done", ended=NOW - 400 + 19 * number,
              result=f"{name}-4", stop_seconds=0.66, cancelable=False)
          for number, (target, name) in enumerate(
              [(2, "bert-eval"), (1, "llama-ft"), (5, "moe-pretrain"), (1, "llama-ft"),
               (3, "vae"), (1, "llama-ft")], 10)),
        job(22, target="11255", phase="drain", progress=0.42),
        features=_OFFERED,
    )  # fmt: skip
    link.answers["GetStorage"] = [2 << 40, 290 * _GIB, 1500 * _GIB, 0]
    link.answers["ListHistory"] = [
        {"id": 9, "operation": "checkpoint", "target": "815", "state": "failed", "ended": NOW - 99}
    ]
    for number in range(4):
        node.samples[gpu(number).path] = deque(
            Sample(NOW - 60 + 2 * n, (n * (number + 3) % 10) / 10, 0, 50.0, 300.0)
            for n in range(30)
        )
    return node, link
