"""The package in a booted Debian: installed, used by a user, removed without a trace."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.boot import machine, target
from tests.boot.machine import UIDS, Failed, Machine
from tests.boot.package import install
from tests.boot.target import phos, restore_after_kill

LIST_GPUS = "busctl --timeout=30 call org.phos /org/phos org.phos.Manager1 ListGPUs"
_FILES = "find / -xdev -path /var/log -prune -o -path /var/lib/dpkg -prune -o -path /root -prune"
_FILES += " -o -path /home -prune -o -path /var/lib/systemd -prune -o -print | sort"
"""Lists the whole system, without what is about users or records what has happened."""


def test_a_program_of_a_user_is_saved_killed_and_restored(booted: Machine) -> None:
    program = target.start(booted, "ann")
    assert all(row["level"] != "error" for row in phos(booted, "doctor", "ann"))
    (listed,) = phos(booted, "ps", "ann")
    assert (listed["pid"], listed["hook"], listed["user"]) == (program.pid, "hooked", UIDS["ann"])
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    restore_after_kill(program, image)
    assert booted.run(f"stat -c %U /proc/{program.pid}").strip() == "ann"
    phos(booted, f"verify {image}", "ann")
    program.kill()


_TYPIST = r"""
import os, pty, select, sys, time

pid, terminal = pty.fork()
if pid == 0:
    os.environ["PS1"] = "ready"
    os.execv("/bin/bash", ["bash", "--norc", "-i"])
said, deadline = b"", time.monotonic() + 60

def wait_for(text):
    global said
    while text not in said:
        if not select.select([terminal], [], [], deadline - time.monotonic())[0]:
            sys.exit(f"waited in vain for {text}: {said}")
        said += os.read(terminal, 1000)
    said = said.partition(text)[2]

wait_for(b"ready")
os.write(terminal, b". /usr/share/bash-completion/bash_completion\n")
wait_for(b"ready")
for typed, completed in ((b"phos ch\t", b"phos checkpoint "), (b"--mod\t", b"--mode ")):
    os.write(terminal, typed)
    wait_for(completed)
os.write(terminal, b"re\t")
wait_for(b"recopy")
os.kill(pid, 9)
"""
"""Somebody who types, and presses TAB."""


def test_tab_completes_what_is_typed(booted: Machine) -> None:
    booted.put("/root/typist.py", _TYPIST)
    booted.run("python3 /root/typist.py")


def test_an_image_outlives_a_reboot(booted: Machine) -> None:
    program = target.start(booted, "ann")
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    before, since = program.more_steps(10), program.position()
    booted.reboot()
    assert booted.run("systemctl is-active phosd") == "active\n", "it is enabled"
    assert not program.alive
    assert phos(booted, f"restore {image}", "ann")[-1]["result"] == str(program.pid)
    target.require_continuation(program, before, since)
    program.kill()


def test_installed_into_an_image_it_runs_from_the_first_boot_on(
    base_tree: Path, package: Path
) -> None:
    def install_without_systemd(tree: Path) -> None:
        shutil.copy(package, tree / "phosd.deb")
        subprocess.run(["chroot", tree, "dpkg", "--install", "/phosd.deb"], check=True)

    with machine.booted(base_tree, install_without_systemd) as started:
        assert started.run("systemctl is-active phosd phosd-criu.socket") == "active\nactive\n"
        assert "PHOS software GPU" in started.run(LIST_GPUS, user="bob")
        assert started.run("systemctl --failed --plain --no-legend") == ""


def test_the_demo_says_what_it_lacks(booted: Machine) -> None:
    with pytest.raises(Failed, match="numpy, scikit-learn; `make demo` in a checkout"):
        booted.run("phos demo")


def test_it_leaves_nothing_behind(plain: Machine, package: Path) -> None:
    before = plain.run(_FILES)
    install(plain, package)
    assert plain.run("systemctl is-active phosd") == "active\n"
    plain.run("systemctl stop phosd")
    assert "PHOS software GPU" in plain.run(LIST_GPUS, user="bob"), "the call has started phosd"
    program = target.start(plain, "ann")
    image = phos(plain, f"checkpoint {program.pid}", "ann")[-1]["result"]

    plain.run("dpkg --remove phosd")
    running = plain.run("ps -e -o args=", unit=False).splitlines()
    assert [words for words in running if "/usr/lib/phos" in words or "phosd" in words] == []
    assert plain.run("systemctl --failed --plain --no-legend") == ""
    assert plain.run("busctl list --no-legend | grep org.phos", check=False) == ""
    program.more_steps(3)
    assert plain.run(f"ls -d /var/lib/phos/images/{image}"), "only a purge deletes images"
    assert plain.run("ls /etc/phos") == "phosd.toml\n"
    left = set(plain.run(_FILES).splitlines()) - set(before.splitlines())
    kept = ("/var/lib/phos", "/var/cache/phos", "/etc/", "/usr/lib/phos/kept")
    assert left - {"/usr/lib/phos"} == {path for path in left if path.startswith(kept)}

    plain.run("dpkg --purge phosd")
    assert plain.run(_FILES) == before
    assert not (plain.tree / "run/phos").exists()
    assert plain.run("test ! -e /run/phos && echo gone") == "gone\n"
    program.more_steps(3)
    program.kill()
