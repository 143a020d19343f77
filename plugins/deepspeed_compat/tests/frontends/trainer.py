"""transformers.Trainer: train, evaluate, save, resume, and load the best model at the end."""

from __future__ import annotations

from pathlib import Path

import torch
from common import Tokens, arguments, first_rank, tiny_llama, write
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations import deepspeed as hf


def loss_of(folder: Path) -> float:
    """The loss of the model in `folder` on four samples."""
    rows = torch.stack([Tokens(4, seed=2)[i]["input_ids"] for i in range(4)])
    with torch.no_grad():
        return float(LlamaForCausalLM.from_pretrained(folder)(input_ids=rows, labels=rows).loss)


def main() -> None:
    """Train six steps; with ``--resume 3`` go on from the checkpoint of step 3."""
    args = arguments(resume=0, best=0, gas=1, pretrained=0, decay=0.01)
    if args.pretrained and first_rank():
        tiny_llama().save_pretrained(args.work / "base")
    settings = TrainingArguments(
        output_dir=str(args.work),
        deepspeed=args.deepspeed,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=args.gas,
        learning_rate=5e-3,
        weight_decay=args.decay,
        max_grad_norm=0.5,
        warmup_steps=2,
        lr_scheduler_type="linear",
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        save_strategy="steps",
        load_best_model_at_end=bool(args.best),
        report_to=[],
        seed=3,
        disable_tqdm=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
    )
    settings.distributed_state.wait_for_everyone()
    # under stage 3 transformers shards what it loads, as it loads it
    model = (
        LlamaForCausalLM.from_pretrained(args.work / "base") if args.pretrained else tiny_llama()
    )
    sharded = hasattr(model.lm_head.weight, "ds_id")
    trainer = Trainer(
        model=model, args=settings, train_dataset=Tokens(64), eval_dataset=Tokens(8, seed=1)
    )
    trainer.train(
        resume_from_checkpoint=str(args.work / f"checkpoint-{args.resume}") if args.resume else None
    )
    history = trainer.state.log_history
    engine = trainer.model_wrapped
    trainer.save_model(str(args.work / "final"))
    settings.distributed_state.wait_for_everyone()
    hf.unset_hf_deepspeed_config()  # what follows is an ordinary load, on each rank by itself
    write(
        args.out,
        engine,
        sharded=sharded,
        final=loss_of(args.work / "final"),
        losses=[row["loss"] for row in history if "loss" in row],
        norms=[row["grad_norm"] for row in history if "grad_norm" in row],
        evals=[row["eval_loss"] for row in history if "eval_loss" in row],
        lrs=[row["learning_rate"] for row in history if "learning_rate" in row],
    )


if __name__ == "__main__":
    main()
