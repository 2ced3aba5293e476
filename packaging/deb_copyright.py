"""The package's copyright file, in Debian's machine-readable format (DEP-5).

What it says of other people's files is read from what came with them: the metadata and the licence
files of Python distributions, and the copyright files of Debian packages.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

FORMAT = "https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
APACHE = "On Debian systems, its text is in /usr/share/common-licenses/Apache-2.0."

_HEADER = """\
Format: {format}
Upstream-Name: phosd
Comment: Written when the package was built, from what came with each part of it. Paths are those
 of the installed files; short names of licences are their authors'.

Files: *
Copyright: 2026 the phosd developers
License: Apache-2.0
 Licensed under the Apache License, Version 2.0.
 {apache}
"""

_LICENCE_FILES = ("LICEN", "COPYING", "NOTICE")
_HOLDER = re.compile(r"(?im)^[\s#*]*((?:copyright\b|\(c\)|©).*\d{4}.*)$")
_APACHE_TERMS = re.compile(
    r"(?s)[ \t]*Apache License\s+Version 2\.0, January 2004.*?(?:END OF TERMS AND CONDITIONS|\Z)"
)


class Unlicensed(Exception):
    """A part of the package says nowhere under which terms it may be distributed."""


@dataclass(frozen=True)
class Component:
    """A part of the package that others have written. ``files`` are patterns of DEP-5."""

    origin: str
    files: Sequence[str]
    holders: Sequence[str]
    licence: str
    text: str


def write(components: Iterable[Component]) -> str:
    """Return the copyright file: phosd's own files, and then a paragraph for each component."""
    return added(_HEADER.format(format=FORMAT, apache=APACHE), components)


def added(text: str, components: Iterable[Component]) -> str:
    """Return a copyright file with a paragraph more for each component."""
    paragraphs = [_paragraph(each) for each in sorted(components, key=lambda one: one.origin)]
    return "\n".join([text, *paragraphs])


def _paragraph(component: Component) -> str:
    terms = _APACHE_TERMS.sub(f" Apache License, Version 2.0. {APACHE}", component.text)
    return (
        f"Files: {_continued(component.files)}\n"
        f"Copyright: {_continued(component.holders)}\n"
        f"License: {component.licence}\n{_verbatim(terms)}\n"
        f"Comment: {component.origin}\n"
    )


def _continued(lines: Sequence[str]) -> str:
    return "\n ".join(lines)


def _verbatim(text: str) -> str:
    """Return lines that a field may have: one that were empty would end the paragraph."""
    return "\n".join(f"  {line}" if line.strip() else " ." for line in text.strip("\n").split("\n"))


# --- Python distributions


def of_python(folder: Path, home: str) -> Iterator[Component]:
    """Yield the distributions in ``folder``, which is installed as ``home``.

    Raises :exc:`Unlicensed` where one brings no text of its licence.
    """
    found = list(distributions(path=[str(folder)]))
    patterns = _patterns(found)
    for each in found:
        text = _licence_text(each)
        author = _field(each, "Author") or f"the authors of {each.name}"
        yield Component(
            origin=f"{each.name} {each.version}, from the Python Package Index",
            files=[f"{home}/{pattern}" for pattern in patterns[each.name]],
            holders=_holders(text) or [author],
            licence=_short_name(each),
            text=text,
        )


def _patterns(found: Sequence[Distribution]) -> dict[str, list[str]]:
    """Return patterns of each distribution's files, as short as tell it from the others."""
    owners: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for each in found:
        for file in _present(each):
            for depth in range(1, len(file.parts) + 1):
                owners[file.parts[:depth]].add(each.name)
    patterns: dict[str, set[str]] = defaultdict(set)
    for each in found:
        for file in _present(each):
            prefixes = (file.parts[:depth] for depth in range(1, len(file.parts) + 1))
            own = next((parts for parts in prefixes if len(owners[parts]) == 1), file.parts)
            patterns[each.name].add("/".join(own) + ("/*" if own != file.parts else ""))
    return {name: sorted(some) for name, some in patterns.items()}


def _present(distribution: Distribution) -> list[PackagePath]:
    return [file for file in distribution.files or () if Path(str(file.locate())).is_file()]


def _licence_text(distribution: Distribution) -> str:
    texts = [
        file.read_text()
        for file in _present(distribution)
        if ".dist-info" in file.parts[0] and file.name.upper().startswith(_LICENCE_FILES)
    ]
    texts = texts or [
        comment
        for file in _present(distribution)
        if len(file.parts) == 1 and file.suffix == ".py"
        for comment in _first_comments(file.read_text())
        if _HOLDER.search(comment)
    ]
    if not texts:
        raise Unlicensed(
            f"{distribution.name} {distribution.version} brings no licence, so the package cannot "
            "say under which terms it may be distributed; bundle a version that has a licence file"
        )
    return "\n\n".join(texts)


def _first_comments(source: str) -> Iterator[str]:
    """Yield what a module says in comments before its first statement."""
    lines = []
    for line in source.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        lines.append(line.strip("#").rstrip())
    yield "\n".join(lines)


def _short_name(distribution: Distribution) -> str:
    """Return the licence as an expression of DEP-5, which joins short names by and, or, with."""
    said = _field(distribution, "License-Expression") or _field(distribution, "License")
    if not said or "\n" in said:
        classifiers = distribution.metadata.get_all("Classifier") or ()
        classified = [one for one in classifiers if one.startswith("License")]
        said = " and ".join(one.rpartition(" :: ")[2] for one in classified) or "unnamed"
    words = re.split(r"\s+(AND|OR|WITH|and|or|with)\s+", said)
    return " ".join(
        word.lower() if number % 2 else re.sub(r"[\s,]+", "-", word)
        for number, word in enumerate(words)
    )


def _field(distribution: Distribution, name: str) -> str:
    return next(iter(distribution.metadata.get_all(name) or ()), "")


def _holders(text: str) -> list[str]:
    return list(dict.fromkeys(found.strip() for found in _HOLDER.findall(text)))


# --- Debian packages


def of_debian(folder: Path, home: str) -> Iterator[Component]:
    """Yield the Debian packages whose files ``install_criu.py`` has put into ``folder``, which is
    installed as ``home``.
    """
    for package in json.loads((folder / "packages.json").read_text()):
        name, source, version = package["name"], package["source"], package["version"]
        text = (folder / "copyright" / name).read_text()
        yield Component(
            origin=f"{name} {version} of Debian; its source is\n"
            f" https://snapshot.debian.org/package/{source}/{version}/",
            files=[f"{home}/{file}" for file in package["files"]],
            holders=["the holders that the text below names"],
            licence=_licences_in(text) or f"{name}-terms",
            text=text,
        )


def of_gcc(version: str, files: Sequence[str]) -> Component:
    """Return what libraries that are linked with ``-static-libgcc`` have of GCC ``version``.

    Raises :exc:`Unlicensed` where Debian's package of it has left no copyright file.
    """
    terms = Path(f"/usr/share/doc/libgcc-{version}-dev/copyright")
    if not terms.is_file():
        raise Unlicensed(
            f"{terms} is missing, so the package cannot say under which terms it has parts of "
            f"libgcc; install libgcc-{version}-dev, and keep dpkg from leaving out that file"
        )
    return Component(
        origin=f"GCC {version}: parts of libgcc and libstdc++ in a phosd library, which itself"
        " is\n Apache-2.0",
        files=files,
        holders=["2026 the phosd developers", "the holders that the text below names"],
        licence="Apache-2.0 and GPL-3+ with GCC-Runtime-Library-exception",
        text=terms.read_text(),
    )


def _licences_in(text: str) -> str:
    """Return the licences that a machine-readable copyright file gives to files, if it is one."""
    if not text.startswith("Format"):
        return ""
    names: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"(?m)^Files:", paragraph):
            names.update(dict.fromkeys(re.findall(r"(?m)^Licen[cs]e:[ \t]*(\S.*)$", paragraph)))
    return (", and " if any(" or " in name for name in names) else " and ").join(names)
