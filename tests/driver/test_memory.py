"""Memory: whose it is, how it is shared, and what the driver tells of it."""

from tests.driver.conftest import Starter
from tests.driver.subjects import MIB, Control, devices, kept

MAPPED = "use(); h = make(); va = mapped(h); fill(va, 7)"
PLAIN = "use(); p = ck(d.cuMemAlloc(1000))"


def test_descriptors_keep_memory(start: Starter) -> None:
    maker = start(MAPPED)
    with kept(maker.give("export(h)")) as descriptor:
        maker.kill()
        taker = start()
        taker.ask("va = mapped(imported(given))", given=descriptor)
    assert taker.ask("holds(va, 7)")


def test_importers_keep_memory(start: Starter, control: Control) -> None:
    maker, taker = start(MAPPED), start()
    with kept(maker.give("export(h)")) as descriptor:
        taker.ask("va = mapped(imported(given))", given=descriptor)
    maker.ask("ck(d.cuMemUnmap(va, SIZE)); ck(d.cuMemRelease(h))")
    control.save(maker.pid)
    assert taker.ask("holds(va, 7) and fill(va, 8) is None and holds(va, 8)")
    control.bring_back(maker.pid)


def test_imports_are_not_exported(start: Starter) -> None:
    maker, taker = start(MAPPED), start()
    with kept(maker.give("export(h)")) as descriptor:
        taker.ask("h = imported(given)", given=descriptor)
    exporting = "d.cuMemExportToShareableHandle(h, DESCRIPTOR, 0)"
    assert taker.do(exporting) == "ERROR_INVALID_VALUE"


def test_plain_memory_has_no_handle(start: Starter) -> None:
    program = start(PLAIN)
    assert program.do("d.cuMemRetainAllocationHandle(int(p))") == "ERROR_INVALID_VALUE"
    assert program.ask("attribute('ALLOWED_HANDLE_TYPES', p)") == 0


def test_plain_memory_has_its_size(start: Starter) -> None:
    program = start(PLAIN + "; start, size = ck(d.cuMemGetAddressRange(int(p) + 8))")
    assert program.ask("(int(start) - int(p), size)") == [0, 1000]
    names = ("RANGE_START_ADDR", "RANGE_SIZE")
    told = [program.ask(f"attribute('{name}', int(p) + 8)") for name in names]
    assert told == [program.ask("int(p)"), 1000]


def test_truths_take_four_bytes(start: Starter) -> None:
    program = start(PLAIN)
    untouched = 0xFFFFFFFF << 32
    for name, value in (("IS_MANAGED", 0), ("MAPPED", 1), ("SYNC_MEMOPS", 0)):
        told = program.ask(f"attribute('{name}', p)")
        assert told == untouched | value, f"{name}: {told:#x}"


def test_mappings_have_buffer_ids(start: Starter) -> None:
    program = start(MAPPED + "; other = mapped(h)\ndef ids(): return "
                    "[attribute('BUFFER_ID', at) for at in (va, other)]")  # fmt: skip
    first, second = program.ask("ids()")
    assert first != second, "two mappings of one memory have one id"
    program.ask("ck(d.cuMemUnmap(va, SIZE)); map_at(va, h)")
    again, still = program.ask("ids()")
    assert still == second
    assert again not in (first, second), "the id of memory that was mapped again"


def test_virtual_memory_has_no_legacy_ipc(start: Starter) -> None:
    program = start(MAPPED)
    assert program.do("d.cuIpcGetMemHandle(va)") != "SUCCESS"


def test_host_memory_is_shared(start: Starter) -> None:
    there = (
        "use(); there = properties(0, 'HOST_NUMA')\n"
        "node = d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID\n"
        "there.location.id = max(0, ck(d.cuDeviceGetAttribute(node, 0)))\n"
        "both = access(properties()), access(there)\n"
    )
    maker = start(there + "h = ck(d.cuMemCreate(SIZE, there, 0)); va = mapped(h, *both)")
    taker = start(there)
    with kept(maker.give("export(h)")) as descriptor:
        taker.ask("va = mapped(imported(given), *both)", given=descriptor)
    maker.ask("s = ck(d.cuStreamCreate(1)); ck(d.cuStreamWriteValue32(s, va, 5, 0))")
    assert maker.do("d.cuStreamSynchronize(s)") == "SUCCESS"
    assert taker.ask("ctypes.c_uint32.from_address(va).value") == 5


def test_forked_children_have_no_cuda(start: Starter, control: Control) -> None:
    program = start()
    child, answer = program.ask("forked()")
    assert answer == "ERROR_NOT_INITIALIZED"
    assert control.state(child) == "ERROR_NOT_INITIALIZED"


def test_forked_children_keep_devices(start: Starter, control: Control) -> None:
    watch = start()
    before = watch.ask("free()")
    program = start()
    child, _ = program.ask("forked()")
    control.save(program.pid)
    assert devices(program.pid) == []
    assert devices(child) != [], "the child has given up the devices with its parent"
    held = before - watch.ask("free()")
    control.bring_back(program.pid)
    assert held <= 16 * MIB, f"{held} bytes of the parent's are still in use"
