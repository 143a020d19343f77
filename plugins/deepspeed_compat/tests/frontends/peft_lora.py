"""A LoRA fine-tuning with peft and transformers.Trainer; the adapter is saved and loaded on an
unchanged model.
"""

from __future__ import annotations

import torch
from common import Tokens, arguments, tiny_llama, write
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments
from transformers.integrations import deepspeed as hf


def main() -> None:
    """Six steps; then the saved adapter's loss."""
    args = arguments()
    settings = TrainingArguments(
        output_dir=str(args.work),
        deepspeed=args.deepspeed,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=2e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
    )
    torch.manual_seed(5)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )
    base = tiny_llama()
    torch.manual_seed(5)
    trainer = Trainer(model=get_peft_model(base, lora), args=settings, train_dataset=Tokens(64))
    trainer.train()
    engine = trainer.model_wrapped
    trainer.save_model(str(args.work / "adapter"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    settings.distributed_state.wait_for_everyone()
    hf.unset_hf_deepspeed_config()  # what follows is an ordinary load, on each rank by itself
    rows = torch.stack([Tokens(4, seed=2)[i]["input_ids"] for i in range(4)])
    loaded = PeftModel.from_pretrained(tiny_llama(), str(args.work / "adapter"))
    with torch.no_grad():
        write(
            args.out, engine, losses=losses, loaded=float(loaded(input_ids=rows, labels=rows).loss)
        )


if __name__ == "__main__":
    main()
