"""A training step of a divided Llama: ds_core's tensor parallelism and torch's
`parallelize_module`, in one run.

fp32 on 2 cores: 2 ranks of 1 thread over gloo. All train one random Llama of transformers on the
same tokens with fused AdamW. Contestants run in interleaved steps, so that a noisy machine hits all
alike; a step takes as long as on the slower rank.

    python benchmarks/tensor_parallel.py [--widths 512 1024] [--layers 4] [--tokens 256] [--rounds
    10] [--only NAME ...]

Contestants of torch: columns q, k, v, gate, up and the head, rows o and down, each layer by itself;
the same with the input of an attention and an MLP made a DTensor once (`PrepareModuleInput`), so
that its gradient is summed once; this with `loss_parallel`; and this with the sequence divided
between blocks' layers. Their embedding is whole on each rank; ds_core divides it too, as the
model's own plan says: one sum more, and less for the optimizer to do. One contestant of ds_core
leaves it whole, to compare like with like.

speed: the time of torch's best of the same kind (logits gathered, divided loss, divided sequence)
over the contestant's, by the best step. CPU: time of a rank's process per step, median over steps,
mean over ranks. sent: bytes that a rank gives to the others in a step, as ring collectives need
them. off: the largest difference of a loss to one process of plain torch, over the first steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_core import comm

LR = 1e-3
DECAY = 0.01
VOCABULARY = 8192
STEPS = 4
OURS: dict[str, dict[str, Any]] = {
    "ds_core, logits gathered": {"vocab_parallel_loss": False},
    "ds_core": {},
    "ds_core, embedding whole": {
        "partition_config": {
            "layer_specs": [{"patterns": [".*embed_tokens.*"], "partition_type": "skip"}]
        }
    },
    "ds_core, sequence": {"sequence_parallel": True},
}
THEIRS = {
    "torch, tutorial": (),
    "torch, prepared": ("prepared",),
    "torch, loss_parallel": ("prepared", "loss"),
    "torch, sequence": ("prepared", "loss", "sequence"),
}
KINDS = (
    ("ds_core, logits gathered", "torch, tutorial", "torch, prepared"),
    ("ds_core", "ds_core, embedding whole", "torch, loss_parallel"),
    ("ds_core, sequence", "torch, sequence"),
)
Step = Callable[[], Tensor]


def shares(op: str, size: int) -> int:
    """Bytes that one rank gives to others; size: of the whole message."""
    ranks = dist.get_world_size()
    times = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": 1 - 1 / ranks,
    }
    return next((int(size * share) for name, share in times.items() if name in op), 0)


class Sent(TorchDispatchMode, comm.Interceptor):
    """Adds up what collectives of either kind send to others. calls: how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor then calls the operations on what it holds
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            size = args[0].numel() * args[0].element_size()
            self.count(
                str(func), size * (dist.get_world_size() if "all_gather" in str(func) else 1)
            )
        return func(*args, **(kwargs or {}))

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        """Count one collective of ds_core."""
        self.count(collective.op, 0 if collective.message is None else collective.message.nbytes)
        return call()

    def count(self, op: str, size: int) -> None:
        """One more collective."""
        self.total += shares(op, size)
        self.calls += 1


def build(width: int, layers: int) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config).train()


def with_torch(model: Any, ids: Tensor, around: Callable[[], Any] = nullcontext) -> Step:
    from torch.distributed.tensor import DTensor

    divided = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # one fused operation takes one kind
    groups = [{"params": params} for params in (divided, plain) if params]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        with around():
            loss: Tensor = model(ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return step


def theirs(model: Any, ids: Tensor, abilities: tuple[str, ...]) -> Step:
    """torch's own, with a plan for the names of transformers' Llama."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sequence = "sequence" in abilities
    tokens: Any = Shard(1) if sequence else Replicate()
    columns = [
        f"model.layers.*.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    ]
    columns += [f"model.layers.*.{name}" for name in ("mlp.gate_proj", "mlp.up_proj")]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=tokens)
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    if "loss" in abilities:
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if "prepared" in abilities:
        given = {"hidden_states": tokens}
        wanted = {"hidden_states": Replicate()}
        plan["model.layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts=given, desired_input_kwarg_layouts=wanted
        )
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=(tokens,), desired_input_layouts=(Replicate(),)
        )
    if sequence:
        for name in ("input_layernorm", "post_attention_layernorm"):
            plan[f"model.layers.*.{name}"] = SequenceParallel(use_local_output=True)
        for name, have, want in (
            ("model.layers.0", Replicate(), tokens),
            ("model.norm", tokens, Replicate()),
        ):
            plan[name] = PrepareModuleInput(
                input_layouts=(have,), desired_input_layouts=(want,), use_local_output=True
            )
    parallelize_module(model, mesh, plan)
    return with_torch(model, ids, loss_parallel if "loss" in abilities else nullcontext)


def ours(model: Any, ids: Tensor, options: dict[str, Any]) -> Step:
    """ds_core, which takes the model's own plan."""
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": len(ids),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "tensor_parallel": {"autotp_size": dist.get_world_size(), **options},
    }
    engine: Any = ds_core.initialize(model=model, config=config)[0]

    def step() -> Tensor:
        loss: Tensor = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def measure(arguments: argparse.Namespace, width: int) -> dict[str, dict[str, float]]:
    ids = torch.randint(
        VOCABULARY, (1, arguments.tokens), generator=torch.Generator().manual_seed(1)
    )
    make = functools.partial(build, width, arguments.layers)
    alone = with_torch(make(), ids)
    wanted = [float(alone().detach()) for _ in range(STEPS)]
    del alone
    found: dict[str, dict[str, float]] = {}
    steps: dict[str, Step] = {}
    for name in [n for n in (*THEIRS, *OURS) if not arguments.only or n in arguments.only]:
        step = ours(make(), ids, OURS[name]) if name in OURS else theirs(make(), ids, THEIRS[name])
        off = max(abs(float(step().detach()) - loss) for loss in wanted)
        with Sent() as sent:
            comm.add_interceptor(sent)
            step()
            comm.remove_interceptor(sent)
        steps[name] = step
        found[name] = {"off": off, "sent": sent.total, "calls": sent.calls}
    times: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            used = time.process_time()
            step()
            took = torch.tensor([time.perf_counter() - start, time.process_time() - used])
            slowest = took[:1].clone()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(took)
            times[name].append(float(slowest))
            cpu[name].append(float(took[1]) / dist.get_world_size())
    for name in steps:
        found[name] |= {
            "best": min(times[name]),
            "median": median(times[name]),
            "cpu": median(cpu[name]),
        }
    return found


def work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [[width, measure(arguments, width)] for width in arguments.widths]
    if dist.get_rank() == 0:
        show(arguments, rows)
    dist.barrier()
    dist.destroy_process_group()


def show(arguments: argparse.Namespace, rows: list[Any]) -> None:
    print("| width | | best ms | median ms | speed | CPU ms | collectives | sent MB | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for width, found in rows:
        for name, row in found.items():
            kind = next(kind for kind in KINDS if name in kind)
            bests = [found[n]["best"] for n in kind if n in THEIRS and n in found]
            speed = f"{min(bests) / row['best']:.2f}" if bests else ""
            best, middle, cpu = (f"{row[key] * 1e3:.0f}" for key in ("best", "median", "cpu"))
            sent = f"{int(row['calls'])} | {row['sent'] / 1e6:.2f}"
            print(
                f"| {width} | {name} | {best} | {middle} | {speed} | {cpu} | {sent} | "
                f"{row['off']:.1e} |"
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="names of contestants")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.ranks}",
        *sys.argv,
    ]
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
