"""Training by the engine, and the same training by plain torch in one process: what a test of a
plugin compares.

A test says what is trained (a model, a function that makes batches, a loss) and which sections are
on trial; `start` and `train` do it with the engine, `plain` without, and `same` or `difference`
compares losses and `whole_weights`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ds_core

SGD: Mapping[str, Any] = {"type": "SGD", "params": {"lr": 0.1}}
"""The optimizer of `start` and `plain`, as a config has it."""

Batches = Callable[[int, int], Any]
"""``batches(step, index)``: the micro-batch number `index` of a step, over all ranks."""

Loss = Callable[[Any, Any], Tensor]
"""``loss(model, batch)``: calls a model, or an engine, with a micro-batch."""


def start(
    model: nn.Module,
    *,
    micro: int = 2,
    gas: int | None = None,
    clip: float = 0.0,
    optimizer: Any = SGD,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **sections: Any,
) -> ds_core.Engine:
    """The engine of ``ds_core.initialize``, with a small config.

    micro: ``train_micro_batch_size_per_gpu``; left out where `sections` have ``train_batch_size``.
    gas: ``gradient_accumulation_steps``; None: as the batch sizes say.
    clip: ``gradient_clipping``; 0, which is not the config's own default, does not clip.
    optimizer: the config's section; or an Optimizer or a function, for `initialize`; or None.
    sections: further keys of the config, which override the others.
    """
    config: dict[str, Any] = {"gradient_clipping": clip}
    if gas is not None:
        config["gradient_accumulation_steps"] = gas
    if "train_batch_size" not in sections:
        config["train_micro_batch_size_per_gpu"] = micro
    given = optimizer
    if isinstance(optimizer, Mapping):
        config["optimizer"] = dict(optimizer)
        given = None
    engine, *_ = ds_core.initialize(
        model=model,
        optimizer=given,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        config=config | sections,
    )
    return engine


def loss_of(model: Any, batch: Any) -> Tensor:
    """The loss of a micro-batch: what the model gives, or its ``loss``, or its mean square in fp32.

    batch: keyword arguments (a mapping), positional ones (a tuple), or the one argument.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, tuple):
        out = model(*batch)
    else:
        out = model(batch)
    out = getattr(out, "loss", out)
    if out.dim():
        out = out.to(torch.promote_types(out.dtype, torch.float32)).square().mean()
    loss: Tensor = out
    return loss


def train(
    engine: ds_core.Engine,
    batches: Batches,
    steps: int | Sequence[int] = 3,
    *,
    loss: Loss = loss_of,
    direct: bool = False,
    mean: bool = True,
    after: Callable[[int], object] | None = None,
) -> list[float]:
    """Train some steps; the loss of each, averaged over its micro-batches.

    steps: their numbers, or how many from 0.
    direct: call ``loss.backward()``, not ``engine.backward(loss)``.
    mean: of all ranks, which every rank then calls; else of this rank's micro-batches alone.
    after: called with the number of each step when it is done.
    """
    from ds_core import comm

    gas = engine.gradient_accumulation_steps()
    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(gas):
            value = loss(engine, batches(step, micro * dp + index))
            if direct:
                value.backward()
            else:
                engine.backward(value)
            engine.step()
            total += value.detach().double().cpu() / gas
        if mean:
            # Ranks of one place on dp have the same loss, each counted as often as the others.
            comm.all_reduce(total)
            total /= comm.world_size()
        losses.append(total.item())
        if after is not None:
            after(step)
    return losses


def plain(
    model: nn.Module,
    batches: Batches,
    steps: int | Sequence[int] = 3,
    *,
    count: int = 1,
    clip: float = 0.0,
    optimizer: Mapping[str, Any] | Callable[[Any], torch.optim.Optimizer] = SGD,
    groups: Sequence[dict[str, Any]] | None = None,
    loss: Loss = loss_of,
    masters: bool = False,
    after: Callable[[int], object] | None = None,
) -> list[float]:
    """Train `model` with plain torch in this process, on what all ranks together see; the losses.

    count: micro-batches of a step, ``gas * dp``.
    optimizer: a config's section, of one of torch's own; or a function of parameter groups. Say
        ``weight_decay`` of AdamW: torch's default is not the engine's.
    groups: parameter groups; default one, of all trainable parameters.
    masters: keep weights in fp32 and compute with a bf16 copy, as mixed precision does. The model
        is in bf16 afterwards.
    after: called with the number of each step when it is done.
    """
    if groups is None:
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    kept: dict[nn.Parameter, nn.Parameter] = {p: p for p in model.parameters()}
    if masters:
        kept = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in kept}
        model.to(torch.bfloat16)
    stepper = _optimizer(
        optimizer, [{**g, "params": [kept[p] for p in g["params"]]} for g in groups]
    )
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        total = 0.0
        for index in range(count):
            value = loss(model, batches(step, index)) / count
            value.backward()
            total += value.item()
        losses.append(total)
        for param, master in kept.items():
            if master is not param and param.grad is not None:
                master.grad = param.grad.float()
                param.grad = None
        if clip:
            nn.utils.clip_grad_norm_([m for m in kept.values() if m.grad is not None], clip)
        stepper.step()
        stepper.zero_grad()
        with torch.no_grad():
            for param, master in kept.items():
                if master is not param:
                    param.copy_(master)
        if after is not None:
            after(step)
    return losses


def _optimizer(optimizer: Any, groups: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, Mapping):
        made: torch.optim.Optimizer = optimizer(groups)
        return made
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, optimizer["type"])
    return kind(groups, **optimizer.get("params", {}))


# -- what is compared ------------------------------------------------------------------------------


def whole_weights(engine: Any) -> dict[str, Any]:
    """Full weights by name, through what the partitioner would store in a checkpoint; slices as
    their wholes.

    In fp64, on the CPU. Collective: every rank calls it.
    """
    from ds_run_state import RunState
    from ds_run_state.slices import SLICES, Box

    from ds_core import comm

    slices = engine.ctx.stash.get(SLICES) or {}
    pieces: dict[str, list[Any]] = {}
    for state in RunState(engine).states():
        pieces.setdefault(state.name, []).append(state)
    whole = {}
    for info in engine.ctx.params.values():
        mine = pieces.get(f"module/{info.name}", [])
        # A rank may hold all of a parameter, some pieces of it, or none: ranks first agree on its
        # shape.
        along = slices[info.name].axes if info.name in slices else ()
        group = engine.ctx.mesh.group(*info.replicas, *along)
        shapes = comm.all_gather_json([list(p.shape) for p in mine], group=group)
        shape = torch.Size([p.shape for p in mine][0] if mine else next(s[0] for s in shapes if s))
        # Row 0 sums the values, row 1 counts them: replicas may store the same elements several
        # times, and dividing by the count gives the value again.
        sums = torch.zeros(2, shape.numel(), dtype=torch.float64)
        for piece in mine:
            box = piece.box or Box.whole(shape)
            local = torch.zeros(2, box.numel, dtype=torch.float64)
            local[0, piece.start : piece.stop] = piece.values().detach().reshape(-1).double()
            local[1, piece.start : piece.stop] = 1
            sums[0].view(shape)[box.slices()] += local[0].view(box.size)
            sums[1].view(shape)[box.slices()] += local[1].view(box.size)
        comm.all_reduce(sums, group=group)
        values, times = sums
        assert bool((times > 0).all()), f"no rank holds all of {info.name}"
        whole[info.name] = (values / times).view(shape)
    return whole


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(found: Any, wanted: Any, tolerance: float = 0.0, absolute: float | None = None) -> None:
    """Assert that numbers, tensors, lists or mappings of them, or parameters of modules are equal.

    The message has the name of the first that differs, and by how much. Dtypes may differ.

    tolerance: relative to the wanted value, and absolute where `absolute` says nothing else.
    """
    torch.testing.assert_close(
        _values(found),
        _values(wanted),
        rtol=tolerance,
        atol=tolerance if absolute is None else absolute,
        check_dtype=False,
    )


def difference(found: Any, wanted: Any) -> float:
    """The largest absolute difference of what `same` compares; nan where one of them is."""
    found = _values(found)
    wanted = _values(wanted)
    if isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys(), f"names differ: {found.keys() ^ wanted.keys()}"
        found = [found[name] for name in wanted]
        wanted = list(wanted.values())
    if isinstance(wanted, Sequence):
        pairs = zip(found, wanted, strict=True)
        return float(torch.tensor([0.0, *(difference(a, b) for a, b in pairs)]).max())
    found = torch.as_tensor(found)
    wanted = torch.as_tensor(wanted)
    assert found.shape == wanted.shape, f"{tuple(found.shape)}, not {tuple(wanted.shape)}"
    return float((found.detach() - wanted.detach()).abs().max()) if wanted.numel() else 0.0


def _values(given: Any) -> Any:
    return weights(given) if isinstance(given, nn.Module) else given


def relative(ours: Any, truth: Any) -> float:
    """The largest difference, as a part of the largest value of `truth`."""
    scale = max(float(truth.abs().max()), 1e-3) if truth.numel() else 1.0
    return float((ours.double() - truth.double()).abs().max()) / scale if truth.numel() else 0.0


# -- models of transformers ------------------------------------------------------------------------


def tiny(
    kind: str,
    *,
    seed: int = 0,
    auto: str = "AutoModelForCausalLM",
    experts: str = "",
    **config: Any,
) -> Any:
    """A small model of the transformers library, with random weights: nothing is downloaded.

    kind: the library's model type, such as "llama", "gpt2" or "mixtral".
    auto: the library's class that makes it.
    experts: the library's implementation of experts; "eager" has fp64.
    config: keys of the model's config, which override those of `TINY`.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    # Keys that this kind does not have would mislead those who read its config.
    known = transformers.AutoConfig.for_model(kind)
    sizes = {key: value for key, value in TINY.items() if hasattr(known, key)}
    settings = transformers.AutoConfig.for_model(kind, **sizes | config)
    if experts:
        settings._experts_implementation = experts
    torch.manual_seed(seed)
    return getattr(transformers, auto).from_config(settings)


TINY: Mapping[str, Any] = {
    "vocab_size": 66,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "use_cache": False,
}
"""Sizes of `tiny`'s models, under the library's common names."""
