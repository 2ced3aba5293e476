"""The object tree: introspection, properties, who may read what, and the ObjectManager."""

import asyncio
import os
import pwd
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phosd.bus import Connection, Signal, clean, path_of, plain
from tests.support.bus import busctl
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import MANAGER, ROOT, Service

STRANGER = pwd.getpwnam("nobody").pw_uid
PROPERTIES = "org.freedesktop.DBus.Properties"
GPU_PATH = path_of("gpu", "GPU-1234-ab")
PROCESS = f"/org/phos/process/_{os.getpid()}_1"


def introspect(service: Service, path: str) -> ElementTree.Element:
    return ElementTree.fromstring(
        busctl(service.address, "introspect", "--xml-interface", "org.phos", path)
    )


def show_process(service: Service, **changes: object) -> None:
    service.engine.running = [this_process(**changes)]
    service.call("ListProcesses")


def test_the_manager_is_introspected_completely(service: Service) -> None:
    node = introspect(service, ROOT)
    interfaces = {i.attrib["name"]: i for i in node.iter("interface")}
    assert f"{PROPERTIES.rpartition('.')[0]}.ObjectManager" in interfaces
    manager = interfaces[MANAGER]
    methods = {
        m.attrib["name"]: [
            "".join(a.attrib["type"] for a in m.iter("arg") if a.attrib["direction"] == direction)
            for direction in ("in", "out")
        ]
        for m in manager.iter("method")
    }
    assert methods == {
        "Checkpoint": ["ua{sv}", "o"],
        "Restore": ["sa{sv}", "o"],
        "CreatePool": ["ssa{sv}", ""],
        "ScalePool": ["sa{sv}", ""],
        "RemovePool": ["s", ""],
        "ListPools": ["", "a(susuuo)"],
        "StartPooled": ["sa{sv}", "o"],
        "Migrate": ["usa{sv}", "o"],
        "Suspend": ["ua{sv}", "o"],
        "Resume": ["ua{sv}", "o"],
        "Swap": ["uua{sv}", "o"],
        "PlanEvacuation": ["sa{sv}", "a(ustsss)"],
        "Continue": ["ua{sv}", ""],
        "TryCheckpoint": ["ua{sv}", "a(sss)"],
        "TryRestore": ["sa{sv}", "a(sss)"],
        "Export": ["ssa{sv}", "o"],
        "Import": ["sa{sv}", "o"],
        "TryImport": ["sa{sv}", "a(sss)"],
        "Recover": ["ua{sv}", "s"],
        "VerifyImage": ["sa{sv}", "o"],
        "DeleteImage": ["sa{sv}", ""],
        "PlanPruning": ["sa{sv}", "a(sstts)"],
        "RemoveOutputs": ["sasa{sv}", "as"],
        "RemoveFiles": ["asa{sv}", "as"],
        "MakePidNamespace": ["sa{sv}", "u"],
        "GetProcess": ["u", "o"],
        "GetImage": ["s", "o"],
        "GetJob": ["u", "o"],
        "ListProcesses": ["", "a(uustsso)"],
        "ListImages": ["", "a(stuttso)"],
        "ListJobs": ["", "a(ussso)"],
        "ListGPUs": ["", "a(usstto)"],
        "GetStorage": ["", "(tttt)"],
        "ListHistory": ["a{sv}", "aa{sv}"],
        "ListEvents": ["a{sv}", "aa{sv}"],
    }
    signals = {s.attrib["name"] for s in manager.iter("signal")}
    assert signals == {
        "JobNew",
        "JobRemoved",
        "ProcessNew",
        "ProcessRemoved",
        "ImageNew",
        "ImageRemoved",
        "EventNew",
    }


def test_the_tree_can_be_walked_from_the_top(service: Service) -> None:
    show_process(service)
    service.engine.stored["2026-a"] = manifest("2026-a")
    service.call("ListImages")
    service.call("ListGPUs")
    tree = busctl(service.address, "tree", "--list", "org.phos").split()
    assert {"/", "/org", ROOT, PROCESS, path_of("image", "2026-a")} <= set(tree)
    assert path_of("gpu", "GPU-1234-ab") == "/org/phos/gpu/GPU_2d1234_2dab"
    assert path_of("gpu", "GPU-1234-ab") in tree
    for path in tree:
        introspect(service, path)


def test_properties_have_the_types_that_introspection_says(service: Service) -> None:
    show_process(service)
    service.engine.stored["i"] = manifest("i")
    service.call("ListImages")
    service.call("ListGPUs")
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    for path in (
        ROOT,
        PROCESS,
        "/org/phos/image/i",
        "/org/phos/job/_1",
        GPU_PATH,
    ):
        for interface in introspect(service, path).iter("interface"):
            for declared in interface.iter("property"):
                line = busctl(
                    service.address,
                    "get-property",
                    "org.phos",
                    path,
                    interface.attrib["name"],
                    declared.attrib["name"],
                )
                assert line.split()[0] == declared.attrib["type"], (path, declared.attrib)


def test_what_belongs_to_others_is_not_listed_read_or_named(service: Service) -> None:
    show_process(service, uid=1, command=("train", "--password=x"))
    service.engine.stored["i"] = manifest("i", owner=1)
    service.call("ListImages")
    image, job = "/org/phos/image/i", service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    managed = ("call", "org.phos", ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
    tree = ("tree", "--list", "org.phos")
    for call in (managed, tree):
        assert {PROCESS, image, job} <= set(
            re.findall("/org[/\\w]*", busctl(service.address, *call))
        )
        seen = set(re.findall("/org[/\\w]*", busctl(service.address, *call, uid=STRANGER)))
        assert GPU_PATH in seen
        assert not {PROCESS, image, job} & seen
    named = (f"process {os.getpid()}", "image i", f"job {job.rpartition('_')[2]}")
    interfaces = ((PROCESS, "Process1"), (image, "Image1"), (job, "Job1"))
    for what, (path, interface) in zip(named, interfaces, strict=True):
        read = ("call", "org.phos", path, PROPERTIES, "GetAll", "s", f"org.phos.{interface}")
        assert "password" in busctl(service.address, *read) or path != PROCESS
        with pytest.raises(RuntimeError, match=f"{what} belongs to uid"):
            busctl(service.address, *read, uid=STRANGER)
        name = busctl(service.address, *read).split('"')[1]
        with pytest.raises(RuntimeError, match=f"{what} belongs to uid"):
            service.get(path, interface, name, uid=STRANGER)
    with pytest.raises(RuntimeError, match="belongs to uid 1"):
        service.call("GetProcess", "u", os.getpid(), uid=STRANGER)
    for member in ("ListProcesses", "ListImages", "ListJobs"):
        assert service.call(member).split()[1] == "1"
        assert service.call(member, uid=STRANGER).split()[1] == "0"
        assert service.call(member, uid=1).split()[1] == ("0" if member == "ListJobs" else "1")
    assert "password" in service.get(PROCESS, "Process1", "CommandLine", uid=1)


def test_troubles_are_for_administrators(service: Service) -> None:
    assert service.get(ROOT, "Manager1", "Troubles") == "0"
    with pytest.raises(RuntimeError, match="Troubles is for administrators"):
        service.get(ROOT, "Manager1", "Troubles", uid=STRANGER)
    everything = ("call", "org.phos", ROOT, PROPERTIES, "GetAll", "s", MANAGER)
    assert "Troubles" in busctl(service.address, *everything)
    seen = busctl(service.address, *everything, uid=STRANGER)
    assert "Version" in seen
    assert "Troubles" not in seen


def test_comings_and_goings_are_announced_without_private_things(service: Service) -> None:
    heard: list[Signal] = []

    async def listen() -> None:
        connection = await Connection.open(service.address)
        await connection.subscribe(heard.append, "sender='org.phos'")
        await asyncio.to_thread(show_process, service, command=("train", "--password=x"))
        await asyncio.to_thread(show_process, service, state="parked")
        service.engine.running = []
        await asyncio.to_thread(service.call, "ListProcesses")
        await asyncio.sleep(0.1)
        connection.close()

    asyncio.run(listen())
    assert "password" not in repr(heard)
    mine = [s for s in heard if PROCESS in (s.path, *s.args)]
    assert [(s.path, s.member) for s in mine] == [
        (ROOT, "InterfacesAdded"),
        (ROOT, "ProcessNew"),
        (PROCESS, "PropertiesChanged"),
        (ROOT, "InterfacesRemoved"),
        (ROOT, "ProcessRemoved"),
    ]
    assert mine[0].args[1]["org.phos.Process1"]["Pid"] == os.getpid()
    assert mine[2].args[1] == {"State": "parked"}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ((ROOT, PROPERTIES, "Get", "ss", MANAGER, "Nothing"), "has no Nothing"),
        (
            (ROOT, PROPERTIES, "Get", "ss", "org.phos.Job1", "State"),
            "has no interface org.phos.Job1",
        ),
        ((ROOT, PROPERTIES, "Set", "ssv", MANAGER, "Version", "s", "2"), "cannot be set"),
        ((ROOT, PROPERTIES, "Get", "s", MANAGER), "Get takes 'ss'"),
        (("/org/phos/job/_99", PROPERTIES, "GetAll", "s", ""), "there is no job 99"),
        ((ROOT, "org.phos.Job1", "Cancel", "a{sv}", "0"), "has no method org.phos.Job1.Cancel"),
    ],
)
def test_reads_that_make_no_sense(service: Service, call: tuple[str, ...], error: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        busctl(service.address, "call", "org.phos", *call)
    assert error in str(caught.value)


def test_peer_answers_ping(service: Service) -> None:
    busctl(service.address, "call", "org.phos", ROOT, "org.freedesktop.DBus.Peer", "Ping")


def test_a_hook_that_appears_is_noticed_at_once(service: Service) -> None:
    hooks = service.config.runtime_dir / "hook"
    service.engine.running = [this_process()]
    hooks.mkdir(exist_ok=True)
    (hooks / "4711.sock").touch()
    wait_until(
        lambda: PROCESS in busctl(service.address, "tree", "--list", "org.phos").split(),
        "the process",
    )
    assert service.call("GetProcess", "u", os.getpid()) == f'o "{PROCESS}"'


def test_strings_that_a_bus_cannot_carry_are_made_ones_that_it_can() -> None:
    odd = os.fsdecode(b"a\xffb\0c")
    assert clean([odd, {odd: (odd,)}]) == ["a?b c", {"a?b c": ["a?b c"]}]
    assert plain({"a": [1, "x"]}) == {"a": [1, "x"]}


def test_a_command_line_of_any_bytes_does_not_break_the_connection(service: Service) -> None:
    show_process(service, command=(os.fsdecode(b"tr\xffain"),))
    assert service.get(PROCESS, "Process1", "CommandLine") == '1 "tr?ain"'


def test_the_documentation_names_every_member(service: Service) -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "dbus.md").read_text()
    show_process(service)
    service.engine.stored["i"] = manifest("i")
    service.call("ListImages")
    service.call("ListGPUs")
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    for path in (ROOT, PROCESS, "/org/phos/image/i", "/org/phos/job/_1", GPU_PATH):
        for interface in introspect(service, path).iter("interface"):
            if interface.attrib["name"].startswith("org.phos."):
                for member in (m for m in interface if m.tag != "annotation"):
                    assert f"`{member.attrib['name']}" in text, (path, member.attrib["name"])
