"""Encode one kernel for ``table``: what its addresses are made of, as a list of nodes.

Each term and each atom of the analysis becomes a node, once, after those that it refers to. What
``evaluation`` looks up while it evaluates is written down here: which alternatives are decided at
an access, which conditions limit a loop, what each iteration adds.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from phosd.engine.analysis.alternatives import alternatives, depth_of
from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.provenance import POINTER_BYTES, Origin
from phosd.engine.analysis.table_layout import (
    ACCESS,
    CONDITION,
    FACTOR,
    FROM_ANY_WORD,
    HOWS,
    INPUT,
    KEY,
    KIND,
    LOOP,
    MAX_ACCESSES,
    MAX_NODES,
    NODE,
    NONE,
    READ_FIRST,
    ROLE,
    UNKNOWN_ORIGIN,
    USES,
    packed,
)
from phosd.engine.analysis.table_pointers import Nodes, found_pointers, roles_of_words
from phosd.engine.analysis.thread.followed import Access, Followed
from phosd.engine.analysis.values.conditions import Compare, Condition, Facts, alternative
from phosd.engine.analysis.values.terms import (
    GREATEST,
    Atom,
    Kind,
    Monomial,
    Term,
    TooLarge,
    carried_by,
    modulo,
)
from phosd.engine.analysis.values.words import ELSEWHERE

_DIMENSIONS = [name for name in GREATEST if name.startswith(("ntid", "nctaid"))]
_THREADS = ("tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "laneid")
_LONG = range(-(1 << 63), 1 << 63)


def encode_body(
    followed: Followed, accesses: Sequence[tuple[Access, Origin]], roles: Mapping[Any, Use]
) -> bytes:
    """Return the body of a kernel. Raises :class:`TooLarge`."""
    try:
        return _Body(followed).encode(accesses, roles_of_words(accesses, roles))
    except RecursionError as error:  # a chain of very many loops
        raise TooLarge from error


def encode_roles(accesses: Sequence[tuple[Access, Origin]], roles: Mapping[Any, Use]) -> bytes:
    """Return the body of a kernel of which only the roles are told. Raises :class:`TooLarge`."""
    return _Body(None).encode([], roles_of_words(accesses, roles))


class _Body:
    def __init__(self, followed: Followed | None) -> None:
        self._followed = followed
        self._inputs: dict[tuple[int, int], int] = {}
        self._nodes: list[list[int]] = []
        self._factors: list[bytes] = []
        self._conditions: list[tuple[int, int, int, int, int, int, int]] = []
        self._keys: list[tuple[int, int, int, int]] = []
        self._loops: list[tuple[int, int]] = []
        self._refs: list[int] = []
        self._lists: dict[tuple[int, ...], int] = {}
        self._terms: dict[Term, int] = {}
        self._products: dict[Monomial, int] = {}
        self._atoms: dict[Atom, int | None] = {}
        self._compares: dict[tuple[Condition, bool], int] = {}
        self._key_of: dict[tuple[Any, ...], int] = {}
        self._loop_of: dict[int, int] = {}
        self._pending: list[int] = []

    def encode(self, accesses: Sequence[tuple[Access, Origin]], roles: Mapping[Any, Use]) -> bytes:
        if len(accesses) > MAX_ACCESSES:
            raise TooLarge
        rows = [self._access(access, came) for access, came in accesses]
        # Which choices are decided at an access: of all keys, which are known only now.
        decided = [self._decided(access.facts) for access, _ in accesses]
        # Those in a row of which the same is known are evaluated at once.
        alike = sorted(range(len(rows)), key=lambda at: (rows[at][4:7], decided[at]))
        role_rows = [
            (self._input(at, POINTER_BYTES) if isinstance(at, int) else NONE, USES[use])
            for at, use in roles.items()
        ]
        pointers = found_pointers(
            [row[0] for row in rows],
            [node for row in self._conditions for node in row[3:7]],
            Nodes(self._nodes, self._factors, self._refs),
            {number: size for (_, size), number in self._inputs.items()},
        )
        order = sorted(self._inputs.values(), key=lambda number: number in pointers)
        place = {number: new for new, number in enumerate(order)}
        for node in self._nodes:
            if node[0] == KIND["Parameter"]:
                if node[3] in pointers:
                    node[0] = KIND["Pointer"]
                node[3] = place[node[3]]
        packed_accesses = []
        for at in alike:
            address, size, use, flags, facts, choices, loops, origins = rows[at]
            lists = (facts, decided[at], choices, loops, [place[one] for one in origins])
            fields = [field for one in lists for field in self._list(one)]
            packed_accesses.append(ACCESS.pack(address, size, use, flags, 0, *fields))
        inputs = sorted(self._inputs, key=lambda one: place[self._inputs[one]])
        parts = [
            [ROLE.pack(at if at == NONE else place[at], use) for at, use in role_rows],
            [INPUT.pack(*one) for one in inputs],
            [NODE.pack(*node) for node in self._nodes],
            self._factors,
            [CONDITION.pack(*one, 0) for one in self._conditions],
            [KEY.pack(*one) for one in self._keys],
            [LOOP.pack(*one) for one in self._loops],
            packed_accesses,
            [struct.pack("<I", one) for one in self._refs],
        ]
        return packed(parts, compared=len(inputs) - len(pointers))

    # Accesses.

    def _access(
        self, access: Access, came: Origin
    ) -> tuple[int, int, int, int, list[int], list[int], list[int], list[int]]:
        flags = UNKNOWN_ORIGIN * bool(came.unknown) | FROM_ANY_WORD * came.anywhere
        use = USES[access.use] & ~(READ_FIRST * access.after_write)
        if access.through_map:  # the offset of a tensor map, which is no pointer
            return (NONE, access.size, use, flags | FROM_ANY_WORD, [], [], [], [])
        head = (access.size, use, flags)
        origins = [self._input(at, POINTER_BYTES) for at in sorted(came.parameters)]
        try:
            address = self._term(modulo(access.address, 64))
            choices, loops = alternatives(self._known(), access.address)
            keys = [self._key(key, count) for key, count in choices.items()]
            numbers = [self._loop_of[header] for header in loops]
        except _Unfit:
            return (NONE, *head, [], [], [], origins)
        facts = [self._fact(fact) for fact in sorted(access.facts, key=depth_of)]
        self._finish_loops()
        return (address, *head, [one for one in facts if one is not None], keys, numbers, origins)

    def _decided(self, facts: Facts) -> list[int]:
        found = []
        for key, number in self._key_of.items():
            known = alternative(key, facts)
            if known is not None:
                found += [number, known]
        return found

    def _known(self) -> Followed:
        assert self._followed is not None  # there are no accesses otherwise
        return self._followed

    def _input(self, offset: int, size: int) -> int:
        return self._inputs.setdefault((offset, size), len(self._inputs))

    def _list(self, values: list[int]) -> tuple[int, int]:
        """Return where these values are among the refs, and how many they are."""
        key = tuple(values)
        at = self._lists.get(key)
        if at is None:
            at = self._lists[key] = len(self._refs)
            self._refs += values
        return at, len(values)

    # Nodes.

    def _node(
        self,
        kind: str,
        *,
        bits: int = 0,
        one: int = 0,
        other: int = 0,
        of: tuple[int, int] = (0, 0),
        low: int = 0,
        high: int = 0,
    ) -> int:
        if len(self._nodes) == MAX_NODES:
            raise TooLarge
        if low not in _LONG or high not in _LONG or of[1] >= 1 << 16:
            raise _Unfit
        self._nodes.append([KIND[kind], bits, of[1], one, of[0], other, low, high])
        return len(self._nodes) - 1

    def _term(self, term: Term) -> int:
        """Return the node of a term: that of its only atom, or a sum."""
        if (atom := term.atom) is not None:
            return self._atom(atom)
        known = self._terms.get(term)
        if known is not None:
            return known
        parts = [
            (factor, self._product(monomial)) for monomial, factor in term.parts.items() if monomial
        ]
        constant = term.parts.get((), 0)
        if not -(1 << 127) <= constant < 1 << 127 or any(one not in _LONG for one, _ in parts):
            raise _Unfit
        at = len(self._factors)
        self._factors += [FACTOR.pack(factor, node, 0) for factor, node in parts]
        low = constant & 0xFFFFFFFFFFFFFFFF
        low -= (low >> 63) << 64
        made = self._node("Sum", of=(at, len(parts)), low=low, high=constant >> 64)
        self._terms[term] = made
        return made

    def _product(self, monomial: Monomial) -> int:
        if len(monomial) == 1:
            return self._atom(monomial[0])
        known = self._products.get(monomial)
        if known is None:
            of = self._list([self._atom(atom) for atom in monomial])
            known = self._products[monomial] = self._node("Product", of=of)
        return known

    def _atom(self, atom: Atom) -> int:
        if atom in self._atoms:
            known = self._atoms[atom]
            if known is None:  # it is made of itself
                raise _Unfit
            return known
        self._atoms[atom] = None
        try:
            made = self._atoms[atom] = self._new(atom)
        except _Unfit:
            del self._atoms[atom]
            raise
        return made

    def _new(self, atom: Atom) -> int:
        match atom.kind, atom.args:
            case Kind.PARAMETER, (offset, size):
                return self._node("Parameter", one=self._input(offset, size))
            case Kind.DIMENSION, (name,):
                return self._node("Dimension", one=_DIMENSIONS.index(name))
            case Kind.THREAD, (name,):
                return self._node("Thread", one=_THREADS.index(name))
            case Kind.SIGNED, (width, term):
                return self._word(term, width, signed=True)
            case Kind.UNSIGNED, (width, term):
                return self._word(term, width, signed=False)
            case Kind.REMAINDER, (term, power):
                return self._word(term, power.bit_length() - 1, signed=False)
            case Kind.QUOTIENT, (term, divisor):
                return self._node("Quotient", one=self._term(term), low=divisor)
            case Kind.COMMON, ((one, other),):
                low = atom.range[1] if atom.range else (1 << 32) - 1
                return self._node("Common", one=self._term(one), other=self._term(other), low=low)
            case Kind.CHOICE, (key, terms) if key[0] == ELSEWHERE:
                return self._node("Elsewhere", one=self._term(terms[0]))
            case Kind.CHOICE, (key, terms):
                nodes = [self._term(term) for term in terms]
                number = self._key(key, len(terms))
                return self._node("Choice", one=number, of=self._list(nodes))
            case Kind.EXTREME, (which, terms):
                of = self._list([self._term(term) for term in terms])
                return self._node("Greatest" if which == "max" else "Least", of=of)
            case Kind.LOOP, (header, _, width):
                return self._carried(atom, header, width)
        if atom.range is None or atom.range[1] - atom.range[0] >= 1 << 31:
            return self._node("Anything")
        return self._node("Anything", bits=1, low=atom.range[0], high=atom.range[1])

    def _word(self, term: Term, width: int, *, signed: bool) -> int:
        try:
            inner = self._term(term)
        except _Unfit:
            inner = self._term(modulo(term, width))
        return self._node("Word", bits=width, one=inner, low=-(1 << (width - 1)) if signed else 0)

    def _carried(self, atom: Atom, header: int, width: int) -> int:
        followed = self._known()
        carried = followed.carried[atom]
        initial = self._term(carried.initial)
        step = carried.step(atom, followed.loops[header], width)
        each = NONE
        if step is not None:
            try:
                each = self._term(modulo(step, width))
            except _Unfit:
                each = NONE  # anything
        loop = self._loop_of.get(header)
        if loop is None:
            loop = self._loop_of[header] = len(self._loops)
            self._loops.append((0, 0))
            self._pending.append(header)
        return self._node("Carried", bits=width, one=initial, other=each, of=(loop, 0))

    # Conditions.

    def _key(self, key: tuple[Any, ...], count: int) -> int:
        known = self._key_of.get(key)
        if known is not None:
            if self._keys[known][2] != count:
                raise _Unfit
            return known
        number = self._key_of[key] = len(self._keys)
        self._keys.append((0, 0, count, 0))
        if key[0] == "if":
            condition = self._fact(key[1])
            if condition is not None:
                self._keys[number] = (1, condition, 2, 0)
        elif key[0] == "meet":
            ways = self._known().met[key[1]]
            if len(ways) == count:
                lists = [
                    self._list([one for fact in way if (one := self._fact(fact)) is not None])
                    for way in ways
                ]
                at, _ = self._list([field for one in lists for field in one])
                self._keys[number] = (2, at, count, 0)
        return number

    def _fact(self, fact: Condition) -> int | None:
        """Return the condition, or None if nothing follows from it."""
        if isinstance(fact, bool):
            return self._condition((int(fact), 0, 1, *self._nothing()), (fact, True))
        if not isinstance(fact, Compare):
            return None
        known = self._compares.get((fact, True))
        if known is not None:
            return known
        try:
            words = [self._extended(fact, term) for term in (fact.one, fact.other)]
            plain = words
            if not fact.signed and fact.how not in ("EQ", "NE"):
                plain = [self._term(fact.one), self._term(fact.other)]
        except _Unfit:
            return None
        return self._condition(
            (HOWS.index(fact.how), fact.signed, fact.width, *plain, *words), (fact, True)
        )

    def _nothing(self) -> tuple[int, int, int, int]:
        zero = self._term(Term({}))
        return zero, zero, zero, zero

    def _extended(self, fact: Compare, term: Term) -> int:
        atoms = self._known().atoms
        try:
            extend = atoms.signed if fact.signed else atoms.unsigned
            return self._term(extend(fact.width, term))
        except TooLarge:  # no address has such an atom
            return self._word(term, fact.width, signed=fact.signed)

    def _condition(self, row: tuple[int, ...], key: tuple[Condition, bool]) -> int:
        how, signed, width, *nodes = row
        one, other, word_of_one, word_of_other = nodes
        self._conditions.append((how, int(signed), width, one, other, word_of_one, word_of_other))
        self._compares[key] = len(self._conditions) - 1
        return self._compares[key]

    def _finish_loops(self) -> None:
        """Add what holds whenever a loop goes on, which may lead to other loops."""
        while self._pending:
            header = self._pending.pop()
            followed = self._known()
            changes = followed.loops[header].changes() - {carried_by(header)}
            rows = []
            for fact in followed.again[header]:
                # It is about the iteration before: what else it tells of must still be the same.
                if isinstance(fact, Compare) and not (fact.one.born | fact.other.born) & changes:
                    row = self._limit(fact)
                    if row is not None:
                        rows.append(row)
            self._loops[self._loop_of[header]] = self._list(rows)

    def _limit(self, fact: Compare) -> int | None:
        known = self._compares.get((fact, False))
        if known is not None:
            return known
        try:
            nodes = [self._term(fact.one), self._term(fact.other)]
        except _Unfit:
            return None
        row = (HOWS.index(fact.how), int(fact.signed), fact.width, *nodes, *nodes)
        return self._condition(row, (fact, False))


class _Unfit(Exception):
    """A number or a list has no place in a table."""
