"""Lightning: Trainer.fit with DeepSpeedStrategy, or its DDP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from common import Tokens, arguments, cuda_on_cpu, tiny_llama, write
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """The small model and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()  # type: ignore[var-annotated]
        self.losses = []  # type: ignore[var-annotated]

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        """The loss, and its mean over ranks written down."""
        loss = self.model(**batch).loss
        self.losses.append(
            float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean"))
        )
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        """Log the loss."""
        self.log("val", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW with a decaying schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": "step",
            }
        ]


def converted(folder: Path) -> float:
    """The validation loss of the checkpoint's weights, in one file as Lightning's own converter
    writes it.
    """
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(folder / "state.ckpt", folder / "whole.ckpt")
    whole = Module()
    whole.load_state_dict(torch.load(folder / "whole.ckpt", weights_only=True)["state_dict"])
    with torch.no_grad():
        losses = [
            float(whole.model(**batch).loss)
            for batch in DataLoader(Tokens(8, seed=1), batch_size=2)
        ]
    return sum(losses) / len(losses)


def main() -> None:
    """Fit six steps; with ``--work`` save, and fit on from the checkpoint in a new trainer."""
    args = arguments(gas=1, convert=0)

    def trainer(steps: int) -> Any:
        strategy = DDPStrategy(process_group_backend="gloo")
        if args.deepspeed:
            with open(args.deepspeed) as file:
                strategy = DeepSpeedStrategy(config=json.load(file), process_group_backend="gloo")
        return lightning.Trainer(
            accelerator=cuda_on_cpu(CUDAAccelerator) if args.deepspeed else "cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=strategy,
            max_steps=steps,
            accumulate_grad_batches=args.gas,
            gradient_clip_val=0.5,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=True,
            val_check_interval=2 * args.gas,
            default_root_dir=str(args.work),
        )

    train = DataLoader(Tokens(64), batch_size=2, shuffle=False)
    check = DataLoader(Tokens(8, seed=1), batch_size=2)
    module = Module()
    first = trainer(4)
    first.fit(module, train, check)
    evals = [float(first.callback_metrics["val"])]
    first.save_checkpoint(str(args.work / "state.ckpt"))
    again = Module()
    second = trainer(6)
    second.fit(again, train, check, ckpt_path=str(args.work / "state.ckpt"))
    evals.append(float(second.callback_metrics["val"]))
    if args.convert and second.is_global_zero:
        evals.append(converted(args.work))
    write(args.out, second.strategy.model, losses=module.losses + again.losses, evals=evals)


if __name__ == "__main__":
    main()
