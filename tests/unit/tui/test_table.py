"""The table of records."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from textual.app import App, ComposeResult
from textual.pilot import Pilot

from phosd.client.records import Process
from phosd.tui.text import command_line
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Column, RecordTable
from tests.support.tui.fakes import process
from tests.support.tui.opened import run, until
from tests.support.tui.snapshots import text

COLUMNS: list[Column[Process]] = [
    Column("PID", 6, lambda p: str(p.pid), lambda p: p.pid, right=True),
    Column("USER", 8, lambda p: p.user_name, lambda p: p.user_name, rank=1),
    Column("HOOK", 8, lambda p: (p.hook, "good"), lambda p: p.hook, rank=2),
    Column("COMMAND", 0, lambda p: command_line(p.command), lambda p: p.command),
]


REASON: Column[Process] = Column("REASON", 10, lambda p: p.reason, lambda p: p.reason, sparse=True)


class TableApp(App[None]):
    def __init__(self, columns: Sequence[Column[Process]]) -> None:
        super().__init__()
        self._columns = columns

    def compose(self) -> ComposeResult:
        yield Listing(RecordTable(self._columns), "nothing here")

    @property
    def listing(self) -> Listing[Process]:
        return self.query_one(Listing)


@asynccontextmanager
async def shown(
    *records: Process,
    size: tuple[int, int] = (60, 10),
    columns: Sequence[Column[Process]] = COLUMNS,
) -> AsyncIterator[tuple[Pilot[None], Listing[Process]]]:
    app = TableApp(columns)
    async with app.run_test(size=size) as pilot:
        app.listing.show_records({record.path: record for record in records})
        app.listing.table.focus()
        await pilot.pause()
        yield pilot, app.listing


def lines(pilot: Pilot[None]) -> list[str]:
    return text(pilot).splitlines()


def pids(pilot: Pilot[None]) -> list[int]:
    words = [line.replace("▶", " ").replace("*", " ").split() for line in lines(pilot)[1:-1]]
    return [int(found[0]) for found in words if len(found) > 2 and found[1] != "of"]


def test_the_cursor_stays_with_its_record_when_others_come_and_go() -> None:
    async def body() -> None:
        async with shown(process(10), process(20), process(30)) as (pilot, listing):
            await pilot.press("down")
            current = listing.table.current
            assert current is not None and current.pid == 20
            records = [process(5), process(7), process(20, state="locked")]
            listing.show_records({record.path: record for record in records})
            await pilot.pause()
            current = listing.table.current
            assert current is not None and (current.pid, current.state) == (20, "locked")
            assert lines(pilot)[3].startswith("▶     20 ")
            listing.show_records({record.path: record for record in records[:2]})
            await pilot.pause()
            current = listing.table.current
            assert current is not None and current.pid == 7  # it stays where it was
            listing.show_records({})
            await pilot.pause()
            assert listing.table.current is None
            assert listing.table.chosen == []
            assert "nothing here" in text(pilot)

    run(body)


def test_marks_stay_with_their_records_and_leave_with_them() -> None:
    async def body() -> None:
        async with shown(process(1), process(2), process(3)) as (pilot, listing):
            await pilot.press("space", "space")
            assert [p.pid for p in listing.table.chosen] == [1, 2]
            assert "3 rows, 2 marked" in text(pilot)
            listing.show_records({p.path: p for p in [process(2), process(3)]})
            assert [p.pid for p in listing.table.chosen] == [2]
            await pilot.press("u")
            current = listing.table.current
            assert listing.table.chosen == [current]

    run(body)


def test_marks_and_cursor_are_there_again_after_an_empty_list() -> None:
    """A phosd that has just begun lists nothing until it has looked."""

    async def body() -> None:
        records = {p.path: p for p in [process(1), process(2), process(3)]}
        async with shown(*records.values()) as (pilot, listing):
            await pilot.press("space", "down")
            listing.show_records({})
            await until(pilot, lambda: "nothing here" in text(pilot), "the empty list")
            assert (listing.table.current, listing.table.chosen) == (None, [])
            assert "marked" not in text(pilot)
            await pilot.press("space", "down", "up")
            listing.show_records(records)
            await until(pilot, lambda: "3 rows, 1 marked" in text(pilot), "the mark")
            assert (listing.table.current, listing.table.chosen) == (process(3), [process(1)])
            listing.show_records({})
            listing.show_records({process(2).path: process(2)})
            assert (listing.table.current, listing.table.chosen) == (process(2), [process(2)])

    run(body)


def test_every_column_sorts_both_ways_by_key_and_by_mouse() -> None:
    records = [
        process(1, user_name="zoe", hook="driver", command=("b",)),
        process(2, user_name="amy", hook="hooked", command=("c",)),
        process(3, user_name="kim", hook="hooked", command=("a",)),
    ]
    ascending = [[1, 2, 3], [2, 3, 1], [1, 2, 3], [3, 1, 2]]

    async def body() -> None:
        async with shown(*records) as (pilot, _):
            for order in ascending:
                assert pids(pilot) == order
                await pilot.press("O")
                assert pids(pilot)[0] == order[-1] or order == ascending[2]
                await pilot.press("O", "o")
            assert "PID▲" in lines(pilot)[0]
            await pilot.click(RecordTable, offset=(10, 0))
            assert "USER▲" in lines(pilot)[0] and pids(pilot) == [2, 3, 1]
            await pilot.click(RecordTable, offset=(10, 0))
            assert "USER▼" in lines(pilot)[0] and pids(pilot) == [1, 3, 2]

    run(body)


def test_the_filter_narrows_while_one_types_and_escape_shows_all() -> None:
    async def body() -> None:
        async with shown(process(1), process(2, command=("julia", "x[1]"))) as (pilot, listing):
            await pilot.press("slash", *"JUL x[")
            await until(pilot, lambda: pids(pilot) == [2], "the filter")
            assert "1 of 2" in text(pilot)
            await pilot.press("enter")
            current = listing.table.current
            assert listing.table.has_focus and current is not None and current.pid == 2
            await pilot.press("escape")
            await until(pilot, lambda: pids(pilot) == [1, 2], "all of them")

    run(body)


def test_columns_leave_where_there_is_no_room() -> None:
    async def body() -> None:
        async with shown(process(1), size=(60, 10)) as (pilot, _):
            assert lines(pilot)[0].split() == ["PID▲", "USER", "HOOK", "COMMAND"]
            await pilot.resize_terminal(44, 10)
            await until(pilot, lambda: "HOOK" not in lines(pilot)[0], "the hook to leave")
            assert "USER" in lines(pilot)[0]
            await pilot.resize_terminal(30, 10)
            await until(pilot, lambda: "USER" not in lines(pilot)[0], "the user to leave")
            assert lines(pilot)[1].startswith("▶      1 ")

    run(body)


def test_names_of_any_kind_take_their_cells_and_no_more() -> None:
    hostile = [
        process(1, command=("[bold red]x[/]", "\x1b[2J")),
        process(2, command=("模型" * 40,)),
        process(3, command=("\u202eevil", "a\nb")),
    ]

    async def body() -> None:
        async with shown(*hostile) as (pilot, _):
            first, second, third = lines(pilot)[1:4]
            assert "[bold red]x[/]" in first and r"\x1b[2J" in first
            assert second.endswith("…")
            assert r"\u202eevil" in third and r"a\nb" in third
            strips = pilot.app.screen._compositor.render_strips()
            assert {strip.cell_length for strip in strips} == {60}

    run(body)


def test_the_cursor_reaches_every_row_and_keeps_it_in_sight() -> None:
    async def body() -> None:
        async with shown(*map(process, range(1, 101))) as (pilot, listing):
            for key, pid in [("end", 100), ("up", 99), ("home", 1), ("pagedown", 8), ("G", 100),
                             ("g", 1), ("j", 2), ("k", 1)]:  # fmt: skip
                await pilot.press(key)
                current = listing.table.current
                assert current is not None and current.pid == pid, key
                await until(pilot, lambda pid=pid: pid in pids(pilot), f"row {pid} in sight")  # type: ignore[misc]

    run(body)


def test_a_click_chooses_the_row_under_it_also_when_scrolled() -> None:
    async def body() -> None:
        async with shown(*map(process, range(1, 101))) as (pilot, listing):
            await pilot.press("end")
            await pilot.pause()
            seen = pids(pilot)
            await pilot.click(RecordTable, offset=(20, 3))
            current = listing.table.current
            assert current is not None and current.pid == seen[2]

    run(body)


def test_records_that_change_before_the_next_drawing_do_no_harm() -> None:
    """The node's own mapping goes on while the table shows what it was given."""

    async def body() -> None:
        async with shown() as (pilot, listing):
            records = {p.path: p for p in [process(1), process(2)]}
            listing.show_records(records)
            records.clear()
            listing.table.refresh()
            await until(pilot, lambda: pids(pilot) == [1, 2], "what was given")
            assert listing.table.current == process(1)

    run(body)


def test_a_column_that_says_nothing_of_any_row_takes_no_room() -> None:
    async def body() -> None:
        columns = [REASON, *COLUMNS]
        async with shown(process(10), process(20), columns=columns) as (pilot, listing):
            assert "REASON" not in lines(pilot)[0]
            there = (process(10), process(20, reason="no hook"))
            listing.show_records({record.path: record for record in there})
            await until(pilot, lambda: "REASON" in lines(pilot)[0], "the column")
            listing.table.set_filter("10")
            await until(pilot, lambda: "REASON" not in lines(pilot)[0], "it to go")

    run(body)
