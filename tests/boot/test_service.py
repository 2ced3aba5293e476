"""A user's service with the drop-in of the examples: saved, killed, restored."""

import shlex

import pytest

from tests.boot import target
from tests.boot.machine import Failed, Machine
from tests.boot.target import phos
from tests.support.harness import parse, wait_until

_EXAMPLE = "/usr/share/doc/phosd/examples/systemd/50-phos.conf"
_UNIT = """\
[Service]
User=ann
WorkingDirectory=/
ExecStart={command}
Environment={variables}
Environment=LD_LIBRARY_PATH=/usr/lib/phos/softgpu
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
"""


@pytest.fixture(scope="module")
def service(booted: Machine) -> Machine:
    """The machine, with a service ``train`` that is hardened as services are."""
    variables = shlex.join(f"{name}={value}" for name, value in target.VARIABLES.items())
    unit = _UNIT.format(command=target.command("single"), variables=variables)
    booted.put("/etc/systemd/system/train.service", unit)
    return booted


def values(machine: Machine) -> dict[int, str]:
    """What the service has said to the journal since it was started last."""
    identity = machine.run("systemctl show --property=InvocationID --value train").strip()
    said = machine.run(f"journalctl --output=cat _SYSTEMD_INVOCATION_ID={identity}", unit=False)
    return parse(said.encode())


def start(machine: Machine) -> int:
    """Start the service anew; its pid when it computes."""
    machine.run("systemctl daemon-reload; systemctl restart train")
    wait_until(lambda: len(values(machine)) > 3, "the service to compute")
    return int(machine.run("systemctl show --property=MainPID --value train"))


def test_without_the_drop_in_a_sandboxed_service_is_refused_with_the_reason(
    service: Machine,
) -> None:
    pid = start(service)
    with pytest.raises(Failed) as caught:
        phos(service, f"checkpoint {pid}")
    assert '"Unsupported"' in caught.value.output
    assert "its own mnt" in caught.value.output
    count = len(values(service))
    wait_until(lambda: len(values(service)) > count, "it to go on")


def test_a_program_in_a_box_of_its_own_is_listed_and_refused(service: Machine) -> None:
    """The hook, its folder and the pids are the host's, the rest is not: as a container has it."""
    variables = {**target.VARIABLES, "LD_LIBRARY_PATH": "/usr/lib/phos/softgpu"}
    variables["LD_PRELOAD"] = "/usr/lib/phos/libphos_hook.so"
    settings = " ".join(f"--setenv={name}={value}" for name, value in variables.items())
    run = "systemd-run --quiet --collect --unit=box --uid=ann --property=PrivateTmp=yes"
    service.run(f"{run} {settings} {target.command('single')}")
    pid = int(service.run("systemctl show --property=MainPID --value box"))
    wait_until(lambda: any(p["pid"] == pid for p in phos(service, "ps")), "the program")
    with pytest.raises(Failed, match="its own mnt namespace"):
        phos(service, f"checkpoint {pid}")
    assert service.run("systemctl is-active box") == "active\n"
    service.run("systemctl stop box")


def test_with_the_drop_in_a_service_is_saved_and_restored(service: Machine) -> None:
    place = "/etc/systemd/system/train.service.d/50-phos.conf"
    service.run(f"install -D -m 644 {_EXAMPLE} {place}")
    pid = start(service)
    listed = {process["pid"]: process["hook"] for process in phos(service, "ps")}
    assert listed[pid] == "hooked"
    image = phos(service, f"checkpoint {pid}", "ann")[-1]["result"]
    assert service.run("findmnt --noheadings --output FSTYPE /run/phos/memory") == "tmpfs\n"
    assert service.run(f"ls /run/phos/memory/images/{image}/manifest.json")
    wait_until(
        lambda: [i["state"] for i in phos(service, "images") if i["id"] == image] == ["durable"],
        "the image to be on the disk",
    )
    assert service.run(f"ls /var/lib/phos/images/{image}/manifest.json")
    count = len(values(service))
    wait_until(lambda: len(values(service)) > count + 10, "it to go on")
    before = values(service)
    service.run("systemctl kill --signal=KILL train")
    wait_until(
        lambda: service.run("systemctl is-active train", check=False) == "failed\n", "its end"
    )
    log = "/home/ann/restored.log"
    assert phos(service, f"restore {image} --output {log}", "ann")[-1]["result"] == str(pid)

    def again() -> dict[int, str]:
        return parse((service.tree / log[1:]).read_bytes())

    wait_until(lambda: len(again().keys() & before.keys()) > 5, "the restored service")
    common = again().keys() & before.keys()
    assert {n: again()[n] for n in common} == {n: before[n] for n in common}
    assert service.run(f"stat -c %U /proc/{pid}") == "ann\n"
    assert service.run(f"cat /proc/{pid}/oom_score_adj") == "0\n", "CRIU's is -900"
    service.run(f"kill -9 {pid}")
