"""polkit says who may do what; without it other rules hold."""

import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phosd.service.dbus.polkit import INSPECT, Action
from tests.support.authority import CHALLENGE, NO, YES, Authority, authority
from tests.support.bus import busctl
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import MANAGER, ROOT, Service

POLICY = Path(__file__).parents[3] / "systemd" / "org.phos.policy"
POLKITD = Path("/usr/lib/polkit-1/polkitd")
STRANGER = pwd.getpwnam("nobody").pw_uid
OWNER = pwd.getpwnam("daemon").pw_uid


@pytest.fixture
def polkit(bus: str) -> Iterator[Authority]:
    with authority(bus, NO) as standing_in:
        yield standing_in


@pytest.fixture
def target() -> Iterator[int]:
    """A process of a user."""
    with subprocess.Popen(["sleep", "1000"], user=OWNER, group=OWNER, extra_groups=[]) as process:
        yield process.pid
        process.kill()


def actions() -> dict[str, ElementTree.Element]:
    return {e.attrib["id"]: e for e in ElementTree.parse(POLICY).getroot().iter("action")}


def test_the_policy_names_what_the_code_asks_for() -> None:
    asked = {action.on(own=own) for action in Action for own in (True, False)} | {INSPECT}
    assert set(actions()) == asked


def test_the_policy_lets_everybody_do_what_is_their_own_and_administrators_the_rest() -> None:
    for name, element in actions().items():
        verdict = "auth_admin_keep" if name.endswith("-others") else "yes"
        defaults = element.find("defaults")
        assert defaults is not None
        allowed = {child.tag: child.text for child in defaults}
        assert allowed == dict.fromkeys(("allow_any", "allow_inactive", "allow_active"), verdict)


def test_polkit_is_asked_about_the_connection_and_told_what_for(
    service: Service, polkit: Authority, target: int
) -> None:
    polkit.verdicts["org.phos.checkpoint"] = YES
    service.start("Checkpoint", "ua{sv}", target, 0, uid=OWNER)
    (question,) = polkit.questions
    assert (question.kind, question.action) == ("system-bus-name", "org.phos.checkpoint")
    assert question.subject.startswith(":1.")
    assert question.details == {"pid": str(target), "owner": str(OWNER)}
    service.engine.stored["mine"] = manifest("mine", owner=OWNER)
    with pytest.raises(RuntimeError, match="may not delete image mine"):
        service.call("DeleteImage", "sa{sv}", "mine", 0, uid=OWNER)
    assert polkit.questions[-1].details == {"image": "mine", "owner": str(OWNER)}
    assert "mine" in service.engine.stored


def test_root_is_not_asked_about(service: Service, polkit: Authority, target: int) -> None:
    service.start("Checkpoint", "ua{sv}", target, 0)
    service.call("ListHistory", "a{sv}", 0)
    assert not polkit.questions


@pytest.mark.parametrize(
    ("call", "action"),
    [
        (("Checkpoint", "ua{sv}", "PID", 0), "checkpoint"),
        (("TryCheckpoint", "ua{sv}", "PID", 0), "checkpoint"),
        (("Restore", "sa{sv}", "theirs", 0), "restore"),
        (("TryRestore", "sa{sv}", "theirs", 0), "restore"),
        (("VerifyImage", "sa{sv}", "theirs", 0), "verify"),
        (("VerifyImage", "sa{sv}", "theirs", 1, "rehearse", "b", "true"), "restore"),
        (("DeleteImage", "sa{sv}", "theirs", 0), "delete"),
        (("Migrate", "usa{sv}", "PID", "1", 0), "migrate"),
        (("Suspend", "ua{sv}", "PID", 0), "migrate"),
        (("Resume", "ua{sv}", "PID", 0), "migrate"),
        (("Swap", "uua{sv}", "PID", 1, 0), "migrate"),
    ],
)
def test_each_call_has_its_action_for_what_is_others(
    service: Service, polkit: Authority, target: int, call: tuple[object, ...], action: str
) -> None:
    service.engine.stored["theirs"] = manifest("theirs", owner=OWNER)
    asked = [str(target) if part == "PID" else str(part) for part in call]
    for verdict, hint in ((NO, "have polkit allow"), (CHALLENGE, "let polkit ask for a password")):
        polkit.verdicts[f"org.phos.{action}-others"] = verdict
        with pytest.raises(RuntimeError, match=f"belongs to uid {OWNER}") as caught:
            service.call(*asked, uid=STRANGER)
        assert hint in str(caught.value)
    assert {q.action for q in polkit.questions} == {f"org.phos.{action}-others"}
    assert "theirs" in service.engine.stored
    polkit.verdicts[f"org.phos.{action}-others"] = YES
    service.call(*asked, uid=STRANGER)


def test_who_is_let_do_it_with_what_is_others_does_it_with_roots_rights(
    service: Service, polkit: Authority, target: int
) -> None:
    callers: list[int] = []
    original = service.engine.checkpoint

    def checkpoint(pid, request, caller, *rest):  # type: ignore[no-untyped-def]
        callers.append(caller)
        return original(pid, request, caller, *rest)

    service.engine.checkpoint = checkpoint  # type: ignore[method-assign]
    service.engine.go.set()
    polkit.verdicts |= {"org.phos.checkpoint-others": YES, "org.phos.checkpoint": YES}
    for number, (uid, acting) in enumerate(((STRANGER, 0), (OWNER, OWNER)), 1):
        job = service.start("Checkpoint", "ua{sv}", target, 0, uid=uid)
        wait_until(lambda: service.get(job, "Job1", "State") == '"done"', "the job")  # noqa: B023
        assert service.get(job, "Job1", "Owner") == str(uid)
        assert callers[-1] == acting
        assert len(callers) == number


def test_a_password_is_asked_for_only_if_the_call_says_so(
    service: Service, polkit: Authority, target: int
) -> None:
    for allow in ("yes", "no"):
        with pytest.raises(RuntimeError):
            busctl(
                service.address,
                f"--allow-interactive-authorization={allow}",
                *("call", "org.phos", ROOT, MANAGER, "Checkpoint", "ua{sv}", str(target), "0"),
                uid=STRANGER,
            )
    assert [q.may_ask_user for q in polkit.questions] == [True, False]
    service.call("ListHistory", "a{sv}", 0, uid=STRANGER)
    assert polkit.questions[-1].action == INSPECT
    assert not polkit.questions[-1].may_ask_user


def test_administrators_see_everything(service: Service, polkit: Authority) -> None:
    service.engine.running = [this_process(uid=OWNER)]
    service.engine.stored["theirs"] = manifest("theirs", owner=OWNER)
    polkit.verdicts[INSPECT] = YES
    assert service.call("ListProcesses", uid=STRANGER).split()[1] == "1"
    assert '"theirs"' in service.call("ListImages", uid=STRANGER)
    assert "train" in service.get("/org/phos/image/theirs", "Image1", "CommandLine", uid=STRANGER)
    assert {q.action for q in polkit.questions} == {INSPECT}
    assert '"theirs"' in service.call("ListImages", uid=OWNER)  # without being asked about


def test_what_is_own_is_seen_without_a_question(service: Service, polkit: Authority) -> None:
    service.engine.stored["mine"] = manifest("mine", owner=OWNER)
    assert '"mine"' in service.call("ListImages", uid=OWNER)
    service.get("/org/phos/image/mine", "Image1", "CommandLine", uid=OWNER)
    assert not polkit.questions


def test_a_caller_who_leaves_takes_the_question_along(
    service: Service, polkit: Authority, target: int
) -> None:
    polkit.silent.add("org.phos.checkpoint-others")
    command = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    command += ["busctl", f"--address={service.address}", "call", "org.phos", ROOT, MANAGER]
    with subprocess.Popen([*command, "Checkpoint", "ua{sv}", str(target), "0"]) as caller:
        wait_until(lambda: polkit.questions, "the question")
        assert not polkit.cancelled
        caller.kill()
    wait_until(lambda: polkit.cancelled == [polkit.questions[0].ticket], "it to be taken back")
    assert service.call("ListJobs").split()[1] == "0"


def test_polkit_that_does_not_answer_is_given_up(
    service: Service, polkit: Authority, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phosd.service.dbus.polkit.SLOW", 0.3)
    monkeypatch.setattr("phosd.service.dbus.polkit.QUICK", 0.3)
    monkeypatch.setattr("phosd.service.dbus.polkit.READING", 0.3)
    polkit.silent |= {"org.phos.checkpoint", INSPECT}
    with pytest.raises(RuntimeError, match="polkit gave no answer about"):
        service.call("Checkpoint", "ua{sv}", target, 0, uid=OWNER)
    service.engine.stored["theirs"] = manifest("theirs")
    assert service.call("ListImages", uid=OWNER).split()[1] == "0"
    wait_until(lambda: len(polkit.cancelled) == 2, "both questions to be taken back")


def test_polkit_that_does_not_answer_delays_one_list_and_no_other(
    service: Service, polkit: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but root sees what belongs to others until it is asked again."""
    monkeypatch.setattr("phosd.service.dbus.polkit.READING", 0.3)
    monkeypatch.setattr("phosd.service.dbus.polkit.SILENCE", 1.0)
    polkit.silent.add(INSPECT)
    polkit.verdicts[INSPECT] = YES
    service.engine.stored["theirs"] = manifest("theirs", owner=OWNER)
    for _ in range(3):
        assert service.call("ListImages", uid=STRANGER).split()[1] == "0"
    assert len(polkit.questions) == 1
    polkit.silent.clear()
    wait_until(lambda: '"theirs"' in service.call("ListImages", uid=STRANGER), "it to be asked")


def test_polkit_that_fails_lets_nobody_but_root(
    service: Service, polkit: Authority, target: int
) -> None:
    polkit.verdicts["org.phos.checkpoint"] = ["no", "verdict", 1]
    with pytest.raises(RuntimeError, match="polkit could not decide about"):
        service.call("Checkpoint", "ua{sv}", target, 0, uid=OWNER)
    service.start("Checkpoint", "ua{sv}", target, 0)


def test_without_polkit_owners_and_root_may(service: Service, target: int) -> None:
    with pytest.raises(RuntimeError, match="ask as its owner or as root"):
        service.call("Checkpoint", "ua{sv}", target, 0, uid=STRANGER)
    service.start("Checkpoint", "ua{sv}", target, 0, uid=OWNER)


RULE = """
polkit.addRule(function(action, subject) {
    if (action.id == "org.phos.delete-others" && action.lookup("image") == "shared"
            && subject.user == "nobody")
        return polkit.Result.YES;
    if (action.id == "org.phos.verify" && action.lookup("owner") == "%d")
        return polkit.Result.NO;
});
"""


@pytest.fixture
def real_polkit(bus: str, tmp_path: Path) -> Iterator[None]:
    """The real polkitd with phosd's policy and a rule, as if both were installed."""
    rules, policies = tmp_path / "rules", tmp_path / "policies"
    for folder in (rules, policies):
        folder.mkdir()
    (rules / "10-test.rules").write_text(RULE % OWNER)
    shutil.copy(POLICY, policies)
    for folder in (tmp_path, *tmp_path.parents[:2], rules, policies):
        folder.chmod(folder.stat().st_mode | 0o055)  # polkitd is a user of its own
    mounts = f"mount --bind {policies} /usr/share/polkit-1/actions"
    mounts += f" && mount --bind {rules} /etc/polkit-1/rules.d"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"{mounts} && exec {POLKITD} --no-debug"],
        env={"DBUS_SYSTEM_BUS_ADDRESS": bus, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    ) as polkitd:
        try:
            wait_until(
                lambda: polkitd.poll() is not None or "PolicyKit1" in busctl(bus, "list"),
                "polkitd",
            )
            assert polkitd.returncode is None, "polkitd ended"
            yield
        finally:
            polkitd.terminate()
    wait_until(lambda: "PolicyKit1" not in busctl(bus, "list"), "polkitd to be gone")


@pytest.mark.usefixtures("real_polkit")
def test_the_real_polkit_with_the_policy_and_a_rule(service: Service, target: int) -> None:
    service.start("Checkpoint", "ua{sv}", target, 0, uid=OWNER)
    with pytest.raises(RuntimeError, match="let polkit ask for a password"):
        service.call("Checkpoint", "ua{sv}", target, 0, uid=STRANGER)
    for image in ("shared", "private"):
        service.engine.stored[image] = manifest(image, owner=OWNER)
    with pytest.raises(RuntimeError, match="image private belongs to uid"):
        service.call("DeleteImage", "sa{sv}", "private", 0, uid=STRANGER)
    service.call("DeleteImage", "sa{sv}", "shared", 0, uid=STRANGER)
    assert set(service.engine.stored) == {"private"}
    with pytest.raises(RuntimeError, match=f"uid {OWNER} may not verify image private"):
        service.call("VerifyImage", "sa{sv}", "private", 0, uid=OWNER)
    assert service.call("ListImages", uid=STRANGER).split()[1] == "0"
    assert service.call("ListImages", uid=OWNER).split()[1] == "1"


def test_who_may_save_others_may_not_so_end_or_hold_them(
    service: Service, polkit: Authority, target: int
) -> None:
    """Whoever takes a program off its GPUs needs the right to suspend it, too."""
    polkit.verdicts["org.phos.checkpoint-others"] = YES
    for then in ("end", "hold"):
        with pytest.raises(RuntimeError, match=f"belongs to uid {OWNER}"):
            options = (1, "then", "s", then)
            service.call("Checkpoint", "ua{sv}", target, *options, uid=STRANGER)
    assert service.engine.requests == []
    polkit.verdicts["org.phos.migrate-others"] = YES
    service.start("Checkpoint", "ua{sv}", target, 1, "then", "s", "end", uid=STRANGER)
