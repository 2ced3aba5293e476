"""Two devices in one process; each computes on what the other computed."""

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok, read

SIZE = 64 << 10


def main() -> None:
    report = Report()
    devices = [Device(0), Device(1)]
    states, mail = [], []
    for device in devices:
        device.make_current()
        states.append(State(device, cold_block=256 << 10))
        mail.append(allocate(SIZE))
    for step in report.steps():
        here, there = step % 2, 1 - step % 2
        computed = b""
        for number in (there, here):
            devices[number].make_current()
            computed += states[number].step(step, report.seed + number)
        ok(driver.cuMemcpyDtoD(mail[here], states[here].window(step), SIZE))
        target = states[there].window(step + 1)
        context, other = devices[here].context, devices[there].context
        ok(driver.cuMemcpyPeer(target, other, mail[here], context, SIZE))
        ok(driver.cuCtxSynchronize())  # before the other device reads what arrived
        devices[there].make_current()
        report.tell(step, computed + read(target, 64))


if __name__ == "__main__":
    main()
