"""Kernels at random, in CUDA C, with what they are launched with.

An expression is made with the range of its values, so that all accesses are within arrays: a kernel
that faults tells nothing. The ranges here come from how the expression was made; they share nothing
with the analysis that is tested.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SHIFT_BYTES = 1 << 14
"""By how much a pointer may differ from the middle of an array, at most."""
ARRAY_BYTES = (1 << 22) + 2 * SHIFT_BYTES
REACH = 1 << 17
"""Indices are from -REACH to REACH - 1, counted from the middle of an array."""
POINTERS = ("a", "b", "c", "d")
TYPES = {"char": 1, "short": 2, "int": 4, "long long": 8, "int4": 16}


@dataclass(frozen=True)
class Expression:
    text: str
    low: int
    high: int


@dataclass
class Kernel:
    """``numbers`` are the values of ``n``, ``s``, ``m`` (32 bits), ``q`` (64), ``e`` (8) and ``h``
    (16); ``places`` are, for the pointers and ``t.p``, the array and the distance from its middle.
    """

    name: str
    source: str
    numbers: dict[str, int]
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    places: list[tuple[int, int]] = field(default_factory=lambda: [(at, 0) for at in range(5)])


@dataclass
class _Writer:
    random: random.Random
    numbers: dict[str, int]
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    lines: list[str] = field(default_factory=list)
    scope: list[Expression] = field(default_factory=list)
    names: int = 0

    def name(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def line(self, text: str) -> None:
        self.lines.append(text)

    # Expressions.

    def leaf(self) -> Expression:
        r = self.random
        kind = r.randrange(8)
        if kind < 5:
            return r.choice(self.scope)
        if kind == 5:
            value = r.choice((0, 1, 2, 3, 5, 8, 16, 31, -1, -4, 100))
            return Expression(f"({value})", value, value)
        name = r.choice(("n", "s", "m", "e", "h"))
        return Expression(name, self.numbers[name], self.numbers[name])

    def expression(self, depth: int) -> Expression:
        if depth == 0:
            return self.leaf()
        r = self.random
        one, other = self.expression(depth - 1), self.expression(r.randrange(depth))
        made = self._combined(one, other, r.randrange(22))
        if max(-made.low, made.high) >= REACH:
            mask = r.choice((255, 1023, 4095))
            return Expression(f"({made.text} & {mask})", 0, mask)
        return made

    def _combined(self, one: Expression, other: Expression, kind: int) -> Expression:
        r = self.random
        if kind < 3:
            return Expression(
                f"({one.text} + {other.text})", one.low + other.low, one.high + other.high
            )
        if kind == 3:
            return Expression(
                f"({one.text} - {other.text})", one.low - other.high, one.high - other.low
            )
        if kind < 6:
            ends = [x * y for x in (one.low, one.high) for y in (other.low, other.high)]
            return Expression(f"({one.text} * {other.text})", min(ends), max(ends))
        if kind == 6:
            by = r.randrange(1, 5)
            return Expression(f"({one.text} >> {by})", one.low >> by, one.high >> by)
        if kind == 7:
            mask = r.choice((1, 7, 15, 63, 255))
            return Expression(f"({one.text} & {mask})", 0, mask)
        if kind == 8:
            divisor = r.choice((2, 3, 4, 7, 10, 32))
            most = max(abs(one.low), abs(one.high)) // divisor
            return Expression(f"({one.text} / {divisor})", -most, most)
        if kind == 9:
            divisor = r.choice((2, 3, 4, 7, 10, 32))
            low = 0 if one.low >= 0 else 1 - divisor
            return Expression(f"({one.text} % {divisor})", low, divisor - 1)
        if kind == 10:
            return Expression(
                f"min({one.text}, {other.text})", min(one.low, other.low), min(one.high, other.high)
            )
        if kind == 11:
            return Expression(
                f"max({one.text}, {other.text})", max(one.low, other.low), max(one.high, other.high)
            )
        if kind == 12:
            return Expression(
                f"({self.condition()} ? {one.text} : {other.text})",
                min(one.low, other.low),
                max(one.high, other.high),
            )
        if kind == 13:  # wraps at 32 bits
            factor = r.choice((2654435761, 65537, 0x80000001))
            mask = r.choice((255, 4095))
            return Expression(f"(int)(((unsigned){one.text} * {factor}u >> 7) & {mask}u)", 0, mask)
        if kind == 14:  # narrow
            return Expression(f"(int)(short)({one.text} * 77)", -32768, 32767)
        if kind == 15:
            how = r.choice("&|^")
            return Expression(f"(({one.text} {how} {other.text}) & 2047)", 0, 2047)
        if kind == 16:  # at run time
            most = max(abs(one.low), abs(one.high))
            return Expression(f"({one.text} / ({r.choice('nsm')} | 1))", -most, most)
        if kind == 17:  # from memory
            return Expression(f"(int)((unsigned char*)t.p)[{one.text} & 63]", 0, 255)
        if kind == 18:
            return Expression(f"(int)((unsigned){one.text} / 3u & 8191u)", 0, 8191)
        if kind == 20:  # of so many bits
            bits = r.choice((1, 4, 9, 13))
            if r.randrange(2):
                return Expression(f"bits_of({one.text}, {bits})", 0, (1 << bits) - 1)
            half = 1 << (bits - 1)
            return Expression(f"signed_bits_of({one.text}, {bits})", -half, half - 1)
        if kind == 19:  # nothing, unless it is below 0
            low, high = min(other.low, 0), max(other.high, 0)
            return Expression(f"({one.text} >> 31 & {other.text})", low, high)
        high = r.choice((15, 255))
        return Expression(f"(int)((unsigned){one.text} >> {r.choice((8, 16))} & {high}u)", 0, high)

    def condition(self) -> str:
        r = self.random
        one, other = self.leaf(), self.leaf()
        how = r.choice(("<", "<=", ">", ">=", "==", "!="))
        cast = r.choice(("", "", "", "(unsigned)", "(long long)"))
        text = f"{cast}{one.text} {how} {cast}{other.text}"
        if r.random() < 0.2:
            text = f"({text} {r.choice(('&&', '||'))} {self.leaf().text} < {self.leaf().text})"
        return text

    def index(self) -> Expression:
        made = self.expression(self.random.randrange(1, 4))
        if self.random.random() < 0.15:
            wide = f"((long long){made.text} * q)"
            ends = made.low * self.numbers["q"], made.high * self.numbers["q"]
            if max(map(abs, ends)) < REACH:
                return Expression(wide, min(ends), max(ends))
        if self.random.random() < 0.1:
            return Expression(f"(long long)((unsigned){made.text} & 0xffffu)", 0, 0xFFFF)
        return made

    # Statements.

    def pointer(self) -> str:
        r = self.random
        kind = r.randrange(10)
        if kind < 7:
            return r.choice(POINTERS)
        if kind == 7:
            return "t.p"
        if kind == 8:
            return f"({self.condition()} ? {r.choice(POINTERS)} : {r.choice(POINTERS)})"
        return f"({r.choice(POINTERS)} + (q & 31))"

    def element(self) -> str:
        """An lvalue of a type of its own, as an int."""
        r = self.random
        kind = r.choice(("int",) * 5 + ("char", "short", "long long", "int4"))
        pointer = self.pointer() if kind == "int" else r.choice(POINTERS)  # is aligned
        text = f"(({kind}*){pointer})[{self.index().text}]"
        return f"{text}.y" if kind == "int4" else text

    def value(self) -> str:
        """An element, all of whose bytes count: no compiler loads what is not needed."""
        return f"whole({self.element()})"

    def statement(self, depth: int) -> None:
        r = self.random
        kind = r.randrange(12)
        if kind < 3 or depth == 0:
            self.line(f"{self.element()} = {self.value()} + 1;")
        elif kind == 3:
            self.line(f"atomicAdd({self.pointer()} + {self.index().text}, 1);")
        elif kind == 4:
            self.line(f"{self.element()} = {self.leaf().text};")
        elif kind < 8:
            self.line(f"if ({self.condition()}) {{")
            self.nested(depth - 1)
            if r.random() < 0.3:
                self.line("} else {")
                self.nested(depth - 1)
            self.line("}")
        elif kind < 11:
            self.loop(depth)
        else:
            self.walk(depth)

    def nested(self, depth: int) -> None:
        before = len(self.scope)
        for _ in range(self.random.randrange(1, 3)):
            self.statement(depth)
        del self.scope[before:]

    def variable(self) -> None:
        made, name = self.expression(2), self.name()
        self.line(f"int {name} = {made.text};")
        self.scope.append(Expression(name, made.low, made.high))

    def loop(self, depth: int) -> None:
        r = self.random
        start, name = self.expression(1), self.name()
        kind = r.randrange(4)
        count = r.choice((3, 9, 40))
        end = Expression("n", self.numbers["n"], self.numbers["n"])
        before = len(self.scope)
        if kind == 0:
            step = r.choice((1, 1, 2, 5))
            stop = end if r.random() < 0.6 else Expression(f"({start.text} + {count})", 0, 0)
            high = end.high if stop is end else start.high + count
            self.line(f"for (int {name} = {start.text}; {name} < {stop.text}; {name} += {step}) {{")
            self.scope.append(Expression(name, start.low, max(high, start.low)))
            if high - start.low > 1000 * step:
                self.line(f"if ({name} > {start.text} + 100) break;")
        elif kind == 1:
            self.line(f"for (int {name} = {count}; {name} > 0; --{name}) {{")
            self.scope.append(Expression(name, 1, count))
        elif kind == 2:
            self.line(f"for (unsigned {name}u = 0; {name}u != {count}u; ++{name}u) {{")
            self.line(f"int {name} = {name}u;")
            self.scope.append(Expression(name, 0, count))
        else:
            stride = "(int)(blockDim.x * gridDim.x)"
            self.line(f"for (int {name} = v1; {name} < n; {name} += {stride}) {{")
            first = self.scope[0]
            self.scope.append(Expression(name, first.low, max(first.low, end.high)))
        for _ in range(r.randrange(1, 3)):
            self.statement(depth - 1)
        self.line("}")
        del self.scope[before:]

    def walk(self, depth: int) -> None:
        """A pointer that goes on by itself."""
        r = self.random
        name, start = self.name(), self.expression(1)
        if max(abs(start.low), abs(start.high)) > REACH // 2:
            return self.statement(0)
        step = r.choice(("1", "-1", "s", "3"))
        self.line(f"int* p{name} = {self.pointer()} + {start.text};")
        self.line(f"for (int k = 0; k < {r.choice(('n', '7', 's'))}; ++k, p{name} += {step}) {{")
        self.line(f"*p{name} = {r.choice(('k', self.value()))};")
        return self.line("}")


SIGNATURE = (
    "int* a, int* b, int* c, int* d, T t, int n, int s, int m, long long q, signed char e, short h"
)
HEADER = """
struct T { long long pad; int* p; int k; };
__device__ inline int whole(int value) { return value; }
__device__ inline int whole(long long value) { return (int)(value ^ value >> 32); }
__device__ inline int bits_of(int value, int bits) {
    asm("szext.clamp.u32 %0, %0, %1;" : "+r"(value) : "r"(bits));
    return value;
}
__device__ inline int signed_bits_of(int value, int bits) {
    asm("szext.clamp.s32 %0, %0, %1;" : "+r"(value) : "r"(bits));
    return value;
}
#define KEPT(pointer, at) (((volatile int*)(pointer))[at]) // is really stored, and loaded
"""


def kernel(seed: int) -> Kernel:
    """Return the kernel of this seed."""
    r = random.Random(seed)
    numbers = {
        "n": r.choice((0, 1, 7, 50, 100, 257)),
        "s": r.choice((-3, -1, 0, 1, 2, 4, 17)),
        "m": r.choice((-100, 5, 64, 1000)),
        "q": r.choice((-7, -1, 0, 1, 3, 32)),
        "e": r.choice((-100, -3, 0, 7)),
        "h": r.choice((-1000, -2, 1, 300)),
    }
    block = (r.choice((1, 7, 32, 33, 64)), r.choice((1, 1, 2, 3)), 1)
    grid = (r.choice((1, 2, 5)), r.choice((1, 1, 3)), 1)
    writer = _Writer(r, numbers, block, grid)
    writer.names = 1
    writer.line("int v1 = blockIdx.x * blockDim.x + threadIdx.x;")
    writer.scope = [
        Expression("v1", 0, block[0] * grid[0] - 1),
        Expression("(int)threadIdx.x", 0, block[0] - 1),
        Expression("(int)threadIdx.y", 0, block[1] - 1),
        Expression("(int)blockIdx.y", 0, grid[1] - 1),
    ]
    if r.random() < 0.5:
        writer.line("if (v1 >= n) return;")
    for _ in range(r.randrange(0, 3)):
        writer.variable()
    for _ in range(r.randrange(1, 5)):
        writer.statement(2)
    name = f"k{seed}"
    body = "\n".join(writer.lines)
    source = f'extern "C" __global__ void {name}({SIGNATURE}) {{\n{body}\n}}\n'
    return Kernel(name, source, numbers, block, grid)


@dataclass
class _Ordered:
    """Writes statements of which it matters what they read before they write it, and overwrite."""

    random: random.Random
    threads: int
    lines: list[str] = field(default_factory=list)

    def near(self) -> int:
        """A number about which ranges begin to meet."""
        r = self.random
        return r.choice((0, 0, self.threads, 2 * self.threads)) + r.choice((0, 0, 0, -1, 1))

    def offset(self, text: str) -> str:
        return f"({text} + {self.near()})"

    def guard(self) -> str:
        r = self.random
        return r.choice(("", "", "", "if (i < n) ", "if (m > 5) ", "if (i & 1) ", "if (i > 3) "))

    def statement(self) -> None:
        r = self.random
        to, of = r.choice(POINTERS), r.choice(POINTERS)
        match r.randrange(10):
            case 0 | 1:
                text = f"{to}[{self.offset('i')}] = {of}[{self.offset('i')}] + 1;"
            case 2:
                text = f"{to}[i] = {to}[{self.offset('i')}] + 1;"
            case 3:  # fields of elements
                size = r.choice((2, 3, 4))
                one, other = r.randrange(size), r.randrange(size)
                text = f"{to}[i * {size} + {one}] = {of}[i * {size} + {other}] + 1;"
            case 4:  # columns of a matrix
                width, count = r.choice((8, 12)), r.choice((3, 4, 5))
                text = (
                    f"for (int k = 0; k < {count}; ++k) {to}[i * {width} + k + {r.choice((4, 5))}]"
                    f" = {of}[i * {width} + k] + 1;"
                )
            case 5 | 6:  # what the thread has written itself, or only almost
                begin, end = self.offset("i"), r.choice(("", "", " + 1"))
                text = (
                    f"{{ int at = {begin}; {self.guard()}KEPT({to}, at) = i;"
                    f" {r.choice(POINTERS)}[i] = KEPT({to}, at{end}) + 1; }}"
                )
            case 7:  # sums up where it has begun anew, or not
                first = r.choice((f"KEPT({to}, i) = 0;", f"KEPT({to}, i) = 0;", ""))
                step = r.choice(("", "", " + k"))
                text = (
                    f"{{ {first} for (int k = 0; k < n; ++k)"
                    f" KEPT({to}, i{step}) = KEPT({to}, i{step}) + {of}[k]; }}"
                )
            case 8:
                text = f"for (int k = i; k < n; k += {self.threads}) {to}[k] = {of}[k] + 1;"
            case _:
                text = f"atomicAdd({to} + {self.offset('i')}, 1);"
        self.lines.append(self.guard() + text)


def ordered(seed: int) -> Kernel:
    """Return a kernel of this seed whose launch may be such that it can be run again."""
    r = random.Random(f"ordered {seed}")
    numbers = {"n": r.choice((0, 1, 50, 200)), "s": 1, "m": r.choice((5, 64))}
    numbers |= {"q": 1, "e": -1, "h": 0}
    block, grid = (r.choice((1, 32, 33, 64)), 1, 1), (r.choice((1, 2, 5)), 1, 1)
    writer = _Ordered(r, block[0] * grid[0])
    for _ in range(r.choice((1, 1, 2, 3))):
        writer.statement()
    places = [(at, 0) for at in range(5)]
    for at in range(1, 4):
        if r.random() < 0.2:
            sign = r.choice((1, 1, -1))
            places[at] = r.randrange(at), 4 * sign * writer.near() + r.choice((0, 0, 0, 16))
    name = f"i{seed}"
    body = "\n".join(["int i = blockIdx.x * blockDim.x + threadIdx.x;", *writer.lines])
    source = f'extern "C" __global__ void {name}({SIGNATURE}) {{\n{body}\n}}\n'
    return Kernel(name, source, numbers, block, grid, places)
