"""Group and join the columns of a mapped Arrow file on the GPU by CuPy; results go to Parquet.

    python columns.py [--rows N]

The files are among the temporary ones. Memory on the GPU grows and goes back to the driver, as a
query engine's does.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cupy
import numpy
import pyarrow
from lines import print_lines
from pyarrow import parquet

_SHOPS, _KEYS = 500, 100_000


def _written(rows: int, path: Path) -> Any:
    """Write a table to an Arrow file, and return the file's, which stays mapped."""
    chance = numpy.random.default_rng(1)
    table = pyarrow.table(
        {
            "key": chance.integers(0, _KEYS, rows),
            "shop": chance.integers(0, _SHOPS, rows),
            "cents": chance.integers(0, 100_000, rows),
        }
    )
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=1 << 20)
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


def sums(rows: int) -> Iterator[float]:
    base = Path(tempfile.gettempdir(), f"phos-columns-{os.getpid()}")
    table = _written(rows, base.with_suffix(".arrow"))
    known = cupy.asarray(numpy.random.default_rng(2).permutation(2 * _KEYS)[: _KEYS // 2])
    known = cupy.sort(known)
    totals = cupy.zeros(_SHOPS, cupy.int64)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    fields = [("step", pyarrow.int64()), ("shop", pyarrow.int64()), ("sum", pyarrow.int64())]
    with parquet.ParquetWriter(base.with_suffix(".parquet"), pyarrow.schema(fields)) as results:
        for number in range(1 << 30):
            with streams[number % 2]:
                key, shop, cents = (
                    cupy.asarray(column.chunk(number % column.num_chunks).to_numpy())
                    for column in (table["key"], table["shop"], table["cents"])
                )
                kept = cents % 7 != number % 7
                key, shop, cents = key[kept], shop[kept], cents[kept]
                place = cupy.minimum(cupy.searchsorted(known, key), len(known) - 1)
                joined = known[place] == key
                found = cupy.zeros(_SHOPS, cupy.int64)
                cupy.add.at(found, shop[joined], cents[joined])
                totals = (totals * 3 + found) % 1_000_003
                best = cupy.argsort(found)[-10:]
                host, shops = cupy.asnumpy(totals), cupy.asnumpy(best)
            columns = [numpy.full(10, number), shops, host[shops]]
            results.write_table(pyarrow.table(columns, names=[name for name, _ in fields]))
            if number % 6 == 5:
                cupy.get_default_memory_pool().free_all_blocks()
            yield float(host @ numpy.arange(_SHOPS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8 << 20)
    print_lines(sums(parser.parse_args().rows))
