"""Runs small programs on the software GPU, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from phosd.engine.system import native

PRELUDE = '''
import ctypes, os, sys, threading, time
import numpy as np
from cuda.bindings import driver as d

def ck(result):
    """The values of a call that must succeed."""
    assert result[0] == d.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]

def code(result):
    return d.CUresult(result[0]).name.removeprefix("CUDA_")

def use(ordinal=0):
    ck(d.cuInit(0))
    context = ck(d.cuDevicePrimaryCtxRetain(ordinal))
    ck(d.cuCtxSetCurrent(context))
    return context

FD = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
def properties(ordinal=0):
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = ordinal
    p.requestedHandleTypes = FD
    return p

def access(ordinal=0, flags="READWRITE"):
    a = d.CUmemAccessDesc()
    a.location = properties(ordinal).location
    a.flags = getattr(d.CUmemAccess_flags, "CU_MEM_ACCESS_FLAGS_PROT_" + flags)
    return a

def map_memory(handle, size, ordinal=0):
    va = ck(d.cuMemAddressReserve(size, 0, 0, 0))
    ck(d.cuMemMap(va, size, 0, handle, 0))
    ck(d.cuMemSetAccess(va, size, [access(ordinal)], 1))
    return va

def fetch(address, count):
    out = np.zeros(count, np.uint32)
    ck(d.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
    return out
'''


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """The environment of a program that sees only software GPUs of this test."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PHOS_SOFTGPU", "CUDA_"))}
    env["LD_LIBRARY_PATH"] = str(native.softgpu_folder())
    env["PHOS_SOFTGPU_DIR"] = str(folder / "gpu")
    return env | settings


def start(
    code: str, folder: Path, pass_fds: tuple[int, ...] = (), **settings: str
) -> subprocess.Popen[str]:
    """Starts a program; it talks through its standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PRELUDE + code],
        env=environment(folder, **settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def run(code: str, folder: Path, **settings: str) -> str:
    """What a program printed; it must have ended well."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=environment(folder, **settings),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def line(process: subprocess.Popen[str]) -> str:
    """The next line that the program prints."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, f"the program ended with {process.wait(10)}"
    return text.strip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
