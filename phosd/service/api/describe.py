"""Write introspection files of phosd's own D-Bus interfaces.

``python -m phosd.service.api.describe FOLDER`` writes one file for each interface.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from phosd.service.api.images import Images
from phosd.service.api.job_interface import JobMethods, job_interface
from phosd.service.api.listing import Lists
from phosd.service.api.manager import manager_interface
from phosd.service.api.moves import Moves
from phosd.service.api.namespaces import Namespaces
from phosd.service.api.object_interfaces import gpu_interface, image_interface, process_interface
from phosd.service.api.object_methods import GpuMethods, ImageMethods, ProcessMethods
from phosd.service.api.pruning import Pruning
from phosd.service.api.transfers import Transfers
from phosd.service.dbus.spec import Interface, describe


def write(interfaces: Iterable[Interface], folder: Path) -> None:
    """Write ``<name>.xml`` for each interface, and remove files of interfaces that no longer
    exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("org.phos.*.xml"):
        old.unlink()
    for interface in interfaces:
        (folder / f"{interface.name}.xml").write_text(document(interface), encoding="utf-8")


def document(interface: Interface) -> str:
    """Return the introspection document of one interface."""
    node = ElementTree.Element("node")
    node.append(describe(interface))
    ElementTree.indent(node)
    return ElementTree.tostring(node, encoding="unicode") + "\n"


def own_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that phosd defines."""
    return (
        manager_interface(Images, Moves, Lists, Pruning, Namespaces, Transfers),
        job_interface(JobMethods),
        process_interface(ProcessMethods),
        image_interface(ImageMethods),
        gpu_interface(GpuMethods),
    )


if __name__ == "__main__":
    write(own_interfaces(), Path(sys.argv[1]))
