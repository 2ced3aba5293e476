"""Other GPUs: what a restore there is told, and what the process can do there."""

from tests.driver.conftest import Starter
from tests.driver.subjects import MIB, WORKS, Control, kept

COUNT = "ck(d.cuDeviceGetCount())"


def in_place(control: Control) -> list[tuple[int, int]]:
    """Pairs that leave each GPU where it is."""
    return [(gpu, gpu) for gpu in range(control.ask(COUNT))]


def turned(control: Control) -> list[tuple[int, int]]:
    """Pairs that put each GPU in the place of the one before it."""
    count = control.ask(COUNT)
    return [(gpu, (gpu + 1) % count) for gpu in range(count)]


def test_pairs_name_each_gpu(start: Starter, control: Control) -> None:
    program = start(WORKS)
    each = in_place(control)
    control.save(program.pid)
    wrong = [[*each, (0, 0)]] + [each[:-1] for _ in each[1:2]]
    for pairs in wrong:
        assert control.restore(program.pid, pairs) == "ERROR_INVALID_VALUE", pairs
        assert control.state(program.pid) == "CHECKPOINTED"
    control.bring_back(program.pid, each)
    assert program.ask("holds(p, 3)")


def test_hidden_gpus_are_known(start: Starter, control: Control) -> None:
    program = start(WORKS, CUDA_VISIBLE_DEVICES="0")
    assert program.ask(COUNT) == 1
    control.save(program.pid)
    assert control.restore(program.pid, [(0, 0)]) == "ERROR_INVALID_VALUE"
    control.bring_back(program.pid, in_place(control))
    assert program.ask("holds(p, 3)")


def test_pairs_move_a_process(start: Starter, control: Control) -> None:
    program, watches = start(WORKS), [start("use(0)"), start("use(1)")]
    uuid = "bytes(ck(d.cuDeviceGetUuid(0)).bytes).hex()"
    (first, second) = (control.ask(uuid.replace("(0)", f"({gpu})")) for gpu in (0, 1))
    assert program.ask(uuid) == first
    control.save(program.pid)
    before = [watch.ask("free()") for watch in watches]
    control.bring_back(program.pid, turned(control))
    taken = [was - watch.ask("free()") for was, watch in zip(before, watches, strict=True)]
    assert taken[1] > 0, f"the GPUs have {taken} bytes less"
    assert program.ask(uuid) == second
    assert program.ask("holds(p, 3)")


def test_each_gpu_needs_room(start: Starter, control: Control, software: bool) -> None:
    program, hog = start(WORKS, CUDA_VISIBLE_DEVICES="0"), start("use(1)")
    control.save(program.pid)
    left = hog.ask("take_all_but(0)")
    if not software:
        answer = control.restore(program.pid)
        if answer == "SUCCESS":
            assert left >= 3 * MIB, f"with {left} bytes free on the other GPU"
            assert control.unlock(program.pid) == "SUCCESS"
            assert program.ask("holds(p, 3)")
            return
        assert answer == "ERROR_OUT_OF_MEMORY", f"with {left} bytes free on the other GPU"
        assert control.state(program.pid) == "CHECKPOINTED"
        hog.kill()
    control.bring_back(program.pid)
    assert program.ask("holds(p, 3)")


def test_unseen_gpus_import_nothing(start: Starter, control: Control) -> None:
    program, maker = start(WORKS, CUDA_VISIBLE_DEVICES="0"), start("use(1); h = make(1)")
    control.save(program.pid)
    control.bring_back(program.pid, turned(control))
    importing = "code(d.cuMemImportFromShareableHandle(given, DESCRIPTOR))"
    with kept(maker.give("export(h)")) as descriptor:
        assert program.ask(importing, given=descriptor) == "ERROR_NOT_INITIALIZED"
    program.ask("h = make(); va = mapped(h); fill(va, 9)")
    with kept(program.give("export(h)")) as descriptor:
        maker.ask("va = mapped(imported(given), access(properties(1)))", given=descriptor)
    assert maker.ask("holds(va, 9)"), "what it makes there is not what others import"
