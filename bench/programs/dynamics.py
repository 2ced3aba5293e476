"""Simulate atoms with Lennard-Jones forces by numba-cuda, and append their places to a file.

    python dynamics.py [--side N] [--every N]

Velocity Verlet in a periodic box with cells of atoms, as molecular dynamics programs have them. A
trajectory (one frame each ``--every`` steps) goes to a file of this process in the folder for
temporary files.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy
from jitted import numba_cuda
from lines import print_lines

cuda = numba_cuda()

_SPACING, _STEP = 1.2, 0.002
_MOST = 16
"""Atoms in a cell, at most."""
_THREADS = 128


@cuda.jit
def sort_in(places, cells, counts, side):  # type: ignore[no-untyped-def]
    """Put each cell's atoms into it. One thread a cell looks at all in order, so that the order of
    sums, and with it each bit, is the same in each run.
    """
    cell = cuda.grid(1)
    if cell >= side * side * side:
        return
    found = 0
    for atom in range(places.shape[0]):
        x = int(places[atom, 0] / 2.4) % side
        y = int(places[atom, 1] / 2.4) % side
        z = int(places[atom, 2] / 2.4) % side
        if (x * side + y) * side + z == cell and found < _MOST:
            cells[cell, found] = atom
            found += 1
    counts[cell] = found


@cuda.jit
def push(places, speeds, forces, cells, counts, side, box):  # type: ignore[no-untyped-def]
    """Compute the force on each atom, and its speed after the second half of the step."""
    atom = cuda.grid(1)
    if atom >= places.shape[0]:
        return
    own_x, own_y, own_z = places[atom, 0], places[atom, 1], places[atom, 2]
    pushed_x = pushed_y = pushed_z = 0.0
    for near in range(27):
        x = (int(own_x / 2.4) + near // 9 - 1) % side
        y = (int(own_y / 2.4) + near // 3 % 3 - 1) % side
        z = (int(own_z / 2.4) + near % 3 - 1) % side
        cell = (x * side + y) * side + z
        for other in range(counts[cell]):
            at = cells[cell, other]
            if at != atom:
                dx = own_x - places[at, 0]
                dy = own_y - places[at, 1]
                dz = own_z - places[at, 2]
                dx -= box * round(dx / box)
                dy -= box * round(dy / box)
                dz -= box * round(dz / box)
                apart = dx * dx + dy * dy + dz * dz
                if apart < 5.76:
                    sixth = 1.0 / (apart * apart * apart)
                    size = 24.0 * sixth * (2.0 * sixth - 1.0) / apart
                    pushed_x += size * dx
                    pushed_y += size * dy
                    pushed_z += size * dz
    forces[atom, 0], forces[atom, 1], forces[atom, 2] = pushed_x, pushed_y, pushed_z
    for axis in range(3):
        speeds[atom, axis] += 0.5 * _STEP * forces[atom, axis]


@cuda.jit
def move(places, speeds, forces, box):  # type: ignore[no-untyped-def]
    """Make the first half of a step, and move each atom."""
    atom = cuda.grid(1)
    if atom < places.shape[0]:
        for axis in range(3):
            speeds[atom, axis] += 0.5 * _STEP * forces[atom, axis]
            places[atom, axis] = (places[atom, axis] + _STEP * speeds[atom, axis]) % box


def energies(side: int, every: int) -> Iterator[float]:
    """Yield the sum of the squares of all speeds after each ten steps."""
    cells_wide = side // 2
    box = cells_wide * 2 * _SPACING
    start = numpy.stack(numpy.meshgrid(*[numpy.arange(side) * _SPACING + 0.1] * 3), -1)
    places = cuda.to_device(start.reshape(-1, 3))
    count = len(places)
    speeds = cuda.to_device(numpy.random.default_rng(1).normal(size=(count, 3)))
    forces = cuda.to_device(numpy.zeros((count, 3)))
    cells = cuda.to_device(numpy.zeros((cells_wide**3, _MOST), numpy.int32))
    counts = cuda.to_device(numpy.zeros(cells_wide**3, numpy.int32))
    atoms, boxes = -(-count // _THREADS), -(-(cells_wide**3) // _THREADS)
    frames = Path(tempfile.gettempdir(), f"phos-dynamics-{os.getpid()}.frames")
    with frames.open("wb") as trajectory:
        for number in range(1 << 30):
            for _ in range(10):
                move[atoms, _THREADS](places, speeds, forces, box)
                sort_in[boxes, _THREADS](places, cells, counts, cells_wide)
                push[atoms, _THREADS](places, speeds, forces, cells, counts, cells_wide, box)
            if number % every == 0:
                trajectory.write(places.copy_to_host().tobytes())
                trajectory.flush()
            yield float(numpy.square(speeds.copy_to_host()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=24, help="atoms along an edge, at the start")
    parser.add_argument("--every", type=int, default=10)
    arguments = parser.parse_args()
    print_lines(energies(arguments.side, arguments.every))


if __name__ == "__main__":
    main()
