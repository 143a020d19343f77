"""ZeRO inference as transformers' documents write it: HfDeepSpeedConfig, from_pretrained,
initialize, generate.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from common import arguments, first_rank, tiny_llama, write
from transformers import LlamaForCausalLM


def main() -> None:
    """Two prompts; the second one is padded on the left."""
    args = arguments()
    engine = None
    if args.deepspeed:
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        config = json.loads(Path(args.deepspeed).read_text())
        deepspeed.init_distributed("gloo")
        if first_rank():
            tiny_llama().save_pretrained(args.work / "base")
        torch.distributed.barrier()
        kept = HfDeepSpeedConfig(config)  # while it lives from_pretrained shards what it loads
        model = LlamaForCausalLM.from_pretrained(args.work / "base")
        sharded = hasattr(model.lm_head.weight, "ds_id")
        engine = deepspeed.initialize(model=model, config=config)[0]
        model = engine.module
        assert kept.is_zero3()
    else:
        model = tiny_llama()
        sharded = False
    model.eval()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    prompts = torch.arange(12).view(2, 6) * mask
    text = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    write(args.out, engine if engine is not None else model, sharded=sharded, text=text.tolist())


if __name__ == "__main__":
    main()
