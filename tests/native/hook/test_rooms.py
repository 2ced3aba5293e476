"""The rooms of the hook, by ``#include``: who may know whom, and no circle of files."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

PHOSD = Path(__file__).parents[3] / "phosd"
HOOK = PHOSD / "hook"

# From the top to the ground. A file includes its own room and those of lower floors, and no other
# room of its own floor.
FLOORS = (
    {"start.cpp"},
    {"control"},
    {"intercept"},
    {"write_sets"},
    {"cow", "park", "ranges"},
    {"memory", "code", "gate"},
    {"base"},
    {"protocol"},
    {"hooks.def", "faults.def", "reasons.def"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# All that phosd has of the hook: its view of the chunk map.
CHUNK_MAP_VIEW = "engine/chunk_map/view.h"


def included(file: Path) -> list[str]:
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', file.read_text(), re.MULTILINE)


def sources(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in (".h", ".cpp"))


def arrows() -> list[tuple[str, str]]:
    """Return which file includes which, as paths within the hook, without its tests."""
    files = [file for file in sources(HOOK) if (HOOK / "tests") not in file.parents]
    return [(str(file.relative_to(HOOK)), name) for file in files for name in included(file)]


def room(path: str) -> str:
    return path.partition("/")[0]


def test_every_include_names_its_room() -> None:
    """From the root of the hook, also within a room: no ``../`` and no bare name."""
    assert len(arrows()) > 150
    assert [arrow for arrow in arrows() if room(arrow[1]) not in FLOOR_OF] == []
    assert [arrow for arrow in arrows() if not (HOOK / arrow[1]).is_file()] == []


def test_a_room_knows_only_those_on_lower_floors() -> None:
    assert [
        (upper, lower)
        for upper, lower in arrows()
        if room(upper) != room(lower) and FLOOR_OF[room(upper)] >= FLOOR_OF[room(lower)]
    ] == []


def test_there_is_no_circle_of_files() -> None:
    """A header and its source are one."""
    graph: dict[str, set[str]] = {}
    for upper, lower in arrows():
        one, other = upper.rpartition(".")[0], lower.rpartition(".")[0]
        graph.setdefault(one, set()).update({other} - {one})
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_phosd_includes_the_protocol_for_its_chunk_map_only() -> None:
    found = {
        (str(file.relative_to(PHOSD)), str(target.relative_to(HOOK)))
        for file in sources(PHOSD)
        if HOOK not in file.parents
        for name in included(file)
        if HOOK in (target := (file.parent / name).resolve()).parents
    }
    assert found == {(CHUNK_MAP_VIEW, "protocol/chunk_map.h")}
