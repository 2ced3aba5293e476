"""Fine-tune a small language model of transformers, with the Trainer, Accelerate or PEFT.

    python finetuned.py trainer|accelerate|peft [--size small|large] [--steps N] [--save-every N]
        [--checkpoint-every N]

The Trainer and Accelerate have two data-loader workers. The weights are random, and so are the
tokens; two runs with the same options print the same losses. With ``--save-every`` the program
saves itself each so many steps, by phosd's adapter for the library. With ``--checkpoint-every`` the
Trainer writes checkpoints of its own, and keeps the last two.
"""

import argparse
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch
import transformers
from lines import Lines, print_lines
from torch.utils.data import DataLoader, Dataset

_SHAPES = {"small": (8, 768), "large": (16, 1536)}
"""Layers and width."""


class Texts(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Texts of 128 tokens, each the same whenever it is asked for."""

    def __len__(self) -> int:
        return 1 << 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(index)
        tokens = torch.randint(1000, (128,), generator=chance)
        return {"input_ids": tokens, "labels": tokens}


def model(size: str) -> Any:
    layers, width = _SHAPES[size]
    shape = transformers.GPT2Config(
        vocab_size=1000,
        n_positions=128,
        n_embd=width,
        n_layer=layers,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",  # the gradients of the others may depend on the order
    )
    return transformers.GPT2LMHeadModel(shape)


def trainer(network: Any, steps: int, save_every: int, checkpoint_every: int) -> None:
    """Train with the Trainer, whose loop is its own."""
    lines = Lines()
    callbacks = []
    if save_every:
        from phosd.adapters.transformers import SafePoints

        callbacks.append(SafePoints(save_every, strict=True))

    class Printing(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            lines.add(loss.item())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=16,
            max_steps=steps or 1 << 30,
            dataloader_num_workers=2,
            save_strategy="steps" if checkpoint_every else "no",
            save_steps=checkpoint_every or 500,
            save_total_limit=2,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=True,
            seed=1,
        )
        Printing(network, options, train_dataset=Texts(), callbacks=callbacks).train()


def accelerated(network: Any, save_every: int) -> Generator[float, None, None]:
    """Train with Accelerate, until closed."""
    from accelerate import Accelerator
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    loader = DataLoader(Texts(), batch_size=16, num_workers=2, persistent_workers=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    if save_every:
        from phosd.adapters.accelerate import SafePoints

        add_hook_to_module(network, SafePoints(save_every, strict=True), append=True)
    try:
        while True:
            for batch in loader:
                with accelerator.accumulate(network):
                    loss = network(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                yield loss.item()
    finally:
        remove_hook_from_module(network)


def adapted(network: Any) -> Iterator[float]:
    """Train low-rank adapters with PEFT."""
    import peft

    shape = peft.LoraConfig(r=16, target_modules=["c_attn"], fan_in_fan_out=True)
    network = peft.get_peft_model(network, shape).cuda()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    while True:
        for batch in DataLoader(Texts(), batch_size=16):
            loss = network(**{name: each.cuda() for name, each in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("trainer", "accelerate", "peft"))
    parser.add_argument("--size", choices=_SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=0, help="0: until killed")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    network = model(arguments.size)
    steps, save_every = arguments.steps, arguments.save_every
    told = points = None
    if save_every:  # by what needs phosd
        import own

        told, points = own.Told(), own.steps(save_every).come_to
    if arguments.way == "trainer":
        trainer(network, steps, save_every, arguments.checkpoint_every)
    elif arguments.way == "accelerate":
        with closing(accelerated(network, save_every)) as losses:
            print_lines(losses, steps)
    else:
        print_lines(adapted(network), steps, points)
    if told is not None:
        told.end()


if __name__ == "__main__":
    main()
