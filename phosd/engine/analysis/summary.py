"""Sum up what a module's kernels access: which parameters they read through, and write through.

A *role* is what is done with the memory that a parameter points to. Roles hold for every launch;
what a particular one accesses, and in which ranges, ``provenance`` and ``ranges`` tell from its
parameters.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phosd.engine.analysis.code import cubin
from phosd.engine.analysis.code.cubin import Kernel
from phosd.engine.analysis.code.disassembly import Instruction, disassemble
from phosd.engine.analysis.code.images import Entry, Form, entries
from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.code.tools import Tool, run
from phosd.engine.analysis.provenance import Origin, computed, origin
from phosd.engine.analysis.thread.control_flow import Unknown
from phosd.engine.analysis.thread.follow import follow
from phosd.engine.analysis.thread.followed import Access, Followed
from phosd.errors import Unsupported

ANY = "*"
"""Instead of an offset: a pointer that the kernel picks from its parameters by an index."""
_TARGET = re.compile(rb"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)


@dataclass(frozen=True)
class Summary:
    """What is known of a kernel: nothing, for ``reason``, or all of its accesses. ``roles`` are by
    the offset of a parameter, or :data:`ANY` for whichever of the pointers among them.
    """

    kernel: Kernel
    reason: str = ""
    followed: Followed | None = None
    accesses: tuple[tuple[Access, Origin], ...] = ()
    roles: Mapping[int | str, Use] = field(default_factory=dict)

    def unknown(self, use: Use) -> frozenset[str]:
        """Return why the memory that is read, or written, is not known; nothing if it is."""
        if self.reason:
            return frozenset((self.reason,))
        found = frozenset[str]()
        for access, came in self.accesses:
            if access.use in (use, Use.BOTH):
                found |= came.unknown
        return found

    def decided(self) -> bool:
        """Return whether something is unknown, and some launches' parameters rule out all of it."""
        unknown = [came.decided for _, came in self.accesses if came.unknown]
        return bool(unknown) and all(unknown)

    def computed(self, use: Use) -> bool:
        """Return whether all addresses that are read, or written, come from parameters, thread and
        block indices and iterations alone: a launch tells their ranges.
        """
        return self.followed is not None and all(
            computed(self.followed, access)
            for access, _ in self.accesses
            if access.use in (use, Use.BOTH)
        )


def summarise(
    image: bytes, architecture: int, names: Collection[str] | None = None
) -> Iterator[Summary]:
    """Yield a summary of each kernel of a module, or of those with these names. Raises as
    :func:`cubins` does.
    """
    for code in cubins(image, architecture):
        yield from summarise_cubin(code, names)


def cubins(image: bytes, architecture: int) -> Iterator[bytes]:
    """Yield a module's cubins that a GPU of an architecture runs, or if it has none, those that are
    made of its PTX.

    Raises :class:`Unsupported` for what is no module, and :class:`~phosd.errors.Internal` if a tool
    is missing.
    """
    found = list(entries(image))
    cubins = [one for one in found if one.form is Form.CUBIN]
    best = max((one.architecture for one in cubins if _runs(one, architecture)), default=0)
    chosen = [one for one in cubins if one.architecture in (0, best)]
    if not chosen:
        chosen = [one for one in found if one.form is Form.PTX]
    if not chosen:
        others = sorted({one.architecture for one in found})
        raise Unsupported(
            f"the module has no code for sm_{architecture}",
            hint=f"it has code for {', '.join(f'sm_{other}' for other in others) or 'none'}",
            reason="other-architecture",
        )
    for entry in chosen:
        yield _compiled(entry, architecture)


def _runs(entry: Entry, architecture: int) -> bool:
    """Return whether a GPU runs a cubin: one for its own architecture, or for an earlier one of the
    same generation. The driver takes the latest.
    """
    generation = architecture // 10 * 10
    return generation <= entry.architecture <= architecture


def _compiled(entry: Entry, architecture: int) -> bytes:
    code = entry.read()
    if entry.form is Form.CUBIN:
        return code
    target = _TARGET.search(code)
    name = target[1].decode() if target else ""
    if name.rstrip("af") != f"sm_{architecture}":
        name = f"sm_{architecture}"
    return run(Tool.PTXAS, ["--gpu-name", name], code)


def summarise_cubin(image: bytes, names: Collection[str] | None) -> Iterator[Summary]:
    """Yield a summary of each kernel of a cubin, or of those with these names, in the order in
    which ``cubin.read`` has them.
    """
    kernels = cubin.read(image)
    symbols: list[int] = []
    if names is not None:
        kernels = {name: kernel for name, kernel in kernels.items() if name in names}
        symbols = cubin.symbols_of(image, kernels.keys())
        if not symbols:
            return
    try:
        functions = {one.name: one for one in disassemble(image, symbols).functions}
    except Unsupported as error:
        for kernel in kernels.values():
            yield Summary(kernel, error.what)
        return
    for name, kernel in kernels.items():
        function = functions.get(name)
        yield Summary(kernel, "no code") if function is None else of_code(kernel, function.code)


def of_code(kernel: Kernel, code: Sequence[Instruction]) -> Summary:
    """Return the summary of a kernel's machine code."""
    try:
        followed = follow(kernel, code)
    except Unknown as error:
        return Summary(kernel, error.reason)
    found = ((access, origin(followed, access)) for access in followed.accesses)
    accesses = tuple((access, came) for access, came in found if came.is_global)
    followed.accesses = [access for access, _ in accesses]
    roles: dict[int | str, Use] = {}
    for access, came in accesses:
        for offset in (*sorted(came.parameters), *((ANY,) if came.anywhere else ())):
            before = roles.get(offset, access.use)
            roles[offset] = access.use if before is access.use else Use.BOTH
    return Summary(kernel, "", followed, accesses, roles)
