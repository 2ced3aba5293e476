"""nvdisasm and ptxas: what they are allowed to, and what their failures lead to."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from phosd.engine.analysis import tools
from phosd.engine.analysis.disassembly import disassemble
from phosd.engine.analysis.tools import Tool
from phosd.errors import Internal, Unsupported
from tests.native.analysis.oracle import analysed, machine_code

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
    write(script, "sleep 1000 & wait")
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
    with pytest.raises(Internal, match="nvdisasm is not installed; pip install"):
        disassemble(b"anything")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_what_a_tool_is_allowed_to(script: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    connect = "bash -c 'echo > /dev/tcp/127.0.0.1/1' 2>&1 | grep -om1 'not permitted'"
    write(script, f"id -u; cat {secret}; {connect}; cat $1")
    out = tools.run(Tool.NVDISASM, [], b"input").decode()
    assert int(out.splitlines()[0]) in tools._IDS
    assert out.splitlines()[1:] == ["not permitted", "input"]
