"""The lists: GPUs by number, users by name, and what to do where there is nothing to list."""

import dataclasses
import os
import pwd
import subprocess

import msgspec
import pytest

from phosd.engine.system.containers import Container
from phosd.engine.system.procfs import process_id
from phosd.service.api.views import gpu_path
from tests.support.fake_engine import GPU, manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.cli.test_client import AS_NOBODY, PHOS, lines, phos

NOBODY = pwd.getpwnam("nobody").pw_uid
OTHER = dataclasses.replace(
    GPU, ordinal=1, uuid="GPU-5678-cd", memory_used=3 << 29, utilisation=None, pids=(1, 999)
)
MOVER = 998


def as_nobody(service: Service, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AS_NOBODY, *PHOS, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PHOS_BUS": service.address},
    )


@pytest.fixture
def two(service: Service) -> Service:
    """This process is root's, on both of two GPUs; nobody has pid 1, on the second."""
    found = process_id(os.getpid())
    assert found is not None
    service.engine.devices = [GPU, OTHER]
    wait_until(lambda: "cd" in service.call("ListGPUs"), "the second GPU")
    service.engine.running = [
        this_process(start_time=found.start_time, gpus=(0, 1)),
        this_process(pid=1, uid=NOBODY, gpus=(1,), command=("theirs",)),
    ]
    return service


def test_processes_have_the_numbers_of_their_gpus_and_the_names_of_users(two: Service) -> None:
    theirs, mine = lines(phos(two, "ps", "--json").stdout)
    assert theirs["gpus"] == [{"ordinal": 1, "uuid": OTHER.uuid}]
    assert mine["gpus"] == [{"ordinal": n, "uuid": g.uuid} for n, g in enumerate([GPU, OTHER])]
    assert (theirs["user"], theirs["user_name"]) == (NOBODY, "nobody")
    heads, first, second = phos(two, "ps").stdout.splitlines()
    assert heads.split()[:3] == ["PID", "USER", "GPU"]
    assert first.split()[:3] == ["1", "nobody", "1"]
    assert second.split()[:4] == [str(os.getpid()), "root", "0,", "1"]
    one = phos(two, "ps", str(os.getpid())).stdout
    assert f"process       {os.getpid()} of root: python train.py" in one
    assert "gpu           0, 1\n" in one


def test_gpus_with_who_uses_them(two: Service) -> None:
    first, second = lines(phos(two, "gpus", "--json").stdout)
    assert (first["ordinal"], first["uuid"]) == (0, GPU.uuid)
    assert (first["utilisation"], first["power"]) == (0.5, 100.0)
    assert (second["memory_used"], second["utilisation"]) == (3 << 29, None)
    assert (first["processes"], first["other_processes"]) == ([os.getpid()], [])
    assert (second["processes"], second["other_processes"]) == ([1, os.getpid()], [999])
    two.engine.running = [this_process(pid=1, hook_state="driver", gpus=())]
    (without_hook,) = lines(phos(two, "ps", "--json").stdout)
    assert [gpu["ordinal"] for gpu in without_hook["gpus"]] == [1], "as the GPU says"  # type: ignore[attr-defined]
    two.engine.running = [this_process(pid=1), this_process(gpus=(0, 1))]
    table = phos(two, "gpus").stdout
    assert "1.5 GiB of 1.0 GiB" in table and GPU.uuid in table and "50%" in table
    assert table.splitlines()[2].endswith(f"1, {os.getpid()} +1")
    two.engine.devices = [GPU, dataclasses.replace(OTHER, pids=(1, MOVER, 999), movers=(MOVER,))]
    wait_until(lambda: str(MOVER) in phos(two, "gpus", "--json").stdout, "phosd's own process")
    row = lines(phos(two, "gpus", "--json").stdout)[1]
    assert (row["movers"], row["other_processes"]) == ([MOVER], [999])
    assert phos(two, "gpus").stdout.splitlines()[2].endswith(f"1, {os.getpid()}, phosd +1")


def test_the_gpu_says_where_a_process_without_a_hook_is(two: Service) -> None:
    two.engine.running = [this_process(pid=1, hook_state="driver", gpus=())]
    two.call("ListProcesses")
    path = two.start("GetProcess", "u", 1)
    assert two.get(path, "Process1", "GPUs") == f'1 "{gpu_path(OTHER.uuid)}"'
    two.engine.devices = [dataclasses.replace(GPU, pids=(1,)), OTHER]
    both = f'2 "{gpu_path(GPU.uuid)}" "{gpu_path(OTHER.uuid)}"'
    wait_until(lambda: two.get(path, "Process1", "GPUs") == both, "it to be on both")


def test_of_a_gpu_users_see_their_own_processes(two: Service) -> None:
    first, second = lines(as_nobody(two, "gpus", "--json").stdout)
    assert (first["processes"], second["processes"]) == ([], [1])
    assert (second["other_processes"]) == [999]


def test_without_a_gpu_that_is_why_nothing_is_listed(service: Service) -> None:
    service.engine.devices = []
    wait_until(lambda: service.call("ListGPUs").endswith(" 0"), "no GPU")
    for command in ("ps", "status", "gpus"):
        assert "phosd sees no GPU; `phos doctor` says" in phos(service, command).stderr, command


def test_images_name_their_owner(service: Service) -> None:
    service.engine.stored["i"] = manifest("i", owner=NOBODY)
    (row,) = lines(phos(service, "images", "--json").stdout)
    assert (row["owner"], row["owner_name"]) == (NOBODY, "nobody")
    assert "nobody" in phos(service, "images").stdout
    assert "program       1 of nobody: train --secret" in phos(service, "images", "i").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ps"], "no process uses a GPU; start a program with `phos run -- COMMAND`"),
        (["images"], "there are no images; `phos checkpoint PID` makes one"),
        (["jobs"], "no job runs or ended lately; `phos history` lists those of before"),
        (["history"], "there was no job yet; `phos checkpoint PID` would be one"),
        (["history", "--state", "failed"], "there is no such job in the history"),
        (["events", "--severity", "error"], "nothing happened"),
    ],
)
def test_an_empty_list_says_what_to_do(service: Service, words: list[str], said: str) -> None:
    """To people: programs get nothing, and both get success."""
    done = phos(service, *words)
    assert (done.returncode, done.stdout) == (0, "")
    assert said in done.stderr
    assert phos(service, *words, "--json").stderr == ""
    if words[0] in ("ps", "images", "jobs"):
        assert " of yours" in as_nobody(service, *words).stderr


def test_what_a_program_is_in_is_in_the_lists(two: Service) -> None:
    """Its pod or job, and its name; no column says nothing."""
    mine, _ = two.engine.running
    two.engine.go.set()
    plain = phos(two, "checkpoint", str(os.getpid()))
    assert plain.returncode == 0, plain.stderr
    for words in (["jobs"], ["history"], ["images"]):
        assert "POD OR JOB" not in phos(two, *words).stdout, words
    pod = Container("containerd", "0" * 64, "main", "ml/bert-0")
    two.engine.running = [dataclasses.replace(mine, name="bert", container=pod)]
    phos(two, "ps")
    assert phos(two, "checkpoint", str(os.getpid())).returncode == 0
    image = msgspec.structs.replace(manifest("i"), name="gpt", number=1, within="Slurm job 12")
    two.engine.stored["i"] = image
    for words in (["jobs"], ["history"]):
        first, last = (row for row in lines(phos(two, *words, "--json").stdout))
        rows = {str(row.get("name") or ""): row.get("within") or "" for row in (first, last)}
        assert rows == {"": "", "bert": "pod ml/bert-0"}, words
        heads, *told = phos(two, *words).stdout.splitlines()
        assert "NAME" in heads and "POD OR JOB" in heads
        assert [row for row in told if "bert" in row and "pod ml/bert-0" in row], told
    job = lines(phos(two, "jobs", "--json").stdout)[-1]["job"]
    assert "program       bert in pod ml/bert-0" in phos(two, "jobs", str(job)).stdout
    heads, *told = phos(two, "images").stdout.splitlines()
    assert "POD OR JOB" in heads and any("Slurm job 12" in row for row in told)
    assert "in            Slurm job 12" in phos(two, "images", "i").stdout
