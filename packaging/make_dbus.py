"""Write the tables of docs/reference/dbus.md from phosd.interface, between their marks."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from phosd.interface.methods import INTERFACES, features  # noqa: E402
from phosd.interface.model import Interface, Method, Option, options_of  # noqa: E402
from phosd.interface.options import own_first  # noqa: E402

PAGE = ROOT / "docs/reference/dbus.md"
_MARKS = re.compile(r"<!-- (org\.phos\.\w+): [^>]*-->\n.*?<!-- end of \1 -->", re.DOTALL)


def page(text: str) -> str:
    """Return the page with the tables between their marks. Raises :class:`SystemExit`."""
    stated = {interface.name: interface for interface in INTERFACES}
    if {found.group(1) for found in _MARKS.finditer(text)} != stated.keys():
        raise SystemExit(f"{PAGE}: put the marks of {', '.join(stated)} back, each once")
    return _MARKS.sub(lambda found: _marked(stated[found.group(1)]), text)


def _marked(interface: Interface) -> str:
    lines = "\n".join(_tables(interface))
    return (
        f"<!-- {interface.name}: python packaging/make_pages.py -->\n{lines}\n"
        f"<!-- end of {interface.name} -->"
    )


def _tables(interface: Interface) -> Iterator[str]:
    yield from ("| method | |", "| --- | --- |")
    for method in interface.methods:
        yield f"| `{_spelled(method)}` | {method.doc} |"
    yield ""
    for kind, methods in _by_options(interface).items():
        yield f"Options of {_joined([f'`{method.name}`' for method in methods])}:"
        yield from ("", "| option | default | |", "| --- | --- | --- |")
        for option in own_first(kind):
            yield f"| `{option.name}` {option.signature} | {_default(option)} | {_said(option)} |"
        yield ""
    yield from ("| property | |", "| --- | --- |")
    for told in interface.properties:
        doc = f"*private*: {told.doc}" if told.private else told.doc
        yield f"| `{told.name}` {told.signature} | {doc} |"
    yield ""
    if interface.signals:
        yield from ("| signal | |", "| --- | --- |")
        for signal in interface.signals:
            yield f"| `{signal.name}({_typed(signal.arguments)})` | {signal.doc} |"
        yield from ("", f"`Features`: {', '.join(f'`{each}`' for each in features())}.", "")


def _by_options(interface: Interface) -> dict[type, list[Method]]:
    """Return the methods with options, by their options."""
    found: dict[type, list[Method]] = {}
    for method in interface.methods:
        if method.options is not None and options_of(method.options):
            found.setdefault(method.options, []).append(method)
    return found


def _spelled(method: Method) -> str:
    """Return a method as ``Migrate(u pid, s destination, a{sv}) -> o job``."""
    arguments = _typed(method.arguments).replace("a{sv} options", "a{sv}")
    gives = f" -> {_typed(method.results)}" if method.results else ""
    return f"{method.name}({arguments}){gives}"


def _typed(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{signature} {name}" for name, signature in arguments)


def _default(option: Option) -> str:
    if option.otherwise or option.default in (None, ""):
        return option.otherwise
    if isinstance(option.default, bool):
        return str(option.default).lower()
    return f"`{option.default}`" if isinstance(option.default, str) else f"{option.default:,g}"


def _said(option: Option) -> str:
    """Return what is said of an option, after the words that it may be if that names none."""
    words = [f"`{word}`" for word in option.choices]
    told = all(word in option.doc or word == _default(option) for word in words)
    return option.doc if told else f"{_joined(words)}. {option.doc}"


def _joined(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def files() -> dict[Path, str]:
    """Return what :mod:`make_pages` writes."""
    return {PAGE: page(PAGE.read_text())}
