"""Write an interface as the introspection file that a package ships."""

from xml.etree import ElementTree

from phosd.interface.model import Interface
from phosd.service.dbus.spec import describe


def document(interface: Interface) -> str:
    """Return the introspection document of one interface."""
    node = ElementTree.Element("node")
    node.append(describe(interface))
    ElementTree.indent(node)
    return ElementTree.tostring(node, encoding="unicode") + "\n"
