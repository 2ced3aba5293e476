"""One host thread, the default stream."""

from gpu import Device, Report, State


def main() -> None:
    report = Report()
    state = State(Device())
    for step in report.steps():
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
