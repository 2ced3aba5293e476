"""What is said of an interface is served by handlers and readers, or phosd does not start."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest

from phosd.engine.operations.restore.options import CloneName
from phosd.errors import InvalidOption
from phosd.interface.model import Interface, Method, Property, Said, options_of
from phosd.interface.options import NoOptions
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.spec import (
    Options,
    describe,
    method,
    parse_options,
    require_same_options,
    serve,
)

CALLER = Caller(7)


class WishOptions(TypedDict, total=False):
    size: Annotated[int, Said("How large.", 1)]
    colour: Annotated[Literal["red", "blue"], Said("Which.", "red")]
    share: Annotated[float, Said("How much.", otherwise="all")]


class Wishes(Options, frozen=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1
    colour: Literal["red", "blue"] = "red"
    share: Annotated[float, msgspec.Meta(gt=0)] | None = None


MAKE = Method("Make", "u pid, s name", "a(us) made", "Make something.", WishOptions)
DROP = Method("Drop", "", "", "Drop the object.", NoOptions)
COUNT = Method("Count", "", "u count", "Return how many there are.")
TEST = Interface(
    "org.phos.Test1", "A test.", (MAKE, DROP, COUNT), (Property("Size", "u", "How large it is."),)
)
READERS: dict[str, Callable[[str], int]] = {"Size": len}


class Handler:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.got: list[tuple[object, ...]] = []

    @method("Make")
    async def make(
        self, caller: Caller, pid: int, name: str, options: Wishes
    ) -> list[tuple[int, str]]:
        self.got.append((caller, pid, name, options))
        return [(pid, name)]

    @method("Drop")
    async def drop(self, caller: Caller, thing: str) -> None:
        self.got.append((caller, thing))

    @method("Count")
    async def count(self) -> int:
        return len(self.got)

    async def not_for_the_bus(self) -> None:
        raise AssertionError


def call(handler: Handler, name: str, *args: object) -> list[Any]:
    made = serve(TEST, READERS, handler).run[name](CALLER, "the object", *args)

    async def run() -> list[Any]:
        return await made

    return asyncio.run(run())


def test_a_handler_gets_what_it_asks_for() -> None:
    handler = Handler()
    assert call(handler, "Make", 3, "x", {"size": 2, "share": 1}) == [[(3, "x")]]
    assert call(handler, "Drop", {}) == []
    assert call(handler, "Count") == [2]
    assert handler.got == [(CALLER, 3, "x", Wishes(2, "red", 1.0)), (CALLER, "the object")]
    assert serve(TEST, READERS, handler).read["Size"]("four") == 4


def test_what_is_said_is_told() -> None:
    assert MAKE.arguments == (("pid", "u"), ("name", "s"), ("options", "a{sv}"))
    assert (MAKE.signature, MAKE.reply_signature) == ("usa{sv}", "a(us)")
    assert (DROP.arguments, DROP.results) == ((("options", "a{sv}"),), ())
    assert (COUNT.arguments, COUNT.results) == ((), (("count", "u"),))
    told = [*describe(TEST).iter("method")]
    assert [each.attrib["name"] for each in told] == ["Make", "Drop", "Count"]
    (doc,) = told[0].iter("annotation")
    assert doc.attrib["value"] == "Make something. Options: size, colour, share."


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("Drop", {"size": 1}, "there is no option .size.*the options of this call are: none"),
        ("Make", {"taste": 1}, "there is no option .taste.*are: size, colour, share"),
        (
            "Make",
            {"size": "1"},
            "size has to be a whole number, .* not .1.; give such a value, or leave size out",
        ),
        (
            "Make",
            {"size": True},
            "size has to be a whole number, at least 1 and at most 9, not True",
        ),
        ("Make", {"size": 10}, "size has to be a whole number, at least 1 and at most 9, not 10"),
        ("Make", {"share": float("nan")}, "share has to be a number.*, not nan"),
        ("Make", {"colour": "green"}, "'green' is no colour; colour is one of: blue, red"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], what: str) -> None:
    handler = Handler()
    with pytest.raises(InvalidOption, match=what):
        call(handler, name, *([3, "x"] if name == "Make" else []), options)
    assert handler.got == []


class Bounded(Options, frozen=True):
    clone: CloneName = ""
    token: Annotated[str, msgspec.Meta(max_length=5)] | None = None
    names: tuple[str, ...] = ()
    far: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)] = 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"clone": "a b"}, "clone has to be a name of up to 32 letters, digits, `_` and `-`, the"),
        (
            {"token": "x" * 200},
            r"token has to be text, at most 5 characters, not 'x{79}\.\.\.; give",
        ),
        ({"names": ["a", 3]}, r"names has to be a list, not \['a', 3\]"),
        ({"far": 0}, "far has to be a whole number, at least 1, not 0"),
    ],
)
def test_bounds_are_told_in_words(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidOption, match=what):
        parse_options(options, Bounded)


def test_options_that_are_not_a_dictionary_are_refused() -> None:
    with pytest.raises(InvalidOption):
        parse_options([1], Wishes)


class Lax(msgspec.Struct):
    size: int = 1


class Fewer(Options, frozen=True):
    size: int = 1
    colour: Literal["red", "blue"] = "red"


class OtherDefault(Wishes, frozen=True):
    size: int = 2


class OtherType(Wishes, frozen=True):
    share: int | None = None


class OtherWords(Wishes, frozen=True):
    colour: Literal["red", "green"] = "red"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Lax, "options that nobody knows"),
        (Fewer, "missing or too many: share"),
        (Options, "missing or too many: colour, share, size"),
        (OtherDefault, "size of Make is ut .* 2"),
        (OtherType, "share of Make"),
        (OtherWords, "colour of Make"),
    ],
)
def test_a_struct_has_the_options_that_are_stated(kind: type[msgspec.Struct], what: str) -> None:
    require_same_options("Make", Wishes, options_of(WishOptions))
    with pytest.raises(TypeError, match=what):
        require_same_options("Make", kind, options_of(WishOptions))


async def fits(self: object, caller: Caller, thing: str, pid: int, options: Wishes) -> int:
    return pid


@pytest.mark.parametrize(
    ("takes", "options", "what"),
    [
        ("u pid", None, "knows no options"),
        ("s pid", WishOptions, "its handler"),
        ("u number", WishOptions, "its handler"),
        ("u pid, u other", WishOptions, "its handler"),
        ("u pid, s name, u other", WishOptions, "its handler"),
        ("t pid", WishOptions, "its handler"),
        ("u pid", NoOptions, "missing or too many"),
    ],
)
def test_a_handler_that_does_not_fit_is_refused(
    takes: str, options: type | None, what: str
) -> None:
    def served(stated: Method) -> None:
        handler = type("Made", (), {"fits": method("Fits")(fits)})()
        serve(Interface("org.phos.Test1", methods=(stated,)), {}, handler)

    served(Method("Fits", "u pid", "u pid", "", WishOptions))
    with pytest.raises(TypeError, match=what):
        served(Method("Fits", takes, "u pid", "", options))


def test_nothing_is_missing_and_nothing_too_many() -> None:
    alone = Interface(TEST.name, methods=(COUNT,))
    with pytest.raises(TypeError, match=r"handlers .* too many: Count"):
        serve(alone, {})
    with pytest.raises(TypeError, match="has no method Make"):
        serve(alone, {}, Handler())
    with pytest.raises(TypeError, match=r"readers .* too many: Size"):
        serve(TEST, {}, Handler())
    with pytest.raises(TypeError, match=r"readers .* too many: Other"):
        serve(TEST, {**READERS, "Other": len}, Handler())
