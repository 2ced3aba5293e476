"""What the running daemon says of itself is what docs/reference/dbus/ holds, and complete."""

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from phosd.bus import path_of
from phosd.service.api.describe import document, own_interfaces, write
from phosd.service.dbus.spec import describe
from tests.support.bus import busctl
from tests.support.fake_engine import manifest, this_process
from tests.support.service import ROOT, Service

KEPT = Path(__file__).parents[3] / "docs" / "reference" / "dbus"
PATHS = {
    "org.phos.Manager1": ROOT,
    "org.phos.Process1": f"/org/phos/process/_{os.getpid()}_1",
    "org.phos.Image1": "/org/phos/image/i",
    "org.phos.Job1": "/org/phos/job/_1",
    "org.phos.Gpu1": path_of("gpu", "GPU-1234-ab"),
}


@pytest.fixture
def everything(service: Service) -> Service:
    """A service with one object of each kind."""
    service.engine.running = [this_process()]
    service.engine.stored["i"] = manifest("i")
    for member in ("ListGPUs", "ListProcesses", "ListImages"):
        service.call(member)
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    return service


@pytest.mark.parametrize("name", PATHS)
def test_the_running_daemon_is_as_the_repository_says(everything: Service, name: str) -> None:
    told = busctl(everything.address, "introspect", "--xml-interface", "org.phos", PATHS[name])
    (interface,) = ElementTree.fromstring(told).findall(f"interface[@name='{name}']")
    kept = (KEPT / f"{name}.xml").read_text()
    assert ElementTree.canonicalize(
        ElementTree.tostring(interface, encoding="unicode"), strip_text=True
    ) in ElementTree.canonicalize(kept, strip_text=True), (
        "write them again: python -m phosd.service.api.describe docs/reference/dbus"
    )


def test_the_repository_has_no_other_interfaces(tmp_path: Path) -> None:
    (tmp_path / "org.phos.Old1.xml").touch()
    write(own_interfaces(), tmp_path)
    kept = {path.name: path.read_text() for path in KEPT.iterdir()}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept
    assert set(kept) == {f"{name}.xml" for name in PATHS}


def test_every_member_says_what_it_is_for() -> None:
    for interface in own_interfaces():
        for element in describe(interface).iter():
            if element.tag in ("interface", "method", "signal", "property"):
                docs = element.findall("annotation[@name='org.gtk.GDBus.DocString']")
                assert len(docs) == 1, (interface.name, element.attrib)
        assert document(interface).startswith(f'<node>\n  <interface name="{interface.name}">')


def dbus_type(kind: msgspec.inspect.Type) -> str:
    """How an option travels."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return dbus_type(next(k for k in kind.types if k != msgspec.inspect.NoneType()))
    if isinstance(kind, msgspec.inspect.IntType):
        return "t" if kind.le is not None and kind.le > 1 << 32 else "u"
    types = {
        msgspec.inspect.BoolType: "b",
        msgspec.inspect.FloatType: "d",
        msgspec.inspect.StrType: "s",
        msgspec.inspect.LiteralType: "s",
    }
    return types[type(kind)]


def test_the_documentation_has_every_option_with_its_type() -> None:
    text = (KEPT.parent / "dbus.md").read_text()
    methods = [method for interface in own_interfaces() for method in interface.methods]
    kinds = {method.options for method in methods if method.options is not None}
    assert len(kinds) > 8
    for kind in kinds:
        described = msgspec.inspect.type_info(kind)
        assert isinstance(described, msgspec.inspect.StructType)
        for option in described.fields:
            type_ = dbus_type(option.type)
            told = rf"`{option.name}`(, `\w+`)* {type_}\b"
            assert re.search(told, text), (kind, option.name, type_)


def test_gdbus_finds_its_way(everything: Service) -> None:
    """From the top to a property and a method, with nothing but introspection."""

    def gdbus(*arguments: str) -> str:
        command = ["gdbus", arguments[0], f"--address={everything.address}", "--dest", "org.phos"]
        done = subprocess.run(
            [*command, *arguments[1:]], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    text = gdbus("introspect", "--recurse", "--object-path", "/")
    for name, path in PATHS.items():
        assert f"node {path} {{" in text
        assert f"interface {name} {{" in text
    assert "VerifiedWhole" in text
    assert gdbus("introspect", "--object-path", ROOT, "--only-properties").count("readonly") == 4
    assert (
        "a test"
        in gdbus("call", "--object-path", ROOT, "--method", "org.phos.Manager1.ListGPUs").lower()
    )


def test_what_never_changes_says_so(everything: Service) -> None:
    flags = {
        line.split()[0].removeprefix("."): line.split()[-1]
        for line in busctl(
            everything.address, "introspect", "org.phos", PATHS["org.phos.Job1"], "org.phos.Job1"
        ).splitlines()
        if " property " in line
    }
    assert flags["Number"] == "const"
    assert flags["State"] == "emits-change"
    assert flags["Message"] == "emits-invalidation"
