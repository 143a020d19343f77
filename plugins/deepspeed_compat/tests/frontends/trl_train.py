"""TRL: supervised fine-tuning and DPO."""

from __future__ import annotations

from pathlib import Path

from common import arguments, tiny_llama, write
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(57)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words split at spaces; made here, since nothing is downloaded."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def text(start: int, step: int) -> str:
    return " ".join(WORDS[(start + i * step) % len(WORDS)] for i in range(6))


def main() -> None:
    """Six steps of ``--what sft`` or ``--what dpo``."""
    args = arguments(what="sft")
    shared = {
        "output_dir": str(args.work),
        "deepspeed": args.deepspeed,
        "use_cpu": True,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_backend": "gloo",
        "dataloader_pin_memory": False,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 16,
    }
    model = tiny_llama()
    Path(args.work).mkdir(parents=True, exist_ok=True)
    if args.what == "sft":
        from trl import SFTConfig, SFTTrainer

        rows = Dataset.from_dict({"text": [text(i, 1 + i % 3) for i in range(32)]})
        trainer = SFTTrainer(model=model, args=SFTConfig(**shared), train_dataset=rows, processing_class=tokenizer())
    else:
        from trl import DPOConfig, DPOTrainer

        rows = Dataset.from_dict(
            {
                "prompt": [text(i, 1) for i in range(32)],
                "chosen": [text(i + 6, 1) for i in range(32)],
                "rejected": [text(i + 6, 5) for i in range(32)],
            }
        )
        trainer = DPOTrainer(
            model=model,
            ref_model=tiny_llama(),
            args=DPOConfig(**shared),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
    trainer.train()
    write(args.out, trainer.model_wrapped, losses=[row["loss"] for row in trainer.state.log_history if "loss" in row])


if __name__ == "__main__":
    main()
