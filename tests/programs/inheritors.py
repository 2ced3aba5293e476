"""A worker that is forked once CUDA is in use, and so inherits the driver's devices, feeds the
program; another is forked anew every tenth step.
"""

from gpu import Device, Report, State, write
from workers import BATCH, Feed, PipeFeed, SharedFeed

RENEWED = 10
"""Steps after which the second worker is replaced."""


def main() -> None:
    report = Report()
    state = State(Device(), cold_block=256 << 10)
    lasting: Feed = SharedFeed()
    renewed = PipeFeed()
    for step in report.steps():
        if step and step % RENEWED == 0:
            renewed.end()
            renewed = PipeFeed()
        request = report.seed.to_bytes(8, "little")
        for place, feed in enumerate((lasting, renewed)):
            write(state.window(step) + place * BATCH, feed.batch(request))
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
