"""What is named on the command line: beginnings of ids, ``latest``, and what TAB offers."""

import dataclasses
import os
import subprocess
import sys

import msgspec
import pytest

from phosd.client.users import user_name
from phosd.engine.program.name import name_of
from phosd.engine.system.procfs import process_id
from tests.support.fake_engine import GPU, manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.cli.test_client import PHOS, lines, phos
from tests.system.cli.test_lists import as_nobody

FIRST, SECOND, THIRD = "20261120T153012-3fa9", "20261120T153012-3fb0", "20261121T080000-0001"


@pytest.fixture
def stored(service: Service) -> Service:
    service.engine.stored |= {image: manifest(image) for image in (FIRST, SECOND, THIRD)}
    return service


@pytest.mark.parametrize(
    ("text", "image"), [("latest", THIRD), ("20261121", THIRD), (SECOND[:-1], SECOND)]
)
def test_an_image_is_found_by_its_beginning(stored: Service, text: str, image: str) -> None:
    (row,) = lines(phos(stored, "images", text, "--json").stdout)
    assert row["id"] == image
    assert phos(stored, "verify", text).stdout.startswith(f"{image} is whole (")
    assert phos(stored, "restore", text).returncode == 0
    (job,) = [job for job in lines(phos(stored, "jobs", "--json").stdout) if job["job"] == 2]
    assert (job["operation"], job["target"]) == ("restore", image)


def test_a_beginning_of_several_is_refused(stored: Service) -> None:
    done = phos(stored, "restore", "2026")
    assert done.returncode == 2
    assert f"'2026' is the beginning of 3 images: {FIRST}, {SECOND}, {THIRD}; " in done.stderr
    assert not stored.engine.requests


def test_a_whole_id_is_never_a_beginning(stored: Service) -> None:
    stored.engine.stored["2026112"] = manifest("2026112")
    assert phos(stored, "rm", "2026112").stdout == "2026112 is deleted\n"
    assert phos(stored, "rm", FIRST[:-4]).returncode == 2
    assert phos(stored, "rm", SECOND[:-1]).stdout == f"{SECOND} is deleted\n"
    assert set(stored.engine.stored) == {FIRST, THIRD}


def test_latest_is_what_one_may_see_and_is_never_deleted(stored: Service) -> None:
    refused = phos(stored, "rm", "latest")
    assert (refused.returncode, len(stored.engine.stored)) == (2, 3)
    none = as_nobody(stored, "images", "latest")
    assert (none.returncode, "there is no image yet" in none.stderr) == (4, True)
    theirs = as_nobody(stored, "restore", "20261121")
    assert (theirs.returncode, "there is no image 20261121" in theirs.stderr) == (4, True)


def test_images_of_other_users_are_named_with_them(service: Service) -> None:
    """Without, your own come first, also for root; and it is told whose another one is."""
    nobody, name = 65534, user_name(65534)
    of_nobody = manifest(FIRST, owner=nobody)
    service.engine.stored[FIRST] = msgspec.structs.replace(of_nobody, name="bert", number=7)
    for text in ("bert", "bert@7", "latest", f"{name}/bert", f"{nobody}/bert@7", f"{name}/latest"):
        done = phos(service, "verify", text)
        assert done.stdout.startswith(f"{FIRST} is whole"), (text, done.stderr)
        assert f"phos: {text.rpartition('/')[2]} is {FIRST}, of {name}" in done.stderr
    other = msgspec.structs.replace(manifest(SECOND, owner=7), name="bert", number=1)
    service.engine.stored[SECOND] = other
    for text in ("bert", "latest"):
        done = phos(service, "restore", text)
        assert (done.returncode, "2 users have images" in done.stderr) == (2, True), done.stderr
    own = msgspec.structs.replace(manifest(THIRD), name="bert", number=3)
    service.engine.stored[THIRD] = own
    for text in ("bert", "latest", "bert@3"):
        done = phos(service, "verify", text)
        assert (done.stdout.startswith(f"{THIRD} is whole"), done.stderr) == (True, "")
    assert phos(service, "verify", f"{name}/bert").stdout.startswith(f"{FIRST} is whole")
    refused = phos(service, "rm", f"{name}/latest")
    assert (refused.returncode, len(service.engine.stored)) == (2, 3)
    unknown = phos(service, "restore", "nosuchuser/bert")
    assert "there is no user nosuchuser on this machine" in unknown.stderr


def test_among_five_thousand_images(service: Service) -> None:
    """Each question takes seconds at most, here for all of them together."""
    like = manifest(FIRST)
    ids = [f"202611{1 + n // 1000:02}T153012-{n:04x}" for n in range(5000)]
    service.engine.stored |= {
        image: msgspec.structs.replace(like, id=image, name=f"job-{n % 50}", number=1 + n // 50)
        for n, image in enumerate(ids)
    }
    (row,) = lines(phos(service, "images", "job-7", "--json").stdout)
    assert (row["id"], row["number"]) == (ids[-43], 100)
    assert len(offered(service.address, "images", "20261105")) == 1000
    assert len(phos(service, "images").stdout.splitlines()) == 1 + 5000


def test_several_images_are_verified(stored: Service) -> None:
    done = phos(stored, "verify", FIRST, "none", "latest")
    assert done.returncode == 4
    assert [line.split()[0] for line in done.stdout.splitlines()] == [FIRST, THIRD]


def test_a_note_is_written_shown_and_taken_away(stored: Service) -> None:
    text = "before the learning rate went up, and then some more"
    assert phos(stored, "note", "latest", text).stdout == f"{THIRD} has a note now\n"
    assert phos(stored, "note", THIRD[:-1]).stdout == f"{text}\n"
    assert f"note          {text}\n" in phos(stored, "images", THIRD).stdout
    assert f"{text[:29]}…" in phos(stored, "images").stdout
    assert [row["note"] for row in lines(phos(stored, "images", "--json").stdout)] == [
        None,
        None,
        text,
    ]
    assert lines(phos(stored, "note", "latest", "", "--json").stdout) == [
        {"image": THIRD, "note": None}
    ]
    none = phos(stored, "note", THIRD)
    assert (none.returncode, none.stdout) == (0, "")
    assert f"image {THIRD} has no note" in none.stderr
    assert phos(stored, "note", "latest", "two\nlines").returncode == 2
    missing = phos(stored, "note", "20990101T000000-0000", "x")
    assert (missing.returncode, "there is no image" in missing.stderr) == (4, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ps", "0abc"), "'0abc' is neither a process id, 1 to 4194304, nor a program's name; "),
        (("prune", "--older", "30s"), "'30s' is less than a minute; "),
        (("jobs", "0"), "'0' is no number of a job; `phos jobs` lists them"),
    ],
)
def test_what_is_no_name(bus: str, words: tuple[str, ...], said: str) -> None:
    done = subprocess.run([*PHOS, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_program_is_named_where_a_pid_is_asked_for(stored: Service) -> None:
    named = os.environ | {"PHOS_NAME": "bert"}
    with subprocess.Popen(["sleep", "1000"], env=named) as program:
        try:
            found = process_id(program.pid)
            assert found is not None
            stored.engine.running = [
                this_process(pid=program.pid, start_time=found.start_time, name="bert")
            ]
            (row,) = lines(phos(stored, "ps", "bert", "--json").stdout)
            assert row["pid"] == program.pid
            assert offered(stored.address, "checkpoint", "be") == ["plain,bert"]
        finally:
            program.kill()
    none = phos(stored, "checkpoint", "bert", "--json")
    assert (none.returncode, lines(none.stdout)[0]["error"]) == (4, "NoSuchProcess")


def test_root_is_told_of_other_users_programs(service: Service) -> None:
    theirs = user_name(65534)
    environment = os.environ | {"PHOS_NAME": "roberta"}
    with subprocess.Popen(["sleep", "1000"], env=environment, user=65534) as program:
        try:
            wait_until(lambda: name_of(program.pid) == "roberta", "it to have its name")
            for words in (["checkpoint", "roberta"], ["ps", "roberta"], ["wait", "roberta"]):
                done = phos(service, *words)
                assert done.returncode == 4
                assert f"named roberta runs; {theirs}/roberta would be" in done.stderr
            elsewhere = phos(service, "ps", "nobodys/roberta")
            assert "there is no user nobodys" in elsewhere.stderr
            unknown = as_nobody(service, "ps", "bert")
            assert "named bert runs; `phos ps` lists programs" in unknown.stderr
        finally:
            program.kill()


def offered(address: str, *words: str, shell: str = "bash") -> list[str]:
    """What TAB behind these words offers, as the shell's completion script reads it."""
    done = subprocess.run(
        [sys.executable, "-c", "from phosd.cli.main import main; main(prog_name='phos')"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ
        | {
            "PHOS_BUS": address,
            "_PHOS_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": " ".join(["phos", *words]),
            "COMP_CWORD": str(len(words)),
        },
        check=True,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_tab_offers_what_there_is(stored: Service) -> None:
    found = process_id(os.getpid())
    assert found is not None
    me = str(os.getpid())
    stored.engine.running = [
        this_process(start_time=found.start_time, command=("train", "evil\n9\tx")),
        this_process(pid=1, state="suspended"),
    ]
    stored.engine.devices = [GPU, dataclasses.replace(GPU, ordinal=1, uuid="GPU-5678-cd")]
    wait_until(lambda: "cd" in stored.call("ListGPUs"), "the second GPU")
    phos(stored, "verify", FIRST)
    bus = stored.address
    for command in ("checkpoint", "ps", "trust", "history --pid"):
        assert offered(bus, *command.split(), "") == ["plain,1", f"plain,{me}"]
    assert offered(bus, "resume", "") == ["plain,1"]
    assert offered(bus, "swap", me, "") == ["plain,1"]
    for command in ("restore", "images", "verify", f"verify {FIRST}", "rm", "checkpoint --parent"):
        every = [f"plain,{image}" for image in (FIRST, SECOND, THIRD)]
        assert offered(bus, *command.split(), "2026") == every
    assert offered(bus, "restore", THIRD[:9]) == [f"plain,{THIRD}"]
    for command in ("migrate 1 --to", "resume 1 --gpu", "evacuate"):
        assert offered(bus, *command.split(), "") == ["plain,0", "plain,1"]
    assert offered(bus, "jobs", "--cancel", "") == ["plain,1"]
    told = offered(bus, "checkpoint", me, shell="zsh")
    assert told[:3] == ["plain", me, r"hooked, running: train evil\n9\tx"], "on one line"
    assert len(told) == 3


def test_tab_offers_nothing_and_says_nothing_without_phosd(bus: str) -> None:
    assert offered(bus, "restore", "") == []
    assert offered("unix:path=/none", "restore", "") == []
