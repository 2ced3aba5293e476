"""The interfaces that are phosd's own, written down.

``python -m phosd.service.api.describe FOLDER`` writes the description of each, a file each.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from phosd.service.api.manager_interface import manager_interface
from phosd.service.api.object_interfaces import (
    gpu_interface,
    image_interface,
    job_interface,
    process_interface,
)
from phosd.service.dbus.spec import Interface, by_the_tree, describe


def write(interfaces: Iterable[Interface], folder: Path) -> None:
    """Write ``<name>.xml`` for each interface, and remove the files of those that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("org.phos.*.xml"):
        old.unlink()
    for interface in interfaces:
        (folder / f"{interface.name}.xml").write_text(document(interface), encoding="utf-8")


def document(interface: Interface) -> str:
    """One interface as a file of its own."""
    node = ElementTree.Element("node")
    node.append(describe(interface))
    ElementTree.indent(node)
    return ElementTree.tostring(node, encoding="unicode") + "\n"


class _Nobody:
    """Takes the place of whoever answers the calls, where only the interface is asked for."""

    def __getattr__(self, name: str) -> Any:
        return self if name in ("lists", "moves") else by_the_tree


def own_interfaces() -> tuple[Interface, ...]:
    """The interfaces that are phosd's own."""
    nobody: Any = _Nobody()
    return (
        manager_interface(nobody),
        job_interface(by_the_tree),
        process_interface(nobody),
        image_interface(nobody),
        gpu_interface(nobody),
    )


if __name__ == "__main__":
    write(own_interfaces(), Path(sys.argv[1]))
