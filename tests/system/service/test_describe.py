"""What the running daemon says of itself is what phosd.interface says, and complete."""

import os
import runpy
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phosd.bus import path_of
from phosd.interface.methods import INTERFACES
from phosd.service.api.describe import document
from phosd.service.dbus.spec import describe
from tests.support.bus import busctl
from tests.support.fake_engine import manifest, this_process
from tests.support.service import ROOT, Service

REPOSITORY = Path(__file__).parents[3]
PATHS = {
    "org.phos.Manager1": ROOT,
    "org.phos.Process1": f"/org/phos/process/_{os.getpid()}_1",
    "org.phos.Image1": "/org/phos/image/i",
    "org.phos.Job1": "/org/phos/job/_1",
    "org.phos.Pool1": "/org/phos/pool/chat",
    "org.phos.Gpu1": path_of("gpu", "GPU-1234-ab"),
}


@pytest.fixture
def everything(service: Service) -> Service:
    """A service with one object of each kind."""
    service.engine.running = [this_process()]
    service.engine.stored["i"] = manifest("i")
    for member in ("ListGPUs", "ListProcesses", "ListImages"):
        service.call(member)
    service.call("CreatePool", "ssa{sv}", "chat", "i", 0)
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    return service


@pytest.mark.parametrize("name", PATHS)
def test_the_running_daemon_says_what_is_stated(everything: Service, name: str) -> None:
    told = busctl(everything.address, "introspect", "--xml-interface", "org.phos", PATHS[name])
    (interface,) = ElementTree.fromstring(told).findall(f"interface[@name='{name}']")
    (stated,) = (each for each in INTERFACES if each.name == name)
    assert ElementTree.canonicalize(
        ElementTree.tostring(interface, encoding="unicode"), strip_text=True
    ) in ElementTree.canonicalize(document(stated), strip_text=True)


def test_every_member_says_what_it_is_for() -> None:
    for interface in INTERFACES:
        for element in describe(interface).iter():
            if element.tag in ("interface", "method", "signal", "property"):
                docs = element.findall("annotation[@name='org.gtk.GDBus.DocString']")
                assert len(docs) == 1, (interface.name, element.attrib)
        assert document(interface).startswith(f'<node>\n  <interface name="{interface.name}">')


def test_the_page_is_up_to_date() -> None:
    make_dbus = runpy.run_path(str(REPOSITORY / "packaging/make_dbus.py"))
    text = (REPOSITORY / "docs/reference/dbus.md").read_text()
    assert make_dbus["page"](text) == text, "`python packaging/make_pages.py` writes it again"
    with pytest.raises(SystemExit, match="put the marks"):
        make_dbus["page"](text.replace("<!-- org.phos.Job1:", ""))


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
