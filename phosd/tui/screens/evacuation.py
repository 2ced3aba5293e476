"""Clear a GPU from any screen: show the plan, ask, and carry it out step by step."""

from phosd.client.errors import CommandError
from phosd.client.evacuation import Step
from phosd.client.records import Gpu
from phosd.tui.node import Node
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import human_bytes, plain
from phosd.tui.widgets.dialogs import Question

_MOST_SHOWN = 8
"""Most steps that a question shows; beyond, it gives their number."""
_COMMAND = 60
"""Characters of a command line that a question shows."""


async def evacuate(screen: NodeScreen, gpu: Gpu) -> None:
    """Plan, and carry the plan out if the user wants that."""
    what = f"Evacuate GPU {gpu.ordinal}"
    try:
        steps = [Step(*row) for row in await screen.node.call("PlanEvacuation", gpu.uuid)]
    except CommandError as error:
        screen.app.tell(f"{what}: {error.code}", str(error), "error")
        return
    todo = [step for step in steps if step.action != "stay"]
    if not todo:
        why = f"all stay: {steps[0].why}" if steps else "nothing that you may move is there"
        screen.app.tell(f"{what}: nothing to do", why)
        return

    def answered(yes: bool | None) -> None:
        if yes:
            screen.ask(what, _carry_out(screen.node, todo))

    screen.app.push_screen(Question(_question(gpu, steps), "Evacuate", rows=True), answered)


def _question(gpu: Gpu, steps: list[Step]) -> str:
    lines = [f"Clear GPU {gpu.ordinal}, one process after the other?", ""]
    for step in steps[:_MOST_SHOWN]:
        command = plain(step.command)[:_COMMAND]
        lines.append(
            f"{step.pid:>8}  {human_bytes(step.device_bytes):>10}  {step.text:<9} {command}"
        )
        if step.action == "stay":
            lines.append(f"{'':>10}{plain(step.why)}")
    if len(steps) > _MOST_SHOWN:
        lines.append(f"and {len(steps) - _MOST_SHOWN} more")
    return "\n".join(lines)


async def _carry_out(node: Node, steps: list[Step]) -> str:
    """Do one step after the other; return what became of them. If one fails, the others are still
    tried.
    """
    failed: list[str] = []
    for step in steps:
        try:
            moves = step.action == "migrate"
            job = await node.ended(
                await node.call("Migrate", step.pid, step.destination)
                if moves
                else await node.call("Suspend", step.pid)
            )
        except CommandError as error:
            failed.append(f"{step.pid} stays: {error}")
            continue
        if job is None or job.state != "done":
            why = "phosd ended meanwhile" if job is None else job.message or job.state
            failed.append(f"{step.pid} stays: {why}")
    done = len(steps) - len(failed)
    return "; ".join([f"{done} of {len(steps)} processes are gone from it", *failed])
