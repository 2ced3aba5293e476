"""What is on the screen can be read: in both themes, and where there is little room."""

import pytest
from rich.cells import cell_len
from rich.color import Color
from textual.color import Color as Shade

from phosd.tui.node import Contact, Update
from phosd.tui.widgets.job import job_page
from tests.support.tui.fakes import NOW, fake_node, gpu, image, job, process
from tests.support.tui.opened import SMALL, opened, run, until_shown
from tests.support.tui.snapshots import settled, text
from tests.unit.tui.test_snapshots import PHASES, SCREENS, busy_node

_LEAST_CONTRAST = 2.5
"""As WCAG reckons it, from 1 to 21; what cannot be done now is dim on purpose."""


def contrast(front: Color, back: Color) -> float:
    """How much a colour stands out against another one."""
    shades = [Shade(*c.get_truecolor()) for c in (front, back)]
    lights = sorted(
        sum(
            weight * (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4)
            for weight, x in zip((0.2126, 0.7152, 0.0722), shade.normalized, strict=True)
        )
        for shade in shades
    )
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])
@pytest.mark.parametrize("screen", SCREENS)
def test_every_word_stands_out(screen: str, light: bool) -> None:
    node, _ = busy_node()

    async def body() -> None:
        async with opened(node, SMALL, light=light) as pilot:
            await pilot.press(*SCREENS[screen])
            await settled(pilot)
            faint = {}
            for strip in pilot.app.screen._compositor.render_strips():
                for word in strip:
                    style = word.style
                    if (
                        word.text.strip(" ▔▁▃▅▆▇█╭╮╰╯│─━╸╺▊▎")
                        and style
                        and style.color
                        and style.bgcolor
                    ):
                        faint[word.text] = contrast(style.color, style.bgcolor)
            dialog = len(pilot.app.screen_stack) > 1 and screen in ("form", "help")
            if not dialog:  # what is behind a dialog is faint on purpose
                assert {w: c for w, c in faint.items() if c < _LEAST_CONTRAST} == {}

    run(body)


@pytest.mark.parametrize(("width", "readonly", "shown"), [
    (60, False, "● phosd"), (60, True, "● readonly"), (70, True, "● readonly"),
    (80, True, "● readonly"), (90, True, "● phosd 0.1.0 readonly"), (80, False, "● phosd 0.1.0"),
])  # fmt: skip
def test_with_whom_one_talks_is_told_as_far_as_there_is_room(
    width: int, readonly: bool, shown: str
) -> None:
    node, _ = fake_node(process(1))

    async def body() -> None:
        async with opened(node, (width, 20), readonly=readonly) as pilot:
            assert text(pilot).splitlines()[0].endswith(f" {shown}")
            node.apply(Update(contact=Contact.GONE, trouble="it is away"))
            await until_shown(pilot, "✗")

    run(body)


@pytest.mark.parametrize("width", [40, 56, 76, 156])
def test_the_page_of_a_job_fits_and_its_texts_stand_below_each_other(width: int) -> None:
    why = "the hook can park the device memory and copy it afterwards; " * 3
    page = job_page(job(1, why=why, phases=PHASES, notes=("a note " * 20,)), NOW, width)
    lines = page.plain.splitlines()
    assert "".join(why.split()) in "".join(page.plain.split())
    first = next(n for n, line in enumerate(lines) if line.startswith("mode"))
    assert width > 150 or lines[first + 1].startswith(" " * 14)
    wide = {line: cell_len(line) for line in lines if "stood still" not in line}
    assert max(wide.values()) <= max(width, 49)


def test_the_least_of_terminals() -> None:
    """Each screen has what one works with: the row, its keys, and what it is about."""
    node, _ = fake_node(
        gpu(), process(4_194_303, name="bert"), job(1), image("20270115T070000-aaaa", name="bert")
    )

    async def body() -> None:
        async with opened(node, (40, 12)) as pilot:
            await until_shown(pilot, "4194303", "c Checkpoint", "? Help")
            await pilot.press("2")
            await until_shown(pilot, "▶ 4711", "checkpoint", "x Cancel", "? Help")
            await pilot.press("enter")
            await until_shown(pilot, "Job 1: checkpoint", "q Back")
            await pilot.press("3")
            await until_shown(pilot, "▶ bert@0", "41.0 GiB", "r Restore", "? Help")
            await pilot.press("enter")
            await until_shown(pilot, "20270115T070000-aaaa", "ORDER", "r Restore")
            for key, shown in (("4", "TARGET"), ("5", "GPU 0"), ("6", "TIME")):
                await pilot.press(key)
                await until_shown(pilot, shown, "? Help")

    run(body)


def test_without_nvml_the_memory_that_is_used_is_what_the_processes_hold() -> None:
    node, _ = fake_node(
        gpu(memory_used=0, utilisation=None, temperature=None, power=None),
        process(1, device_bytes=3 << 30), process(2, device_bytes=4 << 30, gpus=()),
    )  # fmt: skip

    async def body() -> None:
        async with opened(node) as pilot:
            assert "3.0 of 141.0 GiB" in text(pilot)
            await pilot.press("5")
            await until_shown(pilot, "3.0 GiB of 141.0 GiB used; processes: 1")

    run(body)
