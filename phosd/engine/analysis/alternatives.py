"""Say what an address depends on, and in which order what holds of it is looked at.

Tables have both, and whoever evaluates one goes by them.
"""

from typing import Any

from phosd.engine.analysis.thread.followed import Followed
from phosd.engine.analysis.values.conditions import Compare, Condition
from phosd.engine.analysis.values.terms import Atom, Kind, Term, terms_in
from phosd.engine.analysis.values.words import ELSEWHERE


def depth_of(fact: Condition) -> tuple[int, str]:
    """Order facts: those of simpler terms first, which those of others may need."""
    if not isinstance(fact, Compare):
        return 0, ""
    return max(fact.one.depth, fact.other.depth), fact.how


def alternatives(followed: Followed, address: Term) -> tuple[dict[tuple[Any, ...], int], set[int]]:
    """Return the keys of the choices that an address depends on, with how many alternatives each
    has, and the headers of the loops.
    """
    choices: dict[tuple[Any, ...], int] = {}
    loops: set[int] = set()
    _collect(followed, address, choices, loops, set())
    return choices, loops


def _collect(
    followed: Followed,
    term: Term,
    choices: dict[tuple[Any, ...], int],
    loops: set[int],
    seen: set[Atom],
) -> None:
    for monomial in term.parts:
        for atom in monomial:
            if atom in seen:
                continue
            seen.add(atom)
            if atom.kind is Kind.CHOICE:
                key, terms = atom.args
                if key[0] == ELSEWHERE:
                    continue
                choices[key] = len(terms)
            inner = list(terms_in(atom.args))
            if atom.kind is Kind.LOOP:
                loops.add(atom.args[0])
                inner.append(followed.carried[atom].initial)
            for one in inner:
                _collect(followed, one, choices, loops, seen)
