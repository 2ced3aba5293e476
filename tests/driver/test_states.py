"""States and locks: what the driver says of a process, and whom it holds."""

import os
import signal

from phosd.engine.program.held import held
from phosd.engine.system import procfs
from tests.driver.conftest import Starter
from tests.driver.subjects import GOES_ON, WORKS, Control, devices, mapped_devices
from tests.support.harness import wait_until

NOBODY = 2**22 + 5
"""No pid: the kernel gives out none that is so large."""


def test_states_in_order(start: Starter, control: Control) -> None:
    pid = start().pid
    wrong = "ERROR_ILLEGAL_STATE"
    steps = (control.lock, control.checkpoint, control.restore, control.unlock)
    lock, checkpoint, restore, unlock = steps
    expected = [
        ("RUNNING", (checkpoint, restore, unlock), lock),
        ("LOCKED", (lock, restore), checkpoint),
        ("CHECKPOINTED", (lock, checkpoint, unlock), restore),
        ("LOCKED", (lock, restore), unlock),
    ]
    for state, refused, step in expected:
        assert control.state(pid) == state
        answers = {each.__name__: each(pid) for each in refused}
        assert answers == {each.__name__: wrong for each in refused}, f"in state {state}"
        assert step(pid) == "SUCCESS", step.__name__
    assert control.state(pid) == "RUNNING"


def test_others_have_no_state(start: Starter, control: Control) -> None:
    assert control.state(start("None").pid) == "ERROR_NOT_INITIALIZED", "of one without CUDA"
    assert control.state(NOBODY) == "ERROR_OPERATING_SYSTEM", "of one that does not exist"


def test_nvml_has_a_state(start: Starter, control: Control) -> None:
    program = start("nvml = nvml_begun()")
    assert control.state(program.pid) == "RUNNING"
    opened = devices(program.pid)
    assert opened and not mapped_devices(program.pid)
    control.save(program.pid)
    assert devices(program.pid) == []
    control.bring_back(program.pid)
    assert sorted(devices(program.pid)) == sorted(opened)
    assert program.ask("gpus_of(nvml)") > 0
    program.ask("use()")
    assert mapped_devices(program.pid), "what is looked for is not what CUDA maps"


def test_loading_uses_no_gpu(start: Starter, control: Control) -> None:
    program = start("ck(d.cuDriverGetVersion())")
    assert devices(program.pid) == []
    assert control.state(program.pid) == "ERROR_NOT_INITIALIZED"
    program.ask("use()")
    assert devices(program.pid) != [], "what is looked for is not what the driver opens"


def test_a_lock_holds_calls(start: Starter, control: Control) -> None:
    program = start()
    assert control.lock(program.pid) == "SUCCESS"
    program.tell("code(d.cuMemAlloc(16))")
    assert program.is_silent(), "cuMemAlloc returned in a locked process"
    assert control.unlock(program.pid) == "SUCCESS"
    assert program.answer() == "SUCCESS"


def test_queries_pass_a_lock(start: Starter, control: Control) -> None:
    program = start(
        "use(); s, e = ck(d.cuStreamCreate(1)), ck(d.cuEventCreate(0))\n"
        "ck(d.cuEventRecord(e, s)); ck(d.cuStreamSynchronize(s))"
    )
    assert control.lock(program.pid) == "SUCCESS"
    for query in ("d.cuStreamQuery(s)", "d.cuEventQuery(e)"):
        program.tell(f"code({query})")
        assert not program.is_silent(10), f"{query} waits in a locked process"
        assert program.answer() == "SUCCESS", query
    assert control.unlock(program.pid) == "SUCCESS"


def test_a_lock_gives_up(start: Starter, control: Control) -> None:
    program = start("use(); s = ck(d.cuStreamCreate(1)); flag = Flag(); flag.hold(s)")
    assert control.lock(program.pid, 100) == "ERROR_NOT_READY"
    assert control.state(program.pid) == "RUNNING"
    program.ask("flag.rise()")
    assert program.do("d.cuStreamSynchronize(s)") == "SUCCESS"
    assert control.lock(program.pid) == "SUCCESS"
    assert control.unlock(program.pid) == "SUCCESS"


def test_one_thread_works_for_the_driver(start: Starter, control: Control) -> None:
    program = start(WORKS)
    pid, thread = program.pid, control.restore_thread(program.pid)
    assert thread in procfs.threads(pid), "the restore thread is none of the process"
    assert control.lock(pid) == "SUCCESS"
    with held({pid: thread}):
        assert control.checkpoint(pid) == "SUCCESS"
    assert control.restore_thread(pid) == thread
    with held({pid: thread}):
        assert control.restore(pid) == "SUCCESS"
    assert control.unlock(pid) == "SUCCESS"
    assert program.ask(GOES_ON)


def test_a_stopped_process_does_not_answer(start: Starter, control: Control) -> None:
    program = start()
    os.kill(program.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _has_stopped(program.pid), "the process to stop")
        control.tell(f"state({program.pid})")
        assert control.is_silent(), "the driver told the state of a stopped process"
    finally:
        os.kill(program.pid, signal.SIGCONT)
    assert control.answer() == "RUNNING"


def _has_stopped(pid: int) -> bool:
    found = map(procfs.stat, procfs.threads(pid))
    return all(thread is not None and thread.stopped for thread in found)
