"""Prove that two accesses of a launch share no byte although their ranges meet.

Columns of one matrix, or fields of its elements, lie between one another. The two addresses are
sums of unknowns, of any two threads: their difference is a multiple of some number, the distance of
rows, plus a rest with bounds. If no such difference is as small as the accesses, they are apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from phosd.engine.analysis.reference.evaluation import ADDRESSES, Launch
from phosd.engine.analysis.reference.linear import Contradiction, Linear, System
from phosd.engine.analysis.reference.ranges import cases
from phosd.engine.analysis.thread.followed import Access, Followed


@dataclass(frozen=True)
class Form:
    """An address as a sum, which is from ``low`` to ``high``, and of how many bytes."""

    address: Linear
    system: System
    low: int
    high: int
    size: int

    def rest(self, modulus: int) -> tuple[int, int] | None:
        """Return the bounds of what is left without multiples of a number; None: there are none."""
        kept = {u: f for u, f in self.address.factors.items() if f % modulus}
        try:
            low, high = self.system.bounds(Linear(self.address.constant, kept))
        except Contradiction:  # found only now: nobody accesses it
            return None
        return None if low is None or high is None else (low, high)


def forms(followed: Followed, access: Access, launch: Launch) -> list[Form] | None:
    """Return an access's address in each alternative; None: in one its range is not known."""
    found = []
    for case in cases(followed, access, launch):
        ends = case.bounds(access.address)
        if ends is None:
            continue
        low, high = ends
        if low is None or high is None:
            return None
        shift = low // ADDRESSES * ADDRESSES
        address = case.sum_of(access.address).moved(-shift)
        found.append(Form(address, case.system, low - shift, high - shift, access.size))
    return found


def apart(one: Form, other: Form) -> bool:
    """Return whether the two share no byte, whatever the unknowns of each are."""
    if one.high + one.size <= other.low or other.high + other.size <= one.low:
        return True
    return any(_apart(one, other, modulus) for modulus in _moduli(one, other))


def _moduli(one: Form, other: Form) -> Iterable[int]:
    factors = [*one.address.factors.values(), *other.address.factors.values()]
    return sorted({abs(factor) for factor in factors} - {0, 1}, reverse=True)


def _apart(one: Form, other: Form, modulus: int) -> bool:
    some, others = one.rest(modulus), other.rest(modulus)
    if some is None or others is None:
        return False
    least, most = some[0] - others[1], some[1] - others[0]
    # They share a byte if one's begin is less than its size before the other's, or less than the
    # other's size behind it: is there a multiple of the modulus that moves a difference there?
    multiple = (other.size - 1 - least) // modulus * modulus
    return multiple < -(one.size - 1) - most
