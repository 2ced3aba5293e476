"""What a program is in: a column of images, jobs and the history, where one of them has it."""

from tests.support.tui.fakes import FEATURES, fake_node, image, job, process
from tests.support.tui.opened import opened, run, until, until_shown
from tests.support.tui.snapshots import text
from tests.unit.tui.test_past import ROW

WIDE = (160, 40)


def test_images_jobs_and_the_history_tell_it() -> None:
    node, link = fake_node(
        *(process(4711), image(within="pod ml/bert-0"), job(1, name="gpt", within="Slurm job 12")),
        features=(*FEATURES, "history-filters"),
    )
    link.answers["ListHistory"] = [ROW | {"name": "llama", "within": "container [trainer]"}]

    async def body() -> None:
        async with opened(node, WIDE) as pilot:
            await pilot.press("2")
            await until_shown(pilot, "POD OR JOB", "Slurm job 12", "gpt")
            await pilot.press("3")
            await until_shown(pilot, "POD OR JOB", "pod ml/bert-0", "; in pod ml/bert-0")
            await pilot.press("4")
            await until_shown(pilot, "POD OR JOB", "container [trai", "llama (4711)")

    run(body)


def test_without_it_there_is_no_column() -> None:
    node, link = fake_node(
        *(process(4711), image(), job(1)), features=(*FEATURES, "history-filters")
    )
    link.answers["ListHistory"] = [ROW]

    async def body() -> None:
        async with opened(node, WIDE) as pilot:
            for key, there in (("2", "PHASE"), ("3", "STORED"), ("4", "OPERATION")):
                await pilot.press(key)
                await until_shown(pilot, there)
                await until(pilot, lambda: "4711" in text(pilot), "the row")
                assert "POD OR JOB" not in text(pilot)

    run(body)
