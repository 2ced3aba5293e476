"""The hook's list of functions against ``cuda.h``: nothing that matters may be missing from it."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HANDLE = "CUmemGenericAllocationHandle"


@cache
def header() -> str:
    """``cuda.h`` with every version of every function declared."""
    finder = [sys.executable, str(ROOT / "packaging/find_cuda_header.py")]
    folder = subprocess.run(finder, text=True, capture_output=True, check=True).stdout.strip()
    command = ["g++", "-E", "-P", "-x", "c++", "-D__CUDA_API_VERSION_INTERNAL", "-"]
    command += ["-I", folder]
    done = subprocess.run(
        command, input="#include <cuda.h>\n", text=True, capture_output=True, check=True
    )
    return re.sub(r"\s+", " ", done.stdout)


@cache
def functions() -> dict[str, str]:
    """Every function of ``cuda.h``, with its parameters as text."""
    return dict(re.findall(r"\bCUresult (cu[A-Z]\w*)\s?\(([^;]*)\);", header()))


@cache
def listed() -> dict[str, str]:
    """Every name of ``hooks.def`` with how it is treated."""
    text = (ROOT / "phosd/hook/hooks.def").read_text()
    rows = re.findall(r"^PHOS_(WRITES|GATED|OWN|ENTRY|ASKS|USED|LEFT)\((\w+)[,)]", text, re.M)
    names = [name for _, name in rows]
    assert sorted(names) == sorted(set(names)), "a name stands twice in hooks.def"
    return {name: kind for kind, name in rows}


def hooked() -> set[str]:
    return {name for name, kind in listed().items() if kind in ("WRITES", "GATED", "OWN", "ENTRY")}


def base(name: str) -> str:
    return re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", name)


def test_the_header_is_read_whole() -> None:
    assert len(functions()) > 600
    assert {"cuLaunchKernel", "cuLaunchKernel_ptsz", "cuMemAlloc_v2"} <= set(functions())


def test_every_entry_exists_in_the_header() -> None:
    assert not set(listed()) - set(functions())


def test_every_function_is_listed() -> None:
    """How it is treated decides what a thread may be in while the driver checkpoints."""
    assert not set(functions()) - set(listed())


def test_what_is_never_held_is_known_to_stay_off_the_device() -> None:
    never = {name for name, kind in listed().items() if kind in ("ENTRY", "USED", "LEFT")}
    known = (
        r"cu(Init|GetProcAddress|GetExportTable|GetError(Name|String)|DriverGetVersion"
        r"|CtxGetCurrent|ThreadExchangeStreamCaptureMode|CheckpointProcess\w+|Coredump\w+|Logs\w+)"
        r"(_v2)?"
    )
    assert {name for name in never if not re.fullmatch(known, name)} == set()
    assert {"cuStreamQuery", "cuStreamQuery_ptsz", "cuEventQuery"} <= set(functions()) - never


@pytest.mark.parametrize("suffix", ["_ptsz", "_ptds"])
def test_both_stream_variants_are_treated_alike(suffix: str) -> None:
    kinds = listed()
    for name in functions():
        if name.endswith(suffix) and kinds.get(name.removesuffix(suffix)) is not None:
            assert kinds.get(name) == kinds[name.removesuffix(suffix)], name


def structs_with_handles() -> set[str]:
    """Types that hold a memory handle, also within a nested union."""
    found = set()
    for start in re.finditer(r"typedef struct \w+ \{", header()):
        depth, end = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(header()[end], 0)
            end += 1
        name = re.match(r" ?(\w+);", header()[end:])
        if name and HANDLE in header()[start.end() : end]:
            found.add(name[1])
    return found | {
        new for old, new in re.findall(r"typedef (\w+) (\w+);", header()) if old in found
    }


def test_everything_that_carries_a_memory_handle_is_hooked() -> None:
    types = {HANDLE} | structs_with_handles()
    assert "CUarrayMapInfo" in types
    carriers = {
        name
        for name, parameters in functions().items()
        if types & set(re.findall(r"\w+", parameters))
    }
    assert {"cuMemMap", "cuMulticastBindMem", "cuMemMapArrayAsync_ptsz"} <= carriers
    assert not carriers - hooked()


def test_synchronous_copies_and_sets_are_gated() -> None:
    kinds = listed()
    for name in functions():
        if re.match(r"cuMem(cpy|set)", name):
            assert kinds.get(name) in ("WRITES", "GATED"), name


def test_what_is_left_alone_or_writes_nothing_has_a_reason() -> None:
    text = (ROOT / "phosd/hook/hooks.def").read_text()
    for name, kind in listed().items():
        if kind in ("LEFT", "GATED", "ASKS"):
            assert re.search(rf'PHOS_{kind}\({name}, "[^"]{{4,}}"\)', text), name


def test_what_may_write_device_memory_is_predicted() -> None:
    """A call of a kind that writes is looked at, unless it cannot reach the hook's memory."""
    kinds = listed()
    text = (ROOT / "phosd/hook/hooks.def").read_text()
    unreachable = "32-bit addresses|writes an array"
    writers = (
        "cuMemcpy|cuMemset|cuLaunch(?!HostFunc)|cuGraphLaunch|cuStreamWriteValue|MemOp_?|Batch"
    )
    found = {
        name
        for name, kind in kinds.items()
        if kind in ("WRITES", "GATED") and re.search(writers, name) and "Prefetch" not in name
    }
    assert len(found) > 120
    for name in found:
        reached = not re.search(rf'PHOS_GATED\({name}, "({unreachable})', text)
        assert kinds[name] == ("WRITES" if reached else "GATED"), name


def test_only_old_forms_and_arrays_are_out_of_reach() -> None:
    text = (ROOT / "phosd/hook/hooks.def").read_text()
    old = re.findall(r'PHOS_GATED\((\w+), "32-bit addresses', text)
    assert old and all(f"{name}_v2" in functions() for name in old)
    assert all("CUdeviceptr_v1" in functions()[n] or "_v1" in functions()[n] for n in old)
    arrays = re.findall(r'PHOS_GATED\((\w+), "writes an array', text)
    assert arrays and all(functions()[name].startswith("CUarray") for name in arrays)


def test_what_changes_an_executable_graph_is_followed() -> None:
    """What a graph writes is known from when it is made, so every change of it must be seen."""
    kinds = listed()
    changing = {
        name
        for name, parameters in functions().items()
        if "CUgraphExec" in re.findall(r"\w+", parameters)
        and not re.search("Get|Launch|Upload|SetEnabled|Host|Event|Semaphores", name)
    }
    assert {"cuGraphExecUpdate_v2", "cuGraphExecKernelNodeSetParams_v2"} <= changing
    assert {"cuGraphInstantiateWithParams_ptsz", "cuGraphExecDestroy"} <= changing
    assert {name: kinds.get(name) for name in changing} == dict.fromkeys(changing, "OWN")


def test_every_way_to_make_and_end_a_function_is_followed() -> None:
    loading = {n for n in functions() if re.match(r"cu(Module|Library)(Load|Unload)", n)}
    assert {"cuModuleLoadDataEx", "cuLibraryLoadFromFile", "cuModuleUnload"} <= loading
    tensor_maps = {n for n in functions() if n.startswith("cuTensorMap")}
    assert len(tensor_maps) >= 4
    for name in loading | tensor_maps:
        assert listed().get(name) == "OWN", name
