"""Train a perceptron with Lightning, whose loop and callbacks are its own.

python lightened.py
"""

import logging
import os
from typing import Any

import lightning
import torch
from lines import Lines
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Network(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._layers = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        self._lines = Lines()

    def training_step(self, batch: Any, number: int) -> Any:
        (given,) = batch
        loss = nn.functional.mse_loss(self._layers(given), given.flip(1))
        self._lines.add(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1)
    chance = torch.Generator().manual_seed(2)
    given = TensorDataset(torch.randn(1 << 14, 1024, generator=chance))
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=-1,
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(), DataLoader(given, batch_size=64, num_workers=2, shuffle=True))


if __name__ == "__main__":
    main()
