"""Implement ``phos analyse``: say what the kernels of a module access."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phosd.cli.settings import Settings, command

if TYPE_CHECKING:
    from phosd.engine.analysis.summary import Summary


@command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--architecture",
    type=click.IntRange(min=1),
    default=90,
    show_default=True,
    help="Of which GPUs the code is looked at: 90 is sm_90.",
)
@click.option("--kernel", "names", multiple=True, help="Only the kernel of this (mangled) name.")
def analyse(settings: Settings, file: Path, architecture: int, names: tuple[str, ...]) -> None:
    """Say what the kernels in FILE read and write, from their machine code: in a cubin, a fat
    binary, PTX, or a library that has fat binaries inside.

    READ and WRITTEN have the offsets of the parameters through which memory is read and written; a
    * stands for one that is chosen by an index.
    RANGES says of which accesses a launch tells the range. UNKNOWN says why it is not known what is
    accessed: such a kernel counts as one that reads and writes everything.
    AGAIN says which launches may be run again, since they overwrite nothing that they read: all
    (always), none in which a thread gets to where it does (never), or that depends on the launch.

    It needs nvdisasm: `pip install 'phosd[analysis]'`, or CUDA's toolkit in PATH.

    \b
    Examples:
      phos analyse kernels.cubin
      phos analyse kernels.cubin --kernel _Z3addPfPKfi
      phos analyse libtorch_cuda.so --json | jq -r .unknown_writes[] | sort | uniq -c
    """
    from phosd.engine.analysis.summary import summarise

    rows = [_row(one) for one in summarise(file.read_bytes(), architecture, names or None)]
    settings.rows(
        rows,
        {
            "READ": lambda row: _offsets(row, "read"),
            "WRITTEN": lambda row: _offsets(row, "written"),
            "RANGES": _ranges,
            "AGAIN": lambda row: row["idempotent"],
            "UNKNOWN": lambda row: "\n".join(
                sorted({*row["unknown_reads"], *row["unknown_writes"]})
            ),
            "KERNEL": lambda row: row["kernel"],
        },
        empty=f"{file} has no {'such ' if names else ''}kernels for sm_{architecture}",
    )
    if rows and not settings.json:
        settings.say("")
        settings.facts(_totals(rows))


def _row(summary: "Summary") -> dict[str, Any]:
    from phosd.engine.analysis.idempotency import of_kernel
    from phosd.engine.analysis.opcodes import Use

    again = of_kernel(summary)
    return {
        "kernel": summary.kernel.name,
        "parameter_bytes": summary.kernel.size,
        "roles": {str(at): use.value for at, use in sorted(summary.roles.items(), key=_order)},
        "unknown_reads": sorted(summary.unknown(Use.READ)),
        "unknown_writes": sorted(summary.unknown(Use.WRITTEN)),
        "ranges_read": summary.computed(Use.READ),
        "ranges_written": summary.computed(Use.WRITTEN),
        "idempotent": again.idempotent.value,
        "idempotent_why": sorted(again.why),
    }


def _order(role: tuple[int | str, object]) -> tuple[bool, int]:
    """Order roles by offset, with that of whichever pointer at the end."""
    return isinstance(role[0], str), role[0] if isinstance(role[0], int) else 0


def _offsets(row: dict[str, Any], use: str) -> str:
    return " ".join(at for at, role in row["roles"].items() if role in (use, "both"))


def _ranges(row: dict[str, Any]) -> str:
    known = [use for use in ("read", "written") if row[f"ranges_{use}"]]
    return "all" if len(known) == 2 else " ".join(known)


def _totals(rows: list[dict[str, Any]]) -> dict[str, str]:
    reasons = Counter(
        reason for row in rows for reason in {*row["unknown_reads"], *row["unknown_writes"]}
    )
    again = Counter(row["idempotent"] for row in rows)
    return {
        "kernels": str(len(rows)),
        "roles": _share(rows, (not row["unknown_reads"] + row["unknown_writes"] for row in rows)),
        "write roles": _share(rows, (not row["unknown_writes"] for row in rows)),
        "ranges": _share(rows, (_ranges(row) == "all" for row in rows)),
        "write ranges": _share(rows, (row["ranges_written"] for row in rows)),
        "again": ", ".join(f"{kind} ({count})" for kind, count in again.most_common()),
        "unknown": ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common()),
    }


def _share(rows: list[dict[str, Any]], known: Iterable[bool]) -> str:
    count = sum(known)
    return f"{count} ({count / len(rows):.0%})"
