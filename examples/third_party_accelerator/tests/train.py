"""The quickstart's model in small under ZeRO-2: ``dscore run --nproc N train.py OUT`` leaves
``OUT/rank<n>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

import ds_core

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "examples" / "gpt"))

from model import GPT  # noqa: E402


def main() -> None:
    config = json.loads((ROOT / "examples" / "gpt" / "ds_config.json").read_text())
    config |= {
        "train_batch_size": 16,
        "csv_monitor": {"enabled": False},
        "tensorboard": {"enabled": False},
    }
    text = (torch.arange(64 * 17) ** 2 // 7 % 256).view(64, 17)
    torch.manual_seed(0)
    model = GPT(context=16, width=32, layers=2)
    engine, _, loader, _ = ds_core.initialize(
        model=model, config=config, training_data=TensorDataset(text[:, :-1], text[:, 1:])
    )
    engine.load_checkpoint(Path(sys.argv[1], "kept"), missing_ok=True)
    losses = []
    with sdpa_kernel(SDPBackend.MATH):  # on the CPU too, where torch would take another algorithm
        # it goes on: with the engine's own loader, which makes batches on the host
        if engine.global_steps:
            losses += [engine.train_batch().item() for _ in range(4)]
            losses.append(
                engine.eval_batch(iter([(text[:8, :-1], text[:8, 1:])]), num_micro_batches=1).item()
            )
        else:
            for x, y in loader:
                loss = engine(x.to(engine.device), y.to(engine.device))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    engine.save_checkpoint(Path(sys.argv[1], "kept"))
    weights = [p.detach().cpu().flatten()[:8].tolist() for p in model.parameters()]
    seen = {
        "device": str(engine.device),
        "steps": engine.global_steps,
        "losses": losses,
        "weights": weights,
    }
    seen |= {
        "peak": ds_core.get_accelerator().max_memory_allocated(),
        "accelerator": ds_core.get_accelerator().name,
    }
    Path(sys.argv[1], f"rank{engine.global_rank}.json").write_text(json.dumps(seen))
    engine.destroy()


if __name__ == "__main__":
    main()
