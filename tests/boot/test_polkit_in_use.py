"""polkit as it is shipped, asked by users who answer it themselves, or leave before it answers."""

import json

import pytest

from tests.boot import target
from tests.boot.machine import Failed, Machine
from tests.boot.target import phos

_AGENT = """\
import asyncio, json, os, sys
sys.path.insert(0, "/usr/lib/phos/python")
from phosd.bus import CallError, Connection, Variant

POLKIT = "org.freedesktop.PolicyKit1"
AUTHORITY = ("/org/freedesktop/PolicyKit1/Authority", POLKIT + ".Authority")
told = {"asked": [], "answers": [], "call": ""}

class Agent:
    def __init__(self, bus):
        self.bus, self.tasks = bus, []
    def take(self, call):
        self.tasks.append(asyncio.create_task(self.bus.reply(call, self.answer)))
    async def answer(self, call):
        told["asked"].append(call.args[0])
        cookie, (kind, details) = call.args[4], call.args[5][0]
        identity = [kind, {name: Variant("u", uid) for name, uid in details.items()}]
        for member, kinds, words in (
            ("AuthenticationAgentResponse", "s(sa{sv})", [cookie, identity]),
            ("AuthenticationAgentResponse2", "us(sa{sv})", [0, cookie, identity]),
        ):
            try:
                await self.bus.call(*AUTHORITY, member, kinds, *words, destination=POLKIT)
                told["answers"].append("taken")
            except CallError as error:
                told["answers"].append(error.name)
        return "", []
    def gone(self, client): pass
    def lost(self): pass

async def main():
    bus = await Connection.open("system")
    bus.serve(Agent(bus))
    session = ["unix-session", {"session-id": Variant("s", os.environ["XDG_SESSION_ID"])}]
    words = (session, "C", "/agent")
    await bus.call(
        *AUTHORITY, "RegisterAuthenticationAgent", "(sa{sv})ss", *words, destination=POLKIT
    )
    busctl = ["busctl", "call", "org.phos", "/org/phos", "org.phos.Manager1", *sys.argv[1:]]
    done = await asyncio.create_subprocess_exec(*busctl, stdout=-1, stderr=-2)
    told["call"] = (await done.communicate())[0].decode()
    print(json.dumps(told))

asyncio.run(main())
"""

_LEAVE = """\
import asyncio, sys
sys.path.insert(0, "/usr/lib/phos/python")
from phosd.bus import Connection

async def main(image):
    for number in range(300):
        bus = await Connection.open("system")
        words = ("/org/phos", "org.phos.Manager1", "DeleteImage", "sa{sv}", image, {})
        call = asyncio.create_task(bus.call(*words, destination="org.phos"))
        await asyncio.sleep(number % 100 * 0.0003)
        bus.close()
        call.cancel()
        await asyncio.wait([call])

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def image(booted: Machine) -> str:
    """An image of Ann's; her program has ended."""
    program = target.start(booted, "ann")
    saved = phos(booted, f"checkpoint {program.pid}", "ann")[-1]
    program.kill()
    return str(saved["result"])


def test_the_agent_of_a_user_vouches_for_nobody(booted: Machine, image: str) -> None:
    booted.put("/opt/agent.py", _AGENT)
    line = f"python3 /opt/agent.py DeleteImage 'sa{{sv}}' {image} 0"
    told = json.loads(booted.run(line, user="bob").splitlines()[-1])
    assert told["asked"] == ["org.phos.delete-others"]
    assert len(told["answers"]) == 2
    assert "taken" not in told["answers"]
    assert "belongs to uid 1000" in told["call"]
    phos(booted, f"verify {image}", "ann")


def test_nobody_is_taken_for_another_by_leaving(booted: Machine, image: str) -> None:
    """A polkit was once told by an error that the caller, who had left, was root."""
    booted.put("/opt/leave.py", _LEAVE)
    booted.run(f"python3 /opt/leave.py {image}", user="bob")
    phos(booted, f"verify {image}", "ann")
    with pytest.raises(Failed, match="belongs to uid 1000"):
        phos(booted, f"rm {image}", "bob")


def test_a_rule_for_one_user_holds_for_that_one_and_that_action(
    booted: Machine, image: str
) -> None:
    rule = 'polkit.addRule(function(a, s) { if (a.id == "org.phos.verify-others"'
    rule += ' && a.lookup("owner") == "1000" && s.user == "bob") return polkit.Result.YES; });'
    place = "/etc/polkit-1/rules.d/10-operators.rules"
    booted.put(place, rule)
    booted.run("systemctl restart polkit.service")
    phos(booted, f"verify {image}", "bob")
    with pytest.raises(Failed, match="belongs to uid 1000"):
        phos(booted, f"rm {image}", "bob")
    nobody = "systemd-run --quiet --collect --wait --pipe --uid=nobody phos verify"
    with pytest.raises(Failed, match="belongs to uid 1000"):
        booted.run(f"{nobody} {image}")
    booted.run(f"rm {place}; systemctl restart polkit.service")
