"""What callers may say is what the engine takes from users, and no more."""

import msgspec
import pytest

from phosd.engine.operations.checkpoint import CheckpointOptions
from phosd.engine.operations.migrate import MigrateOptions
from phosd.engine.operations.resume import ResumeOptions
from phosd.engine.operations.suspend import SuspendOptions
from phosd.engine.operations.swap import SwapOptions
from phosd.errors import InvalidOption
from phosd.service.dbus.spec import parse_options
from phosd.service.jobs.options import (
    CheckpointRequest,
    MigrateRequest,
    ResumeRequest,
    SuspendRequest,
)

PHOSD_SAYS = {
    *(
        "audit",
        "by_runtime",
        "caller",
        "experience",
        "instead_of",
        "leave",
        "limits",
        "name",
        "pin",
    ),
    *("to", "wish"),
}
OPERATIONS: list[tuple[type[msgspec.Struct], type[msgspec.Struct]]] = [
    (CheckpointRequest, CheckpointOptions),
    (MigrateRequest, MigrateOptions),
    (SuspendRequest, SuspendOptions),
    (SuspendRequest, SwapOptions),
    (ResumeRequest, ResumeOptions),
]


@pytest.mark.parametrize(("request_", "options"), OPERATIONS)
def test_a_request_has_what_users_may_choose(
    request_: type[msgspec.Struct], options: type[msgspec.Struct]
) -> None:
    asked, taken = set(request_.__struct_fields__), set(options.__struct_fields__)
    assert taken - asked <= PHOSD_SAYS
    assert not asked & PHOSD_SAYS
    assert {"token", "queue"} <= asked


@pytest.mark.parametrize(("request_", "options"), OPERATIONS)
def test_nobody_says_for_whom_something_is_done(
    request_: type[msgspec.Struct], options: type[msgspec.Struct]
) -> None:
    for name in PHOSD_SAYS & set(options.__struct_fields__):
        with pytest.raises(InvalidOption, match=f"there is no option `{name}`"):
            parse_options({name: 0}, request_)


def test_a_request_that_says_nothing_has_the_engines_defaults() -> None:
    asked, taken = CheckpointRequest(), CheckpointOptions()
    for name in set(asked.__struct_fields__) & set(taken.__struct_fields__):
        assert getattr(asked, name) == getattr(taken, name)
