"""The package in a booted Debian: installed, used by a user, removed without a trace."""

import json

from tests.boot import target
from tests.boot.machine import UIDS, Machine

LIST_GPUS = "busctl --timeout=30 call org.phos /org/phos org.phos.Manager1 ListGPUs"


def phos(machine: Machine, words: str, user: str = "root") -> list[dict[str, object]]:
    """The lines of a command of ``phos --json``, which must succeed."""
    said = machine.run(f"phos --json {words}", user=user)
    return [json.loads(line) for line in said.splitlines()]


def test_a_program_of_a_user_is_saved_killed_and_restored(booted: Machine) -> None:
    program = target.start(booted, "ann")
    (listed,) = phos(booted, "ps", "ann")
    assert (listed["pid"], listed["hook"], listed["user"]) == (program.pid, "hooked", UIDS["ann"])
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    program.more_steps(10)
    program.kill()
    before, since = program.values(), program.position()
    assert phos(booted, f"restore {image}", "ann")[-1]["result"] == str(program.pid)
    target.require_continuation(program, before, since)
    assert booted.run(f"stat -c %U /proc/{program.pid}").strip() == "ann"
    program.kill()
    phos(booted, f"verify {image}", "ann")
