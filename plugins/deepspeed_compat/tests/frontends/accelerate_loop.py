"""accelerate: the documented training loop, with the DeepSpeedPlugin by file or by arguments."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from common import Tokens, arguments, tiny_llama, write
from torch.utils.data import DataLoader


def main() -> None:
    """Train eight micro-batches, then save and load the state."""
    args = arguments(stage=-1, gas=1)
    plugin = None
    if args.deepspeed:
        plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed)
    elif args.stage >= 0:
        plugin = DeepSpeedPlugin(
            zero_stage=args.stage,
            gradient_accumulation_steps=args.gas,
            gradient_clipping=0.5,
            zero3_save_16bit_model=True,
        )
    accelerator = Accelerator(
        # cpu=True rules out DeepSpeed
        cpu=plugin is None and "ACCELERATE_USE_DEEPSPEED" not in os.environ,
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=args.gas,
        # without a GPU accelerate chooses none
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(Tokens(64), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    lrs = []
    for index, batch in enumerate(loader):
        if index == 8:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        lrs.append(schedule.get_last_lr()[0])
    if args.work:
        accelerator.save_state(str(args.work / "state"))
        accelerator.wait_for_everyone()
        accelerator.load_state(str(args.work / "state"))
        accelerator.save_model(model, str(args.work / "weights"))
    weights = accelerator.get_state_dict(model)
    total = sum(float(value.double().abs().sum()) for value in weights.values()) if weights else 0.0
    write(args.out, model, losses=losses, lrs=lrs, total=total)
    accelerator.end_training()


if __name__ == "__main__":
    main()
