"""What a program is in, in words: that which would start it again comes first."""

import pytest

from phosd.engine.image.called import Called
from phosd.engine.program.within import within
from phosd.engine.system.containers import Container
from phosd.engine.system.slurm_steps import SlurmStep
from tests.support.fake_engine import this_process

STEP = SlurmStep(12, "batch")
BARE = Container("podman", "0123456789abcdef" * 4)
NAMED = Container("podman", "0" * 64, "trainer")
POD = Container("containerd", "0" * 64, "main", "ml/bert-0")


@pytest.mark.parametrize(
    ("container", "step", "words", "restarter"),
    [
        (None, None, "", "train.service"),
        (None, STEP, "Slurm job 12", "Slurm job 12"),
        (BARE, None, "container 0123456789ab", "train.service"),
        (NAMED, None, "container trainer", "train.service"),
        (NAMED, STEP, "Slurm job 12", "Slurm job 12"),
        (POD, None, "pod ml/bert-0", "pod ml/bert-0"),
        (POD, STEP, "pod ml/bert-0", "pod ml/bert-0"),
    ],
)
def test_words(
    container: Container | None, step: SlurmStep | None, words: str, restarter: str
) -> None:
    assert within(container, step) == words
    process = this_process(name="bert", container=container, slurm_step=step, unit="train.service")
    assert process.called == Called("bert", words)
    assert process.restarter == restarter


def test_several_programs_together() -> None:
    pair = [Called("bert", "pod a/b"), Called("", "pod a/b"), Called("gpt", "Slurm job 1")]
    assert Called.together(pair) == Called("bert, gpt", "pod a/b, Slurm job 1")
    assert Called.together([]) == Called()
