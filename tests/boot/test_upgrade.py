"""A newer package over a running older one: no program and no image is lost."""

from pathlib import Path

import pytest

from tests.boot import target
from tests.boot.machine import Failed, Machine
from tests.boot.package import install, newer
from tests.boot.target import phos, restore_after_kill
from tests.boot.test_systemd import begin, require_unharmed, slowly
from tests.support.harness import wait_until


def test_programs_and_images_of_before_can_be_used_after(
    booted: Machine, package: Path, tmp_path: Path
) -> None:
    program = target.start(booted, "ann")
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    main_pid = "systemctl show --property=MainPID --value phosd"
    before = booted.run(main_pid)
    booted.run("echo 'retention_days = 30' >>/etc/phos/phosd.toml")
    hook = "readlink -f /usr/lib/phos/libphos_hook.so"
    old_hook = booted.run(hook)
    install(booted, newer(package, tmp_path))
    assert booted.run("dpkg-query --show --showformat='${Version}' phosd") == "999"
    assert booted.run("systemctl is-active phosd") == "active\n"
    assert booted.run(main_pid) != before
    assert "retention_days = 30" in booted.run("cat /etc/phos/phosd.toml"), "it is a conffile"
    assert booted.run(hook) != old_hook
    program.more_steps(3)
    assert image in [found["id"] for found in phos(booted, "images", "ann")]
    later = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    restore_after_kill(program, image)
    restore_after_kill(program, later)
    program.kill()


def test_programs_of_before_a_removal_can_be_used_after_a_new_installation(
    booted: Machine, package: Path
) -> None:
    """Also one with a name, in a pid namespace of its own, which sees the old folder of sockets."""
    program = target.start(booted, "ann")
    named = target.start(booted, "bob", gpu="--gpu soft --name kept")
    booted.run("dpkg --remove phosd")
    program.more_steps(3)
    install(booted, package)
    for each, user in ((program, "ann"), (named, "bob")):
        words = f"ps {each.pid}"
        wait_until(lambda: phos(booted, words, user)[0]["hook"] == "hooked", "the hook")  # noqa: B023
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    restore_after_kill(program, image)
    program.kill()
    assert phos(booted, "checkpoint kept", "bob")[-1]["state"] == "done"
    named.more_steps(3)
    named.kill()


def test_after_a_purge_programs_of_before_must_be_started_anew(
    booted: Machine, package: Path
) -> None:
    program = target.start(booted, "ann")
    booted.run("dpkg --purge phosd")
    install(booted, package)
    with pytest.raises(Failed, match="which was replaced since"):
        phos(booted, f"checkpoint {program.pid}", "ann")
    program.more_steps(3)
    program.kill()


def test_in_the_middle_of_a_checkpoint(booted: Machine, package: Path, tmp_path: Path) -> None:
    for image in phos(booted, "images"):
        phos(booted, f"rm {image['id']}")
    program = target.start(booted, "ann")
    with slowly(program):
        begin(program, "concurrent", "drain")
        install(booted, newer(package, tmp_path))
        require_unharmed(program)
    program.kill()
