"""Record the corpus on this machine's device, or compare it with a recording.

python tests/native/corpus/run.py --record FILE
python tests/native/corpus/run.py --compare FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.native.corpus import corpus
from tests.native.corpus.case import Array, Case
from tests.native.corpus.device import Device


def record(device: Device, path: Path, only: str) -> int:
    stored: dict[str, Array] = {"device": np.array(device.name)}
    failures = 0
    for case in corpus.cases():
        if only not in case.name:
            continue
        try:
            outputs = device.run(case)
        except RuntimeError as error:
            print(f"{case.name}: {error}")
            failures += 1
            continue
        for index, output in enumerate(outputs):
            keep = output if corpus.approximate(case) else corpus.digest(output)
            stored[f"{case.name}.{index}"] = keep
        if case.reference is not None:
            failures += _report(case.name, compare_reference(case, outputs))
    np.savez_compressed(path, **stored)  # type: ignore[arg-type]
    print(f"{path}: {path.stat().st_size} bytes, {failures} failures")
    return failures


def compare_reference(case: Case, outputs: list[Array]) -> list[str]:
    assert case.reference is not None
    expected = case.reference(*case.inputs)
    every = expected if isinstance(expected, list) else [expected]
    return [corpus.differences(case, e, a) for e, a in zip(every, outputs, strict=True)]


def compare_recorded(case: Case, outputs: list[Array], recorded: dict[str, Array]) -> list[str]:
    wrong = []
    for index, output in enumerate(outputs):
        expected = recorded.get(f"{case.name}.{index}")
        if expected is None:
            wrong.append("is not in the recording")
        elif corpus.approximate(case):
            wrong.append(corpus.differences(case, expected, output))
        elif not np.array_equal(expected, corpus.digest(output)):
            wrong.append("the bits differ from the recording")
    return wrong


def _report(name: str, wrong: list[str]) -> int:
    for index, text in enumerate(wrong):
        if text:
            print(f"{name}: output {index}: {text}")
    return sum(bool(text) for text in wrong)


def compare(device: Device, path: Path, only: str) -> int:
    recorded = dict(np.load(path))
    failures = 0
    for case in corpus.cases():
        if only not in case.name:
            continue
        try:
            outputs = device.run(case)
        except RuntimeError as error:
            print(f"{case.name}: {error}")
            failures += 1
            continue
        failures += _report(case.name, compare_recorded(case, outputs, recorded))
    print(f"compared with {recorded['device']}: {failures} failures")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", help="part of the names to run")
    options = parser.parse_args()
    if (options.record is None) == (options.compare is None):
        parser.error("give one of --record and --compare")
    device = Device()
    if options.record is not None:
        return 1 if record(device, options.record, options.only) else 0
    return 1 if compare(device, options.compare, options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
