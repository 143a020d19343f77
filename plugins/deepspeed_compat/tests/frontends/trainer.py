"""transformers.Trainer: train, evaluate, save, resume, and load the best model at the end."""

from __future__ import annotations

from common import Tokens, arguments, tiny_llama, write
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Train six steps; with ``--resume 3`` go on from the checkpoint of step 3."""
    args = arguments(resume=0, best=0, gas=1)
    settings = TrainingArguments(
        output_dir=str(args.work),
        deepspeed=args.deepspeed,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=args.gas,
        learning_rate=5e-3,
        weight_decay=0.01,
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
    trainer = Trainer(model=tiny_llama(), args=settings, train_dataset=Tokens(64), eval_dataset=Tokens(8, seed=1))
    trainer.train(resume_from_checkpoint=str(args.work / f"checkpoint-{args.resume}") if args.resume else None)
    history = trainer.state.log_history
    trainer.save_model(str(args.work / "final"))
    write(
        args.out,
        losses=[row["loss"] for row in history if "loss" in row],
        norms=[row["grad_norm"] for row in history if "grad_norm" in row],
        evals=[row["eval_loss"] for row in history if "eval_loss" in row],
        lrs=[row["learning_rate"] for row in history if "learning_rate" in row],
    )


if __name__ == "__main__":
    main()
