"""A method of a handler becomes one on the bus, or phosd does not start."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
import pytest

from phosd.errors import InvalidOption
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.spec import (
    Interface,
    Options,
    describe,
    method,
    methods_of,
    parse_options,
)

CALLER = Caller(7)


class Wishes(Options, frozen=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1
    colour: Literal["red", "blue"] = "red"
    share: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Handler:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.got: list[tuple[object, ...]] = []

    @method("Make", "usa{sv}", made="a(us)")
    async def make(
        self, caller: Caller, pid: int, name: str, options: Wishes
    ) -> list[tuple[int, str]]:
        """Make something of what
        the caller wants; options: {options}.

        This is for whoever reads the code.
        """
        self.got.append((caller, pid, name, options))
        return [(pid, name)]

    @method("Drop", "a{sv}")
    async def drop(self, caller: Caller, thing: str) -> None:
        """Drop the thing that was called."""
        self.got.append((caller, thing))

    @method("Count", count="u")
    async def count(self) -> int:
        """How many there are."""
        return len(self.got)

    async def not_for_the_bus(self) -> None:
        raise AssertionError


def call(handler: Handler, name: str, *args: object) -> list[Any]:
    (found,) = (m for m in methods_of(handler) if m.name == name)
    made: Awaitable[list[Any]] = found.run(CALLER, "the object", *args)

    async def run() -> list[Any]:
        return await made

    return asyncio.run(run())


def test_a_handler_gets_what_it_asks_for() -> None:
    handler = Handler()
    assert call(handler, "Make", 3, "x", {"size": 2, "share": 1}) == [[(3, "x")]]
    assert call(handler, "Drop", {}) == []
    assert call(handler, "Count") == [2]
    assert handler.got == [(CALLER, 3, "x", Wishes(2, "red", 1.0)), (CALLER, "the object")]


def test_what_is_told_is_made_from_the_handler() -> None:
    make, drop, count = methods_of(Handler)
    assert make.takes == (("pid", "u"), ("name", "s"), ("options", "a{sv}"))
    assert (make.signature, make.reply_signature) == ("usa{sv}", "a(us)")
    assert make.doc == ("Make something of what the caller wants; options: size, colour, share.")
    assert (drop.takes, drop.gives) == ((("options", "a{sv}"),), ())
    assert (count.takes, count.gives) == ((), (("count", "u"),))
    told = describe(Interface("org.phos.Test1", "A test.", methods_of(Handler)))
    assert [m.attrib["name"] for m in told.iter("method")] == ["Make", "Drop", "Count"]


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("Drop", {"size": 1}, "there is no option .size.*the options of this call are: none"),
        ("Make", {"taste": 1}, "there is no option .taste.*are: size, colour, share"),
        ("Make", {"size": "1"}, "Expected `int`, got `str`"),
        ("Make", {"size": True}, "Expected `int`, got `bool`"),
        ("Make", {"size": 10}, "Expected `int` <= 9"),
        ("Make", {"share": float("nan")}, "Expected `float`"),
        ("Make", {"colour": "green"}, "'green' is no colour; colour is one of: "),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], what: str) -> None:
    handler = Handler()
    with pytest.raises(InvalidOption, match=what):
        call(handler, name, *([3, "x"] if name == "Make" else []), options)
    assert handler.got == []


def test_options_that_are_not_a_dictionary_are_refused() -> None:
    with pytest.raises(InvalidOption):
        parse_options([1], Wishes)


class Lax(msgspec.Struct):
    size: int = 1


async def undocumented(self: object, caller: Caller, pid: int) -> int:
    return pid


async def fits(self: object, caller: Caller, thing: str, pid: int, options: Wishes) -> int:
    """It does."""
    return pid


async def lax(self: object, options: Lax) -> None:
    """It would take any option."""


@pytest.mark.parametrize(
    ("handler", "takes", "gives", "what"),
    [
        (fits, "u", {}, "its handler"),
        (fits, "sa{sv}", {}, "its handler"),
        (fits, "uua{sv}", {}, "its handler"),
        (fits, "usua{sv}", {}, "its handler"),
        (fits, "ta{sv}", {}, "its handler"),
        (fits, "ua{sv}", {"one": "u", "two": "u"}, "more than one value"),
        (undocumented, "u", {}, "no docstring"),
        (lax, "a{sv}", {}, "options that nobody knows"),
    ],
)
def test_a_handler_that_does_not_fit_is_no_method(
    handler: Callable[..., Awaitable[object]], takes: str, gives: dict[str, str], what: str
) -> None:
    method("Fits", "ua{sv}", pid="u")(fits)
    with pytest.raises(TypeError, match=what):
        method("Fits", takes, **gives)(handler)
