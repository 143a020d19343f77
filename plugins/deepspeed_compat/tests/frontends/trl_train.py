"""TRL: supervised fine-tuning, DPO and GRPO, whole or with LoRA."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from common import arguments, tiny_llama, write
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(57)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words split at spaces; made here, since nothing is downloaded."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    made = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def text(start: int, step: int) -> str:
    return " ".join(WORDS[(start + i * step) % len(WORDS)] for i in range(6))


def adapter() -> Any:
    """LoRA of the attention, without dropout."""
    from peft import LoraConfig

    torch.manual_seed(5)
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )


def longer(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between texts."""
    return [float(len(set(text.split()))) for text in completions]


def by_sft(args: Namespace, shared: dict[str, Any], **parts: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"text": [text(i, 1 + i % 3) for i in range(32)]})
    return SFTTrainer(args=SFTConfig(**shared), train_dataset=rows, **parts)


def by_grpo(args: Namespace, shared: dict[str, Any], **parts: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    few = {
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.1 if args.lora else 0.0,
        "temperature": 1.0,
        "seed": 3,
        "max_steps": 3,
    }
    # GRPO limits completions alone.
    config = GRPOConfig(**{k: v for k, v in shared.items() if k != "max_length"} | few)
    rows = Dataset.from_dict({"prompt": [text(i, 1) for i in range(32)]})
    return GRPOTrainer(args=config, reward_funcs=longer, train_dataset=rows, **parts)


def by_dpo(args: Namespace, shared: dict[str, Any], **parts: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_dict(
        {
            "prompt": [text(i, 1) for i in range(32)],
            "chosen": [text(i + 6, 1) for i in range(32)],
            "rejected": [text(i + 6, 5) for i in range(32)],
        }
    )
    return DPOTrainer(
        # Without an adapter the weights before training have to be kept apart.
        ref_model=None if args.lora else tiny_llama(),
        args=DPOConfig(**shared, precompute_ref_log_probs=bool(args.ahead)),
        train_dataset=rows,
        **parts,
    )


def main() -> None:
    """Six steps of ``--what`` sft, dpo or grpo; ``--lora 1``: an adapter; ``--ahead 1``: the
    reference first.
    """
    args = arguments(what="sft", lora=0, ahead=0)
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
    lora = {"peft_config": adapter()} if args.lora else {}
    Path(args.work).mkdir(parents=True, exist_ok=True)
    make = {"sft": by_sft, "grpo": by_grpo, "dpo": by_dpo}[args.what]
    trainer = make(args, shared, model=model, processing_class=tokenizer(), **lora)
    trainer.train()
    write(
        args.out,
        trainer.model_wrapped,
        losses=[row["loss"] for row in trainer.state.log_history if "loss" in row],
    )


if __name__ == "__main__":
    main()
