"""Checkpoints and restores: what the driver takes away, brings back, refuses and needs."""

from pathlib import Path

from phosd.engine.mover.client.mover import ROOM
from phosd.engine.operations import admission
from tests.driver.conftest import Starter
from tests.driver.subjects import GOES_ON, MIB, WORKS, Control, Subject, devices, kept

LARGE = 128 * MIB


def test_a_checkpoint_closes_the_devices(start: Starter, control: Control) -> None:
    pid = start(WORKS).pid
    assert devices(pid) != [], "it has none of the driver's devices open"
    control.save(pid)
    assert devices(pid) == []
    control.bring_back(pid)
    assert devices(pid) != [], "the restore has opened none again"


def test_a_restore_takes_what_a_checkpoint_gave(start: Starter, control: Control) -> None:
    watch = start()
    program = start(f"use(); p = ck(d.cuMemAlloc({LARGE}))")
    before = watch.ask("free()")
    control.save(program.pid)
    away = watch.ask("free()")
    control.bring_back(program.pid)
    freed, taken = away - before, away - watch.ask("free()")
    print(f"freed {freed >> 20} MiB, taken {taken >> 20} MiB")
    assert freed >= LARGE, f"the checkpoint freed only {freed} bytes"
    assert taken <= freed + ROOM, f"the restore took {taken} bytes, the checkpoint freed {freed}"


def test_everything_comes_back(start: Starter, control: Control) -> None:
    program = start(
        "use(); s = ck(d.cuStreamCreate(1)); h = make()\n"
        "where = [ck(d.cuMemAlloc(SIZE)), ck(d.cuMemAllocAsync(SIZE, s)), mapped(h)]\n"
        "ck(d.cuStreamSynchronize(s))\n"
        "for number, address in enumerate(where): fill(address, number + 1)\n"
        "p = ck(d.cuMemAlloc(4)); fill(p, 0, 4)\n"
        "event, count = ck(d.cuEventCreate(0)), kernel('count')\n"
        "ck(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))\n"
        "launch(count, s, p); graph = ck(d.cuGraphInstantiate(ck(d.cuStreamEndCapture(s)), 0))\n"
        "launch(count, s, p); ck(d.cuEventRecord(event, s)); ck(d.cuStreamSynchronize(s))"
    )
    control.save(program.pid)
    control.bring_back(program.pid)
    intact = program.ask("[holds(address, number + 1) for number, address in enumerate(where)]")
    assert intact == [True] * 3, "of cuMemAlloc, cuMemAllocAsync and cuMemCreate"
    for call in ("d.cuEventQuery(event)", "d.cuGraphLaunch(graph, s)", "d.cuMemRelease(h)"):
        assert program.do(call) == "SUCCESS", call
    program.ask("launch(count, s, p)")
    for call in ("d.cuEventRecord(event, s)", "d.cuEventSynchronize(event)"):
        assert program.do(call) == "SUCCESS", call
    assert program.ask("holds(p, 3, 4)"), "kernel and graph have not both run"


def test_reservations_stay(start: Starter, control: Control) -> None:
    """The round of a program that is parked: its memory is kept by a descriptor alone."""
    program = start("use(); h = make(); va = mapped(h); fill(va, 7)")
    with kept(program.give("export(h)")) as descriptor:
        program.ask("ck(d.cuMemUnmap(va, SIZE)); ck(d.cuMemRelease(h))")
        control.save(program.pid)
        control.bring_back(program.pid)
        program.ask("h = imported(given); map_at(va, h)", given=descriptor)
    assert program.ask("holds(va, 7)")


def test_managed_memory_is_refused(start: Starter, control: Control) -> None:
    program = start(WORKS + "; managed = ck(d.cuMemAllocManaged(4096, 1))")
    assert control.lock(program.pid) == "SUCCESS"
    assert control.checkpoint(program.pid) == "ERROR_NOT_SUPPORTED"
    assert control.state(program.pid) == "LOCKED"
    assert control.unlock(program.pid) == "SUCCESS"
    assert program.ask(GOES_ON)


def is_lost(program: Subject, control: Control) -> None:
    assert control.state(program.pid) == "CHECKPOINTED"
    assert control.restore(program.pid) == "ERROR_OPERATING_SYSTEM"
    assert control.unlock(program.pid) == "ERROR_ILLEGAL_STATE"
    assert control.state(program.pid) == "CHECKPOINTED"


def test_imports_are_lost(start: Starter, control: Control) -> None:
    maker, program = start("use(); h = make()"), start()
    with kept(maker.give("export(h)")) as descriptor:
        program.ask("va = mapped(imported(given))", given=descriptor)
    control.save(program.pid)
    assert control.restore(program.pid) == "ERROR_NOT_SUPPORTED"
    is_lost(program, control)
    assert control.restore(program.pid) != "SUCCESS"


def test_a_checkpoint_needs_room(start: Starter, control: Control) -> None:
    program, hog = start(WORKS), start()
    left = hog.ask(f"take_all_but({ROOM})")
    assert control.lock(program.pid) == "SUCCESS"
    assert control.checkpoint(program.pid) == "SUCCESS", f"with {left >> 20} MiB free"
    control.bring_back(program.pid)
    left = hog.ask("take_all_but(0)")
    assert control.lock(program.pid) == "SUCCESS"
    assert control.checkpoint(program.pid) == "ERROR_OUT_OF_MEMORY", f"with {left >> 20} MiB free"
    assert control.state(program.pid) == "LOCKED"
    assert control.unlock(program.pid) == "SUCCESS"
    assert program.ask(GOES_ON)
    hog.kill()
    assert control.lock(program.pid) == "SUCCESS"
    assert control.checkpoint(program.pid) == "ERROR_UNKNOWN", "after one without room"
    assert control.unlock(program.pid) == "SUCCESS"
    assert program.ask(GOES_ON)


def test_a_checkpoint_fills_host_memory(start: Starter, control: Control) -> None:
    size = 64 * MIB
    program = start(f"use(); p = ck(d.cuMemAlloc({size})); fill(p, 3, {size})")
    before = private_memory(program.pid)
    control.save(program.pid)
    away = private_memory(program.pid)
    control.bring_back(program.pid)
    back = private_memory(program.pid)
    assert away - before >= size, f"{away - before} bytes more than before the checkpoint"
    assert away - back >= size, f"{away - back} bytes less than before the restore"


def private_memory(pid: int) -> int:
    """Return the bytes of a process that are in no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_a_restore_needs_memory(start: Starter, control: Control) -> None:
    program, hog = start(f"use(); p = ck(d.cuMemAlloc({LARGE}))"), start()
    control.save(program.pid)
    hog.ask(f"take_all_but({64 * MIB})")
    assert control.restore(program.pid) == "ERROR_OUT_OF_MEMORY"
    hog.kill()
    is_lost(program, control)
    hog.kill()
    assert control.restore(program.pid) != "SUCCESS", "it can be asked again"


def test_restored_kernels_are_not_interrupted(
    start: Starter, control: Control, software: bool
) -> None:
    program = start("use(); s, spin = ck(d.cuStreamCreate(1)), kernel('spin')")
    other = start(
        "use(); s, count, p = ck(d.cuStreamCreate(1)), kernel('count'), ck(d.cuMemAlloc(4))\n"
        "launch(count, s, p); ck(d.cuStreamSynchronize(s))"
    )
    spin = "flag = Flag(); launch(spin, s, flag.address, 1)"
    work = "launch(count, s, p) or code(d.cuStreamSynchronize(s))"
    program.ask(spin)
    assert other.ask(work) == "SUCCESS", "beside a kernel that was never restored"
    assert program.do("d.cuStreamQuery(s)") == "ERROR_NOT_READY"
    program.ask("flag.rise()")
    assert program.do("d.cuStreamSynchronize(s)") == "SUCCESS"
    control.save(program.pid)
    control.bring_back(program.pid)
    program.ask(spin)
    other.tell(work)
    interrupted = not other.is_silent(1.5)  # after some seconds the driver ends the program
    program.ask("flag.rise()")
    assert other.answer() == "SUCCESS"
    assert program.do("d.cuStreamSynchronize(s)") == "SUCCESS"
    assert interrupted is software, f"another process's kernel {'ran' if interrupted else 'waited'}"


def test_a_context_is_small(start: Starter) -> None:
    watch = start()
    before = watch.ask("free()")
    start()
    taken = before - watch.ask("free()")
    print(f"a context takes {taken >> 20} MiB")
    assert taken <= admission.context_bytes(), f"a context takes {taken} bytes"


def test_stacks_can_be_given_up(start: Starter, software: bool) -> None:
    program = start(
        "use(); stack = d.CUlimit.CU_LIMIT_STACK_SIZE; limit = ck(d.cuCtxGetLimit(stack))\n"
        "p, count = ck(d.cuMemAlloc(4)), kernel('count'); fill(p, 0, 4)\n"
        "launch(count, 0, p); ck(d.cuCtxSynchronize()); before = free()"
    )
    assert program.do("d.cuCtxSetLimit(stack, 0)") == "SUCCESS"
    gained = program.ask("free() - before")
    assert program.do("d.cuCtxSetLimit(stack, limit)") == "SUCCESS"
    program.ask("launch(count, 0, p)")
    assert program.ask("holds(p, 2, 4)")
    assert software or gained >= 64 * MIB, f"it gave up {gained} bytes"
