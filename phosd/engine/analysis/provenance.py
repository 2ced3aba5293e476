"""Say which pointers an address was computed from.

An address is a pointer plus something. A pointer is a 64-bit number that is added as it is: not
multiplied, not extended from 32 bits, not a part of something. If all such numbers in an address
come from parameters, the address is in the memory that one of them points to, as C++ demands of
pointers; which of them is a pointer is seen from their values, when the kernel is launched.

Where two halves of a number were not found to be one, the pointer may be any number that the upper
half was made from, but for what is multiplied, if the lower half was made from it, too.
There is no memory below 4 GiB: a lower half alone is no pointer.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from phosd.engine.analysis.thread.followed import Access, Followed
from phosd.engine.analysis.thread.moves import SHARED_AT
from phosd.engine.analysis.thread.step import PARAMETERS_AT, UNINITIALISED_AT
from phosd.engine.analysis.values.conditions import Compare, Facts, alternative, of_launch
from phosd.engine.analysis.values.terms import Atom, Kind, Term, terms_in

POINTER_BYTES = 8
TENSOR_MAP_BYTES = 128
_MOST_MAPS = 64
_UPPER = 1 << 32


Places: TypeAlias = Callable[[tuple[Any, ...], int], Collection[int]]
"""Which alternatives a choice may take in a launch, by its key and how many there are."""


@dataclass(frozen=True)
class Origin:
    """Offsets of the parameters that an address may come from; ``unknown`` are reasons why it may
    come from elsewhere. ``anywhere`` is set if it may come from any of the parameters' words, and
    ``decided`` if some launches' parameters rule out all that is unknown. It may be none of global
    memory if it is ``shared``.
    """

    parameters: frozenset[int]
    unknown: frozenset[str]
    anywhere: bool = False
    decided: bool = False
    shared: bool = False

    @property
    def is_global(self) -> bool:
        """Whether it may be an address of global memory."""
        return not self.shared or bool(self.parameters or self.unknown or self.anywhere)


def origin(followed: Followed, access: Access, places: Places | None = None) -> Origin:
    """Return where the address of an access comes from: for any launch, or for the one whose
    parameters tell which ways threads take, as ``places`` says.
    """
    if access.through_map:
        return _through_map(followed, access)
    search = _searched(followed, access, places)
    decided = False
    if search.unknown and places is None:
        best = _searched(followed, access, None, decided=True)
        found = best.parameters or best.anywhere or best.shared
        decided = _is_optional(access) or (bool(found) and not best.unknown)
    any_ = search.parameters or search.unknown or search.anywhere or search.shared
    unknown = frozenset(search.unknown if any_ else ("no pointer",))
    return Origin(
        frozenset(search.parameters), unknown, search.anywhere, decided, bool(search.shared)
    )


def _is_optional(access: Access) -> bool:
    """Return whether a parameter that is a switch decides if the access happens. That sizes do, as
    of nothing nothing is accessed, tells little.
    """
    return any(
        isinstance(fact, Compare) and fact.how in ("EQ", "NE") and of_launch(fact)
        for fact in access.facts
    )


def _searched(
    followed: Followed, access: Access, places: Places | None, *, decided: bool = False
) -> "_Search":
    search = _Search(followed, access.facts, places, decided)
    try:
        search.term(access.address)
    except RecursionError:  # a chain of very many loops
        search.unknown.add("too large")
    return search


def _through_map(followed: Followed, access: Access) -> Origin:
    """Return which parameters are the tensor maps, whose addresses begin them."""
    last = followed.parameter_bytes - TENSOR_MAP_BYTES
    places = _places_of(followed, access.address, frozenset())
    if not places or not all(base == 1 and 0 <= at <= last for base, at in places):
        return Origin(frozenset(), frozenset(("tensor map",)))
    return Origin(frozenset(at for _, at in places), frozenset())


def _places_of(
    followed: Followed, term: Term, seen: frozenset[Atom]
) -> frozenset[tuple[int, int]] | None:
    """Return the values that a term may have: how often the address of the parameters is in it, and
    what else. None: not known, or too many.
    """
    found = frozenset(((0, 0),))
    for monomial, factor in term.parts.items():
        each: frozenset[tuple[int, int]] | None = frozenset(((0, 1),))
        if monomial:
            each = _places_of_atom(followed, monomial[0], seen) if len(monomial) == 1 else None
        if each is None:
            return None
        found = frozenset(
            (base + factor * more, at + factor * by) for base, at in found for more, by in each
        )
        if len(found) > _MOST_MAPS:
            return None
    return found


def _places_of_atom(
    followed: Followed, atom: Atom, seen: frozenset[Atom]
) -> frozenset[tuple[int, int]] | None:
    inner: Sequence[Term]
    narrow = atom.kind in (Kind.SIGNED, Kind.UNSIGNED) and atom.args[0] < 64
    match atom.kind, atom.args:
        case Kind.UNKNOWN, (place, *_) if place == PARAMETERS_AT:
            return frozenset(((1, 0),))
        case Kind.CHOICE, (_, terms):
            inner = terms
        case ((Kind.SIGNED | Kind.UNSIGNED), (_, term)):
            inner = (term,)
        case Kind.LOOP, _:
            carried = followed.carried[atom]
            # That it stays as it is, is no other value.
            inner = [one for one in (carried.initial, *carried.again) if one.atom is not atom]
        case _:
            return None
    if atom in seen:
        return None
    found: frozenset[tuple[int, int]] = frozenset()
    for one in inner:
        below = _places_of(followed, one, seen | {atom})
        if below is None or (narrow and not all(base == 0 <= at < 1 << 31 for base, at in below)):
            return None
        found |= below
    return found


class _Search:
    """With ``decided``, alternatives that parameters may rule out are left out if what they lead to
    is unknown.
    """

    def __init__(
        self, followed: Followed, facts: Facts, places: Places | None, decided: bool
    ) -> None:
        self._followed = followed
        self._facts = facts
        self._decided = decided
        self._of_launch = places
        self._seen: set[Atom] = set()
        self.parameters: set[int] = set()
        self.unknown: set[str] = set()
        self.anywhere = False
        self.shared = False

    def term(self, term: Term) -> None:
        alone = [(one[0], factor) for one, factor in term.parts.items() if len(one) == 1]
        for atom, factor in alone:
            if factor == 1:
                self._atom(atom)
        upper, lower = (
            _leaves(self._followed, (atom for atom, factor in alone if factor == each))
            for each in (_UPPER, 1)
        )
        pointers = upper.slots(4) & lower.slots(0)
        self.shared |= upper.shared
        if upper.unknown or upper.indexed or pointers:
            self.parameters |= pointers
            self.unknown |= upper.unknown | lower.unknown
            self.anywhere |= upper.indexed or lower.indexed

    def _atom(self, atom: Atom) -> None:
        if atom in self._seen:
            return
        self._seen.add(atom)
        match atom.kind, atom.args:
            case Kind.PARAMETER, (offset, size) if size == POINTER_BYTES:
                self.parameters.add(offset)
            case Kind.INDEXED, (_, size) if size == POINTER_BYTES:
                self.anywhere = True
            case ((Kind.SIGNED | Kind.UNSIGNED), (64, term)):
                self.term(term)
            case Kind.CHOICE, (key, terms):
                for place in self._places(key, len(terms)):
                    if self._decided and self._may_rule_out(key, place):
                        self._unless_unknown(terms[place])
                    else:
                        self.term(terms[place])
            case Kind.EXTREME, (_, terms):
                for one in terms:
                    self.term(one)
            case Kind.LOOP, (_, _, 64):
                carried = self._followed.carried[atom]
                for one in (carried.initial, *carried.again):
                    self.term(one)
            case Kind.UNKNOWN, (_, _, 64, why):
                self.unknown.add(why)

    def _may_rule_out(self, key: tuple[Any, ...], place: int) -> bool:
        """Return whether an alternative is ruled out in some launches, by what they are given."""
        if key[0] == "meet":
            return any(map(of_launch, self._followed.met[key[1]][place]))
        return key[0] == "if" and of_launch(key[1])

    def _unless_unknown(self, term: Term) -> None:
        """Search where a term comes from; if that is unknown, it is as if it were not there."""
        one = _Search(self._followed, self._facts, None, self._decided)
        one._seen = set(self._seen)
        one.term(term)
        if not one.unknown:
            self._seen = one._seen
            self.parameters |= one.parameters
            self.anywhere |= one.anywhere
            self.shared |= one.shared

    def _places(self, key: tuple[Any, ...], count: int) -> Collection[int]:
        """Return which alternatives a choice may take."""
        if self._of_launch is not None:
            return self._of_launch(key, count)
        known = alternative(key, self._facts)
        return range(count) if known is None else (known,)


@dataclass
class _Leaves:
    """What numbers were made from: parameters, by offset and size, and what is unknown; and
    whether from where shared memory is.
    """

    parameters: set[tuple[int, int]] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    indexed: bool = False
    shared: bool = False

    def slots(self, half: int) -> set[int]:
        """Return the offsets of numbers of 8 bytes of which the half that begins there is among
        them.
        """
        return {
            offset if size == POINTER_BYTES else offset - half
            for offset, size in self.parameters
            if size == POINTER_BYTES or offset % POINTER_BYTES == half
        }


def _leaves(followed: Followed, atoms: Iterable[Atom]) -> _Leaves:
    """Return what atoms were made from that may be a half of a pointer."""
    found = _Leaves()
    seen: set[Atom] = set()
    ahead = list(atoms)
    while ahead:
        atom = ahead.pop()
        if atom in seen or (atom.range and atom.range[0] >= -1 and atom.range[1] <= 1):
            continue
        seen.add(atom)
        match atom.kind, atom.args:
            case Kind.PARAMETER, place:
                found.parameters.add(place)
            case Kind.INDEXED, _:
                found.indexed = True
            case Kind.UNKNOWN, (place, _, _, why):
                if place == SHARED_AT:
                    found.shared = True
                elif place != UNINITIALISED_AT:  # that is not used: it is written before
                    found.unknown.add(why)
        terms = list(terms_in(atom.args))
        if atom.kind is Kind.LOOP:
            carried = followed.carried[atom]
            terms += [carried.initial, *carried.again]
        ahead += [one[0] for term in terms for one in term.parts if len(one) == 1]
    return found


def computed(followed: Followed, access: Access) -> bool:
    """Return whether an address comes from parameters, indices and iterations alone, so that a
    launch tells its range.
    """
    try:
        return _computed(followed, access.address, set())
    except RecursionError:
        return False


def _computed(followed: Followed, term: Term, seen: set[Atom]) -> bool:
    return all(_is_computed(followed, atom, seen) for monomial in term.parts for atom in monomial)


def _is_computed(followed: Followed, atom: Atom, seen: set[Atom]) -> bool:
    if atom in seen:
        return True
    seen.add(atom)
    inner = list(terms_in(atom.args))
    if atom.kind is Kind.LOOP:
        header, _, width = atom.args
        carried = followed.carried[atom]
        if carried.step(atom, followed.loops[header], width) is None:
            return False
        inner = [carried.initial]
    elif atom.kind in (Kind.UNKNOWN, Kind.INDEXED):
        return False
    return all(_computed(followed, one, seen) for one in inner)
