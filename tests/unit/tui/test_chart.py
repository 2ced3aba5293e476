"""Charts of columns."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from phosd.tui.widgets.chart import Plot, columns, draw, spread


def plot(*points: tuple[float, float | None], most: float = 0.0, hold: float = 0.0) -> Plot:
    return Plot("Load", points, (0.0, 10.0), lambda v: f"{v:g} W", most, hold, "it does not tell")


def lines(shown: Plot, width: int = 21, height: int = 4) -> list[str]:
    return draw(shown, width, height).plain.split("\n")


def test_a_column_is_as_high_as_the_greatest_value_of_its_time() -> None:
    assert spread([(0, 1.0), (1, 3.0), (1.5, 2.0), (9.9, 7.0)], (0, 10), 5) == [
        3.0, None, None, None, 7.0,
    ]  # fmt: skip


def test_a_sample_stands_for_its_time_and_no_longer() -> None:
    values = spread([(1, 4.0), (9, 8.0)], (0, 10), 10, hold=3.0)
    assert values == [None, 4.0, 4.0, 4.0, 4.0, None, None, None, None, 8.0]


def test_what_lies_outside_is_left_out() -> None:
    assert spread([(-1, 4.0), (11, 8.0), (10, 2.0)], (0, 10), 2) == [None, 2.0]


def test_heights_are_shares_of_the_top_and_zero_leaves_a_mark() -> None:
    assert columns([0.0, None, 0.5, 1.0, 2.0], 1.0, 2) == ["   ██", "▁ ███"]
    assert columns([0.25], 1.0, 2) == [" ", "▄"]


def test_top_and_ground_are_labelled_and_so_are_the_times() -> None:
    shown = lines(plot((0, 5.0), (9.9, 10.0)), width=40, height=5)
    assert shown[0] == f"{'Load':<40}"
    assert shown[1].startswith("10 W┤") and shown[1].endswith("█")
    assert shown[2].startswith("    │")
    assert shown[3].startswith(" 0 W┤█")
    assert shown[4].endswith("└00:00:00                   00:00:10")


def test_where_there_is_room_the_middle_is_labelled() -> None:
    shown = lines(plot((0, 5.0), (9.9, 10.0)), width=40, height=8)
    labels = [line.partition("┤")[0].strip() for line in shown[1:-1] if "┤" in line]
    assert labels == ["10 W", "5 W", "0 W"]


def test_a_value_above_the_top_moves_the_top() -> None:
    assert "20 W" in lines(plot((5, 20.0), most=10.0))[1]
    assert "10 W" in lines(plot((5, 2.0), most=10.0))[1]


def test_without_a_figure_it_says_why() -> None:
    assert lines(plot((1, None)))[1].startswith("it does not tell")
    assert len(lines(plot())) == 2


finite = st.floats(0, 1e30, allow_nan=False)


@given(
    st.lists(st.tuples(st.floats(-5, 15), st.none() | finite), max_size=30),
    st.integers(1, 60),
    st.integers(1, 12),
    st.floats(0, 20),
)
def test_it_never_takes_more_room_than_there_is(
    points: list[tuple[float, float | None]], width: int, height: int, hold: float
) -> None:
    shown = lines(plot(*points, hold=hold), width, height)
    assert len(shown) <= max(2, height)
    assert all(cell_len(line) <= width for line in shown)
