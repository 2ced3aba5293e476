"""The target programs can fail: a single wrong bit anywhere shows in what they print."""

import random
import subprocess
import sys

import pytest

from tests.support.harness import PROGRAMS, environment, parse

SCRIPT = """
import sys
from gpu import Device, Report, State, read, write
where, offset, bit = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
report = Report()
state = State(Device(), cold_block=64 << 10)
for step in report.steps():
    if step == 15 and where != "nowhere":
        base = {"hot": state.hot, "cold": state.cold[offset % State.PERIOD], "total": state.total}
        address = base[where] + offset
        write(address, bytes([read(address, 1)[0] ^ (1 << bit)]))
    report.tell(step, state.step(step, report.seed))
"""


def values(where: str, offset: int, bit: int) -> dict[int, str]:
    steps = 30  # more than twelve after the flip: by then every byte was looked at
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(steps), where, str(offset), str(bit)],
        env=environment(hooked=False, extra={"PYTHONPATH": str(PROGRAMS), "PHOS_TEST_PACE": "0"}),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return parse(done.stdout)


@pytest.fixture(scope="module")
def right() -> dict[int, str]:
    return values("nowhere", 0, 0)


@pytest.mark.parametrize(
    ("where", "size"), [("hot", 12 * (96 << 10)), ("cold", 64 << 10), ("total", 8)]
)
def test_a_flipped_bit_shows(where: str, size: int, right: dict[int, str]) -> None:
    chance = random.Random(where)
    for _ in range(2):
        wrong = values(where, chance.randrange(size), chance.randrange(8))
        assert {s: wrong[s] for s in range(15)} == {s: right[s] for s in range(15)}
        assert wrong[29] != right[29]
