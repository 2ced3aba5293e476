"""Two devices in one process, of which the second may write to the first only in the middle of a
step: before and after it, its access is revoked.
"""

from cuda.bindings import driver
from gpu import Device, Report, State, ok

WINDOW = 64 << 10


def main() -> None:
    report = Report()
    peer, device = Device(1), Device(0)
    state = State(device, cold_block=128 << 10)
    for step in report.steps():
        computed = state.step(step, report.seed)
        peer.make_current()
        (revoked,) = driver.cuCtxDisablePeerAccess(device.context)
        ok(driver.cuCtxEnablePeerAccess(device.context, 0))
        (given,) = driver.cuCtxEnablePeerAccess(device.context, 0)
        peer.advance(state.window(step), WINDOW, report.seed)
        ok(driver.cuCtxSynchronize())
        ok(driver.cuCtxDisablePeerAccess(device.context))
        device.make_current()
        report.tell(step, computed + bytes((int(revoked) & 255, int(given) & 255)))


if __name__ == "__main__":
    main()
