"""nvdisasm and ptxas: what they are allowed to, and what their failures lead to."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from pathlib import Path

import pytest

from phosd.engine.analysis.code import cage, tools
from phosd.engine.analysis.code.disassembly import disassemble
from phosd.engine.analysis.code.tools import Tool
from phosd.errors import Internal, Unsupported
from tests.native.analysis.oracle import analysed, machine_code
from tests.support.harness import running

SOURCE = 'extern "C" __global__ void k(int* a) { a[threadIdx.x] = 1; }'


@pytest.fixture(name="image", scope="module")
def _image() -> bytes:
    return machine_code(SOURCE)[1]


@pytest.fixture(name="script")
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is run instead of the tools, in a folder that only root may enter."""
    path = tmp_path / "tool"
    monkeypatch.setattr(tools, "find", lambda _: path)
    return path


def has_landlock() -> bool:
    """Whether it parts processes from signals, too (Linux 6.12)."""
    return int(ctypes.CDLL(None).syscall(444, None, 0, 1)) >= 6  # landlock_create_ruleset


def write(script: Path, text: str) -> None:
    script.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
    script.chmod(0o755)


def test_a_kernel_from_its_machine_code(image: bytes) -> None:
    assert set(analysed(image)) == {"k"}
    assert disassemble(image).architecture == 90


def test_code_for_another_architecture_is_refused() -> None:
    with pytest.raises(Unsupported, match="the machine code is for sm_120"):
        disassemble(machine_code(SOURCE, "sm_120")[1])


def test_damaged_code_is_refused(image: bytes) -> None:
    with pytest.raises(Unsupported, match="nvdisasm"):
        disassemble(image[:64] + b"\xff" * (len(image) - 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", "nvdisasm failed with 3: it says nothing"),
        ("echo why >&2; exit 1", "nvdisasm failed with 1: why"),
        ("kill -SEGV $$", "nvdisasm crashed"),
        ("kill -XCPU $$", "nvdisasm took too long"),
        ("head -c 5000 /dev/zero", "nvdisasm (wrote too much|failed)"),
    ],
)
def test_a_tool_that_fails(
    script: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "OUTPUT_BYTES", 4096)
    write(script, text)
    with pytest.raises(Unsupported, match=message):
        tools.run(Tool.NVDISASM, [], b"anything")


def test_a_tool_that_hangs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "DEADLINE_SECONDS", 1)
    write(script, "exec sleep 1000")
    with pytest.raises(Unsupported, match="nvdisasm took too long"):
        tools.run(Tool.NVDISASM, [], b"anything")


@pytest.mark.parametrize("output", ["[]", "no JSON", '[{"SM": 1}, []]'])
def test_a_tool_of_another_version(script: Path, output: str) -> None:
    write(script, f"echo '{output}'")
    with pytest.raises(Internal, match="nvdisasm is of another version"):
        disassemble(b"anything")


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Internal, match="nvdisasm is not installed; `make setup` in /"):
        disassemble(b"anything")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_what_a_tool_is_allowed_to(script: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    connect = "{ echo > /dev/tcp/127.0.0.1/1; } 2>&1"
    script.write_text(
        f"""#!/bin/bash
while read -r name id _; do [[ $name != Uid: ]] || echo "$id"; done < /proc/self/status
read -r line < {secret} && echo "$line"
{connect}
read -r line < "$1"
echo "$line"
"""
    )
    script.chmod(0o755)
    own, *refused, read = tools.run(Tool.NVDISASM, [], b"input").decode().splitlines()
    assert int(own) in cage.IDS
    assert refused and all("not permitted" in line for line in refused)
    assert read == "input"


def test_a_tool_leaves_no_process_behind(script: Path) -> None:
    write(script, "(sleep 1000) & echo goes on")
    with pytest.raises(Unsupported, match=r"nvdisasm failed with 2: .*[Cc]annot fork"):
        tools.run(Tool.NVDISASM, [], b"anything")


STAYING = """
import ctypes, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)

def tried(*call):
    return -1 if libc.syscall(*call) < 0 else 0

print("signals", tried(62, NEIGHBOUR, 0))
print("outlives", libc.prctl(1, 0))
for name, *call in (("memory", 29, 0, 1 << 20, 0o1600), ("semaphores", 64, 0, 9, 0o1600),
                    ("queue", 68, 0, 0o1600), ("file in memory", 319, b"x", 0)):
    print(name, tried(*call))
for folder in (b"/tmp", b"/dev/shm"):
    print("file", libc.open(folder + b"/phos-test-caged-%d" % os.getpid(), os.O_CREAT, 0o600))
print("folder", libc.mkdir(b"/tmp/phos-test-caged", 0o700))
stop, count = threading.Event(), 0
threading.stack_size(65536)
try:
    while count < 1000:
        threading.Thread(target=stop.wait, daemon=True).start()
        count += 1
except RuntimeError:
    print("threads", count < 500 and -1)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has ids to give")
@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock, or an old one")
def test_a_tool_that_was_taken_over_leaves_nothing_behind(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it use up threads and memory, outlive who has started it, or stop another process
    that has its id, as the one that has started it may.
    """
    one = tools.nobody()
    monkeypatch.setattr(tools, "nobody", lambda: one)
    with running(["sleep", "1000"], user=one, group=one, extra_groups=[]) as neighbour:
        code = STAYING.replace("NEIGHBOUR", str(neighbour.pid))
        script.write_text(f"#!/usr/bin/python3 -IS\n{code}")
        script.chmod(0o755)
        said = tools.run(Tool.NVDISASM, [], b"anything").decode().splitlines()
        neighbour.kill()
    assert len(said) == 10
    assert [line for line in said if not line.endswith(" -1")] == []
