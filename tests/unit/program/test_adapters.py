"""What training libraries are given: with the real ones where they are installed, otherwise beside
stand-ins that call them as the real ones do.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from phosd import program
from phosd.adapters.steps import Steps


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def noting(name: str) -> Callable[[], None]:
        return lambda: made.append(name)

    for name in ("checkpoint", "safe_point", "end_safe_points"):
        monkeypatch.setattr(program, name, noting(name))
    return made


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def loaded(library: str) -> Any:
    """An adapter, imported beside what stands in for its library."""
    name = f"phosd.adapters.{library}"
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if importlib.util.find_spec("transformers") is None:
        stand_in(monkeypatch, "transformers", TrainerCallback=type("TrainerCallback", (), {}))
    yield loaded("transformers")
    sys.modules.pop("phosd.adapters.transformers")


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if importlib.util.find_spec("accelerate") is None:
        stand_in(monkeypatch, "accelerate")
        stand_in(monkeypatch, "accelerate.hooks", ModelHook=type("ModelHook", (), {}))
    yield loaded("accelerate")
    sys.modules.pop("phosd.adapters.accelerate")


def test_a_trainer_comes_to_a_safe_point_after_each_step(transformers: Any, log: list[str]) -> None:
    callback = transformers.SafePoints(every=3)
    for step in range(1, 8):
        # As CallbackHandler.call_event does.
        state = SimpleNamespace(global_step=step)
        assert callback.on_step_end(None, state, None, model=None, optimizer=None) is None
    callback.on_prediction_step(None, SimpleNamespace(global_step=7), None, model=None)
    callback.on_train_end(None, SimpleNamespace(global_step=7), None, model=None)
    one = ["safe_point", "safe_point", "checkpoint"]
    assert log == [*one, *one, "safe_point", "safe_point", "end_safe_points"]


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Beside the library by either of its names, and not by the other."""
    monkeypatch.setitem(sys.modules, "lightning", None)  # it cannot be imported
    if request.param == "lightning.pytorch":
        stand_in(monkeypatch, "lightning")
    stand_in(monkeypatch, request.param, Callback=type("Callback", (), {}))
    yield loaded("lightning")
    sys.modules.pop("phosd.adapters.lightning")


def test_lightning_comes_to_one_after_each_batch(lightning: Any, log: list[str]) -> None:
    callback = lightning.SafePoints(every=2)
    model = object()
    for batch in range(6):  # two batches are a step
        trainer = SimpleNamespace(global_step=(batch + 1) // 2)
        callback.on_train_batch_end(trainer, model, None, None, batch)
        callback.on_validation_batch_end(trainer, model, None, None, batch, dataloader_idx=0)
    callback.on_test_batch_end(trainer, model, None, None, 0)
    callback.on_predict_batch_end(trainer, model, None, None, 0)
    callback.on_exception(trainer, model, ValueError())
    callback.teardown(trainer, model, stage="fit")
    saved = log.index("checkpoint")
    assert saved == 6 and log.count("checkpoint") == 1, "once for the step, not for each batch"
    assert log == [*["safe_point"] * 6, "checkpoint", *["safe_point"] * 7, *["end_safe_points"] * 2]


def test_a_model_comes_to_one_before_each_pass_of_its_training(
    accelerate: Any, log: list[str]
) -> None:
    hook = accelerate.SafePoints(every=2)
    module = SimpleNamespace(training=True)
    for _ in range(4):
        assert hook.pre_forward(module, 1, mask=2) == ((1,), {"mask": 2})
    module.training = False
    hook.pre_forward(module)
    assert hook.detach_hook(module) is module
    assert log == ["safe_point", "checkpoint", "safe_point", "end_safe_points"]


def test_a_checkpoint_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise program.CheckpointFailed("OutOfSpace: the disk is full")

    monkeypatch.setattr(program, "checkpoint", fail)
    with pytest.warns(RuntimeWarning, match="not saved at step 4: OutOfSpace: the disk is full"):
        Steps(2).come_to(4)
    with pytest.raises(program.CheckpointFailed):
        Steps(2, strict=True).come_to(4)
    with pytest.raises(ValueError, match="every=-1 is not possible"):
        Steps(-1)
