"""Write docs/design/driver.md, which shows the table of what the driver does.

python -m tests.driver.page
"""

from collections.abc import Iterator

from tests.driver.behaviours import SECTIONS, Behaviour, Section
from tests.support.checkout import ROOT

PAGE = ROOT / "docs/design/driver.md"
SAME = "the same"
INTRODUCTION = """\
# The driver's behaviours

This page lists what NVIDIA's driver does that code of phosd relies on, and that was measured, as
its documentation leaves it open. `python -m tests.driver.page` writes the page, from the table in
`tests/driver/behaviours.py`.

Each row has a probe, a test that asks the driver alone, without the hook and without phosd: that of
`states-in-order` is `test_states_in_order`, in the file above its table. `make test` asks
[the software GPU](../reference/softgpu.md), which is so held to the same table; the last column
says where it differs. `make test-gpu` asks the real driver. *Seen* are the versions of the driver
with which the probe has passed, or the same was measured.

## A new version of the driver

1. `PHOS_GPU=real .venv/bin/python -m pytest tests/driver`, as root, on a machine with that driver.
   Rows for two GPUs are skipped where there is one.
2. A probe that fails says what the driver does instead, and its row which code has to learn it. The
   code asks the driver, or takes what it answers, and does not look at the number of its version.
3. The end of the run lists the rows that do not have this version yet: add it to them.
4. `python -m tests.driver.page`.

A behaviour that new code relies on gets a row first, and a probe that fails where the driver does
otherwise.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *(line for each in SECTIONS for line in _section(each))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    yield f"Probes: `{section.module}`"
    yield ""
    yield "| row | the driver | relied on by | seen | the software GPU |"
    yield "| --- | --- | --- | --- | --- |"
    yield from map(_row, section.rows)
    yield ""


def _row(row: Behaviour) -> str:
    says = row.says if row.gpus == 1 else f"{row.says} ({row.gpus} GPUs)"
    files = ", ".join(f"`{path}`" for path in row.relied_on_by)
    seen = ", ".join(row.seen) or "not yet"
    return f"| `{row.id}` | {says} | {files} | {seen} | {row.software or SAME} |"


if __name__ == "__main__":
    PAGE.write_text(page())
