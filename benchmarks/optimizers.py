"""Steps of optimizers of matrices on the shapes of SmolLM2-135M, beside Muon's and AdamW's.

Of Muon: in batches of one shape, matrix by matrix, and the matrix products alone. `products`
orthogonalises the same matrices, already stacked; `Muon, one by one` is the same step with a batch
for each matrix. SOAP, Shampoo and GaLore renew bases now and then: such a step is a row of its own.
All are measured in turns; the smallest of each counts. CPU time says more than the clock where
others use the machine.

    python benchmarks/optimizers.py [--layers 30] [--rounds 5] [--device cpu] [--threads N]
                                    [--only WORD ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from ds_optimizer_kit.matrix_optimizer import split_here
from ds_optimizers import SOAP, AdamW, Dion, GaLore, Muon, Shampoo, muon
from torch import Tensor, nn

WIDTH = 576
INNER = 1536
KEYS = 192
VOCABULARY = 49152
LAYER = (
    (WIDTH, WIDTH),
    (KEYS, WIDTH),
    (KEYS, WIDTH),
    (WIDTH, WIDTH),
    (INNER, WIDTH),
    (INNER, WIDTH),
    (WIDTH, INNER),
)


def parameters(layers: int, device: str) -> list[nn.Parameter]:
    """Those of the model, with gradients and marked for Muon."""
    made = []
    for shape in [*(LAYER * layers), (VOCABULARY, WIDTH), *[(WIDTH,)] * (2 * layers + 1)]:
        param = nn.Parameter(torch.randn(shape, device=device) * 0.02)
        param.grad = torch.randn(shape, device=device) * 1e-3
        param.use_muon = len(shape) == 2 and shape[0] != VOCABULARY  # type: ignore[attr-defined]
        made.append(param)
    return made


def stacks(layers: int, device: str) -> list[Tensor]:
    """The matrices that are orthogonalised, those of one shape (lying down) together."""
    shapes = [tuple(sorted(shape)) for shape in LAYER * layers]
    return [
        torch.randn(shapes.count(shape), *shape, device=device) for shape in sorted(set(shapes))
    ]


def contestants(layers: int, device: str) -> dict[str, Callable[[], object]]:
    batched = Muon(parameters(layers, device), lr=1e-3)
    single = Muon(parameters(layers, device), lr=1e-3)
    ready = stacks(layers, device)

    def one_by_one() -> None:
        together = muon.orthogonalize_all
        muon.orthogonalize_all = lambda matrices, methods: {  # type: ignore[assignment]
            unit: found for pair in matrices for unit, found in together([pair], methods).items()
        }
        try:
            single.step()
        finally:
            muon.orthogonalize_all = together

    def of(kind: type[torch.optim.Optimizer], **params: int) -> Callable[[], object]:
        made: list[torch.optim.Optimizer] = []

        def run() -> object:
            if not made:  # made when it is wanted; its first step makes bases
                given = parameters(layers, device)
                names = {p: "up" if p.use_muon else "embed" for p in given}  # type: ignore[attr-defined]
                made.append(kind(split_here([{"params": given}], names), **params))
            return made[0].step()

        return run

    never = 1_000_000
    return {
        "AdamW": AdamW(parameters(layers, device), lr=1e-3).step,
        "SOAP": of(SOAP, precondition_frequency=never),
        "SOAP, bases": of(SOAP, precondition_frequency=1),
        "Shampoo": of(Shampoo, precondition_frequency=never),
        "Shampoo, roots": of(Shampoo, precondition_frequency=1),
        "Dion": of(Dion),
        "GaLore": of(GaLore, update_proj_gap=never),
        "GaLore, basis": of(GaLore, update_proj_gap=1),
        "Muon": batched.step,
        "Muon, one by one": one_by_one,
        "products": lambda: [muon.orthogonalize(stack) for stack in ready],
    }


def seconds(run: Callable[[], object], device: str) -> tuple[float, float]:
    """By the clock, and of all threads' CPU time."""
    clock = time.perf_counter()
    cpu = time.process_time()
    run()
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - clock, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of rows")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    runs = {
        name: run
        for name, run in contestants(given.layers, given.device).items()
        if not given.only or name == "products" or any(word in name for word in given.only)
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(given.rounds + 1):  # the first one allocates states
        for name, run in runs.items():
            times[name].append(seconds(run, given.device))
    best = {name: [min(column) for column in zip(*t[1:], strict=True)] for name, t in times.items()}
    for name, values in best.items():
        row = [f"{v:8.3f} s {v / p:5.2f} x" for v, p in zip(values, best["products"], strict=True)]
        print(f"{name:18} clock {row[0]}   CPU {row[1]}")


if __name__ == "__main__":
    main()
