"""``phos ps PID`` and ``phos images IMAGE``: all about one of them."""

import dataclasses
import os
from typing import Any

import msgspec

from phosd.engine.hook_client.link import BlockFlag, HookBlock, Kernel
from phosd.engine.image.cpu_manifest import CpuDetails, OpenFile
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.kernels.entry import KernelFacts, unknown
from phosd.engine.node.launched_kernels import KnownKernel
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy
from phosd.service.process_identity import Target, program
from tests.support.fake_engine import block, launched, manifest, this_process
from tests.support.service import Service
from tests.system.cli.test_client import lines, phos

ME = str(os.getpid())


def show(service: Service) -> None:
    """This very process uses a GPU."""
    found = procfs.process_id(os.getpid())
    assert found is not None
    service.engine.running = [this_process(start_time=found[1])]
    service.engine.live_blocks = [
        (HookBlock(1, 0x7F00_0000_0000, 2 << 20, 0, BlockFlag.EXPORTED), 0),
        (HookBlock(2, 0x1000, 4096, -1, BlockFlag.HOST_LOCATED), -1),
    ]
    service.engine.launched = [
        Kernel("chase", 7, 3, suspect=True),
        Kernel("[bold]axpy", 8, 900, suspect=False),
    ]


def test_one_process_with_its_memory_and_kernels(service: Service) -> None:
    show(service)
    (row,) = lines(phos(service, "ps", ME, "--json").stdout)
    assert (row["pid"], row["hook"]) == (os.getpid(), "hooked")
    assert row["blocks"] == [
        {"id": 1, "address": 0x7F00_0000_0000, "size": 2 << 20, "gpu": 0, "flags": ["exported"]},
        {"id": 2, "address": 0x1000, "size": 4096, "gpu": -1, "flags": ["host"]},
    ]
    assert row["kernels"] == [
        {"name": "chase", "module": f"{7:016x}", "launches": 3, "suspect": True},
        {"name": "[bold]axpy", "module": f"{8:016x}", "launches": 900, "suspect": False},
    ]
    text = phos(service, "ps", ME).stdout
    assert f"process       {ME} of root: python train.py" in text
    assert "0x7f0000000000" in text
    assert "[bold]axpy" in text, "a program must not choose how it looks"


def test_where_the_output_is(service: Service) -> None:
    """That of a process, of an image, and of an image that runs again is shown."""
    show(service)
    (here,) = service.engine.running
    service.engine.running = [
        dataclasses.replace(here, output=("/runs/1/stdout", "/runs/1/stderr"))
    ]
    assert "output        /runs/1/stdout, /runs/1/stderr" in phos(service, "ps", ME).stdout
    files = tuple(
        OpenFile(pid, number, f"/runs/2/{number}", 1, 1, 1)
        for pid, number in ((1, 3), (1, 1), (2, 2))
    )
    image = manifest("i")
    details = CpuDetails(0, 0, (0,), "", "", False, 0, open_files=files)
    tree = msgspec.structs.replace(image.trees[0], details=details)
    service.engine.stored["i"] = msgspec.structs.replace(image, trees=(tree,))
    assert "output        /runs/2/1\n" in phos(service, "images", "i").stdout
    assert "its output goes on in /runs/2/1\n" in phos(service, "restore", "i").stderr
    other = phos(service, "restore", "i", "--output", "/tmp/o").stderr
    assert "its output goes on in /tmp/o\n" in other


FACTS = KernelFacts(24, {"0": "written", "8": "read"}, (), (), True, True, "always")
KNOWN = [
    KnownKernel(launched("[bold]axpy", 8, 900, 800, 90, summary=3), "analysed", "", FACTS),
    KnownKernel(launched("chase", 7, 100, suspect=True), "analysed", "", unknown("loaded")),
    KnownKernel(launched("late", 7, 0), "no-code", "it is gone"),
]


def test_what_is_known_of_kernels(service: Service) -> None:
    show(service)
    service.engine.known = KNOWN
    for words in (("ps", ME, "--kernels"), ("analyse", ME, "--seconds", "0")):
        rows = lines(phos(service, *words, "--json").stdout)
        assert [row["kernel"] for row in rows] == ["[bold]axpy", "chase", "late"]
        assert rows[0]["roles"] == {"0": "written", "8": "read"} and rows[0]["launches"] == 900
        assert rows[1]["unknown_writes"] == ["loaded"]
        assert (rows[2]["state"], rows[2]["roles"]) == ("no-code", None)
        text = phos(service, *words).stdout
        assert "[bold]axpy" in text and "no-code: it is gone" in text
        assert "roles         1 (33%), 90% of the launches" in text
        assert "800 yes, 90 no, 10 ?" in text and "instances     800 yes, 90 no, 110 ?" in text
        assert "unknown       loaded (100), no-code: it is gone (0)" in text
    assert service.engine.hurried[-1][1] == 0
    phos(service, "analyse", ME, "--seconds", "1")
    assert [seconds for _, seconds in service.engine.hurried[-2:]] == [1, 0]
    one = lines(phos(service, "analyse", ME, "--seconds", "0", "--kernel", "late", "--json").stdout)
    assert [row["kernel"] for row in one] == ["late"]


def test_there_are_no_kernels_yet(service: Service) -> None:
    show(service)
    for words in (("ps", ME, "--kernels"), ("analyse", ME, "--seconds", "0")):
        assert f"`phos analyse {ME}` counts for a while" in phos(service, *words).stderr
    assert phos(service, "ps", "--kernels").returncode == 2
    assert "name its PID" in phos(service, "ps", "--kernels").stderr
    assert "two lists" in phos(service, "ps", ME, "--log", "--kernels").stderr
    neither = phos(service, "analyse", "none.cubin")
    assert (neither.returncode, "neither a file nor" in neither.stderr) == (2, True)


def suspects(service: Service) -> list[str]:
    """The names that ``phos ps`` has of them, in order."""
    (row,) = lines(phos(service, "ps", ME, "--json").stdout)
    kernels: Any = row["kernels"]
    return sorted(kernel["name"] for kernel in kernels if kernel["suspect"])


def test_suspects_are_trusted_again(service: Service) -> None:
    show(service)
    mine = program(Target(ProcessId(os.getpid(), 0), 0))
    marks = [KernelMark("[bold]axpy", 8), KernelMark("other", 1)]
    service.history.suspects.found(mine, marks)
    service.history.flush()
    assert suspects(service) == ["[bold]axpy", "chase", "other"]
    unknown = phos(service, "trust", ME, "none")
    assert unknown.returncode != 0
    assert "phos: 'none' is no suspect of" in unknown.stderr
    assert phos(service, "trust", ME, "[bold]axpy").stdout == "suspect kernels cleared: 1\n"
    (row,) = lines(phos(service, "trust", ME, "--json").stdout)
    assert row == {"pid": os.getpid(), "kernel": None, "trusted": 1}
    assert suspects(service) == ["chase"], "what its hook was told stays until the next checkpoint"


def test_a_process_that_is_not_asked_now(service: Service) -> None:
    show(service)
    service.engine.silent = Busy("a job works on it", hint="ask again")
    (row,) = lines(phos(service, "ps", ME, "--json").stdout)
    assert (row["pid"], row["blocks"], row["kernels"]) == (os.getpid(), [], [])
    text = phos(service, "ps", ME).stdout
    assert "blocks        a job works on it; ask again" in text
    assert text.count("ask again") == 1, "it is asked once, and the reason is told once"
    done = phos(service, "ps", ME, "--log")
    assert (done.returncode, done.stderr) == (5, "phos: a job works on it; ask again\n")


def test_the_log_of_a_hook(service: Service) -> None:
    show(service)
    assert phos(service, "ps", ME, "--log").stdout == "state 0\n1.5 a note\n"
    (row,) = lines(phos(service, "ps", ME, "--log", "--json").stdout)
    assert row == {"pid": os.getpid(), "log": "state 0\n1.5 a note\n"}
    assert phos(service, "ps", "--log").returncode == 2
    gone = phos(service, "ps", str(2**22))
    assert gone.returncode == 4
    assert "there is no process" in gone.stderr


def test_one_image_with_its_content(service: Service) -> None:
    service.engine.stored["old"] = manifest("old", blocks=(block(1),))
    service.engine.stored["a-b"] = manifest("a-b", pid=77, why="it fits", blocks=(block(1, 2),))
    service.call("ListImages")
    (row,) = lines(phos(service, "images", "a-b", "--json").stdout)
    mib = 1 << 20
    assert (row["id"], row["mode"], row["stored_bytes"]) == ("a-b", "stop", 4 * mib)
    assert row["blocks"] == [
        {
            "pid": 77,
            "id": 1,
            "address": 0,
            "size": 4 * mib,
            "gpu": 0,
            "chunks": 2,
            "stored_bytes": 4 * mib,
            "shared_bytes": 2 * mib,
        }
    ]
    text = phos(service, "images", "a-b").stdout
    assert "program       77 of root: train --secret" in text
    assert "mode          stop: it fits" in text
    assert "4.0 MiB, 2.0 MiB of it shared" in text
    assert text.splitlines()[-1].split() == [
        "77",
        "1",
        "0x0",
        "4.0",
        "MiB",
        "0",
        "4.0",
        "MiB",
        "2.0",
        "MiB",
    ]
    gone = phos(service, "images", "c")
    assert gone.returncode == 4
    assert "there is no image c; `phos images` lists them" in gone.stderr
