"""Train a network, checkpoint it, kill it, restore it, and compare what it computes."""

import asyncio
import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phosd import bus
from phosd.client import AsyncClient, Job, Phase
from phosd.demo.stage import DemoError, Training, daemon, folder, private_bus, program, until
from phosd.errors import PhosError

WARM_UP = 40
"""Steps before the checkpoint."""
COMPARED = 40
"""Losses to compare after the restore."""

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of the story. Markup is rich's."""
    console.print(text)


def chapter(number: int, text: str) -> None:
    """Begin a step of the story."""
    say(f"\n[bold]{number}. {text}[/]")


def command(method: str, signature: str, target: int | str) -> None:
    """Show what one would type to make the call that follows."""
    call = f"busctl call {bus.NAME} {bus.ROOT} org.phos.Manager1 {method}"
    say(f"   $ {call} '{signature}' {target} 0")


def teller(tell: Callable[[Phase], None]) -> Callable[[Job], None]:
    """What hands on each phase of a job once, as it ends."""
    told = 0

    def look(job: Job) -> None:
        nonlocal told
        ended = job.phases if job.over else job.phases[:-1]
        for phase in ended[told:]:
            tell(phase)
        told = len(ended)

    return look


def tell_phase(phase: Phase, state: str = "") -> None:
    """One phase of a job as it ends, and how the program was in it."""
    moved = f"{phase.bytes_done / 1e6:.1f} MB" if phase.bytes_done else ""
    say(f"     {phase.name:<10} {phase.seconds * 1e3:8.1f} ms   {state}   {moved}".rstrip())


def tell_checkpoint_phase(phase: Phase) -> None:
    """One phase of a checkpoint, and whether the program stood still meanwhile."""
    stopped = "[yellow]program stands still[/]" if phase.stopped else "[green]program runs[/]"
    tell_phase(phase, stopped)


async def start_training(
    client: AsyncClient, place: Path, stack: contextlib.AsyncExitStack
) -> Training:
    """Start the program and wait until phosd sees it; it is killed when the stack ends."""
    relay = await stack.enter_async_context(program(place))
    children = Path(f"/proc/{relay.pid}/task/{relay.pid}/children")
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        if relay.returncode is not None:
            log = (place / "run.log").read_text()[-2000:].strip()
            raise DemoError(f"the training ended at once: {log}")
        ours = {int(child) for child in children.read_text().split()}
        for process in await client.processes():
            if process.pid in ours:
                training = Training(process.pid)
                stack.push_async_callback(training.kill)
                return training
        await asyncio.sleep(0.1)
    raise DemoError("phosd does not see the training within 45 s")


async def progress(training: Training, count: int, since: int) -> dict[int, str]:
    """Wait for ``count`` losses from byte ``since`` of the output on, showing some."""
    shown = 0
    while True:
        losses = training.losses(since)
        for step, loss in list(losses.items())[shown:count]:
            if step % 10 == 0:
                say(f"     step {step:>4}   loss {loss}")
        shown = min(len(losses), count)
        if shown == count:
            return losses

        def changed(known: int = len(losses)) -> bool:
            return len(training.losses(since)) > known or not training.alive()

        await until(changed, "the next step of the training")
        if not training.alive():
            raise DemoError("the training ended by itself")


async def checkpoint(client: AsyncClient, training: Training) -> tuple[Job, int]:
    """Save the program; what came of it, and the bytes of the image."""
    command("Checkpoint", "ua{sv}", training.pid)
    saving = await client.checkpoint(training.pid)
    saved = await saving.wait(teller(tell_checkpoint_phase))
    size = (await client.image(saved.result)).stored_bytes
    say(
        f"   image {saved.result}: {size / 1e6:.1f} MB, mode {saved.mode};"
        f" the program stood still for {saved.stop_seconds * 1e3:.0f} ms"
    )
    return saved, size


async def restore(client: AsyncClient, image: str, training: Training) -> float:
    """Restore the program; the seconds until it computes again."""
    command("Restore", "sa{sv}", image)
    mark, began = training.position(), time.monotonic()
    restoring = await client.restore(image)
    restored = await restoring.wait(teller(tell_phase))
    if int(restored.result) != training.pid:
        raise DemoError(f"it came back as process {restored.result}, not {training.pid}")
    await until(lambda: training.losses(mark), "the first step after the restore")
    seconds = time.monotonic() - began
    say(f"   process {training.pid} computes again after {seconds:.2f} s")
    return seconds


def compare(before: dict[int, str], after: dict[int, str]) -> tuple[int, bool]:
    """Show the losses that were computed twice; how many they are, and whether all are equal."""
    common = sorted(before.keys() & after.keys())
    table = Table("step", "before the kill", "after the restore", "")
    for step in common[:: max(1, len(common) // 8)]:
        equal = before[step] == after[step]
        table.add_row(
            str(step), before[step], after[step], "[green]=[/]" if equal else "[red]differs[/]"
        )
    console.print(table)
    return len(common), bool(common) and all(before[s] == after[s] for s in common)


async def demonstrate() -> dict[str, Any]:
    """The whole story; the result that is printed as the last line."""
    async with contextlib.AsyncExitStack() as stack:
        place = await stack.enter_async_context(folder())
        chapter(1, "A D-Bus of our own, and phosd on it")
        address = await stack.enter_async_context(private_bus(place))
        client = await stack.enter_async_context(daemon(place, address))
        device = ([gpu.name for gpu in await client.gpus()] or ["none"])[0]
        say(f"   device: [cyan]{escape(device)}[/]")

        chapter(2, "A program that trains a network, and knows nothing of phosd")
        say("   $ phos run -- python -m phosd.demo.train")
        training = await start_training(client, place, stack)
        await progress(training, WARM_UP, since=0)
        process = await client.process(training.pid)
        megabytes = process.device_bytes / 1e6
        say(f"   phosd sees it: pid {process.pid}, {process.hook}, {megabytes:.0f} MB on the GPU")

        chapter(3, "Checkpoint: the program goes on while nobody has to help")
        saved, size = await checkpoint(client, training)

        chapter(4, "It trains on; we note its losses")
        await progress(training, COMPARED, since=training.position())
        before = training.losses()

        chapter(5, f"kill -9 {training.pid}")
        await training.kill()
        before = training.losses()
        say(f"   gone, at step {max(before)}")

        chapter(6, "Restore")
        mark = training.position()
        restore_seconds = await restore(client, saved.result, training)
        after = await progress(training, COMPARED, since=mark)

        chapter(7, "The same losses, to the last digit?")
        count, equal = compare(before, after)
        if not equal:
            raise DemoError(f"of {count} losses that were computed twice, some differ")
        return {
            "demo": "ok",
            "device": device,
            "stop_s": round(saved.stop_seconds, 3),
            "restore_s": round(restore_seconds, 3),
            "values_compared": count,
            "values_equal": equal,
            "image_bytes": size,
        }


async def interruptible() -> dict[str, Any]:
    """The story, which Ctrl-C, SIGTERM and a closed terminal end in good order."""
    task = asyncio.ensure_future(demonstrate())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await task


def main() -> int:
    """Run the demonstration; the exit code."""
    try:
        result = asyncio.run(interruptible())
    except asyncio.CancelledError:
        result = {"demo": "failed", "reason": "interrupted"}
    except (DemoError, PhosError) as error:
        result = {"demo": "failed", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"demo": "failed", "reason": f"{type(error).__name__}: {error}"}
    say("")
    print(json.dumps(result), flush=True)
    return 0 if result["demo"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
