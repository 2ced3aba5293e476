"""Analyse one module, as a process that can do little: it parses what a user wrote.

    python -m phosd.engine.kernels.worker ORDERS MODULE ANSWER

The three are descriptors of files: JSON (:class:`Orders`), the module, and one that lines of JSON
are appended to (:class:`Line`). It runs when nothing else wants to, with an id that no user has,
without network, and within its limits. It may be killed at any time: what lines there are count.
"""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated

import msgspec
from msgspec import Meta

from phosd.engine.analysis.code import cage, cubin, tools
from phosd.engine.analysis.summary import Summary, cubins, summarise_cubin
from phosd.engine.analysis.table import encode
from phosd.engine.kernels.entry import MOST_TABLE_BYTES, KernelFacts, Name, facts, unknown
from phosd.engine.system import privileges
from phosd.errors import Internal, PhosError, Unsupported

KERNEL_SECONDS = 30.0
"""Processor time that following one kernel may take."""
TOOK_TOO_LONG = "it takes too long"
SEVERAL = "several kernels of this name"


class Orders(msgspec.Struct, frozen=True):
    """What to analyse: those kernels of the module that have these ``names`` (None: all), without
    some, and each on its own if it is ``single``. ``module`` is the hash that the hook gives the
    module.
    """

    module: int
    architecture: int
    names: tuple[str, ...] | None
    without: tuple[str, ...]
    single: bool
    seconds: int
    memory: int
    output: int


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of: that work on ``begun`` kernels begins, the facts of a ``kernel``, ``failed`` with the
    state of the module and why, what is ``missing`` on this machine, and that all is ``done``.
    """

    begun: tuple[Name, ...] = ()
    kernel: Annotated[str, Meta(max_length=4096)] = ""
    facts: KernelFacts | None = None
    failed: str = ""
    missing: str = ""
    hint: str = ""
    why: str = ""
    done: bool = False


class _TooLong(BaseException):
    """A kernel has taken its time. Nothing but this module catches it."""


def main() -> None:
    orders_file, module, answer = map(int, sys.argv[1:4])
    text = os.pread(orders_file, os.fstat(orders_file).st_size, 0)
    orders = msgspec.json.decode(text, type=Orders)
    _confine(orders)
    signal.signal(signal.SIGVTALRM, _too_long)
    image = os.pread(module, os.fstat(module).st_size, 0)
    for line in _analysed(image, orders):
        os.write(answer, msgspec.json.encode(line) + b"\n")


def _confine(orders: Orders) -> None:
    """Load what is needed, then give up what is not."""
    parent = os.getppid()
    tools.keep_open()
    with contextlib.suppress(ImportError):  # it is told where a module is compressed
        import lz4.block  # noqa: F401
        import zstandard  # noqa: F401
    cage.give_way()
    if os.geteuid() == 0:
        one = tools.nobody()
        privileges.become(one, one, ())
    cage.limit(orders.seconds, orders.memory, orders.output)
    cage.confine()
    cage.end_with(parent)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise _TooLong


def _analysed(image: bytes, orders: Orders) -> Iterator[Line]:
    try:
        yield from _kernels(image, orders)
        yield Line(done=True)
    except Unsupported as error:
        yield Line(failed=error.reason or "unreadable-module", why=error.what)
    except Internal as error:
        yield Line(missing=error.what, hint=error.hint)
    except MemoryError:
        yield Line(failed="too-large", why="it needs more memory than a module may")


def _kernels(image: bytes, orders: Orders) -> Iterator[Line]:
    asked = None if orders.names is None else frozenset(orders.names)
    without = frozenset(orders.without)
    found: set[str] = set()
    for code in cubins(image, orders.architecture):
        names = [name for name in cubin.read(code) if asked is None or name in asked]
        for several in found.intersection(names):
            yield Line(kernel=several, facts=unknown(SEVERAL))
        names = [name for name in names if name not in found]
        found.update(names)
        names = [name for name in names if name not in without]
        step = 1 if orders.single else max(1, len(names))
        for at in range(0, len(names), step):
            if _used() > orders.seconds:
                yield Line(failed="too-long", why=f"it takes more than {orders.seconds} s")
                return
            yield from _of_cubin(code, names[at : at + step], orders)


def _of_cubin(code: bytes, names: Sequence[str], orders: Orders) -> Iterator[Line]:
    yield Line(begun=tuple(names))
    summaries = summarise_cubin(code, names)
    left = list(names)
    while left:
        signal.setitimer(signal.ITIMER_VIRTUAL, KERNEL_SECONDS)
        try:
            summary = next(summaries, None)
            if summary is None:
                return
            name = summary.kernel.name
            known = facts(summary, _table(summary, orders))
        except _TooLong:
            # The generator has ended with it: the kernels behind this one are begun anew.
            name, known = left[0], unknown(TOOK_TOO_LONG)
            summaries = summarise_cubin(code, left[1:])
        except (MemoryError, RecursionError):
            name, known = left[0], unknown("too large")
            summaries = summarise_cubin(code, left[1:])
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        left.remove(name)
        yield Line(kernel=name, facts=known)


def _table(summary: Summary, orders: Orders) -> bytes:
    try:
        table = encode(orders.module, orders.architecture, [summary])
    except PhosError:
        return b""  # nothing of it is of use to the hook
    return table if len(table) <= MOST_TABLE_BYTES else b""


def _used() -> float:
    """Return the processor time of this process and its tools, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
