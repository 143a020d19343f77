"""The base of the 1-bit optimizers: which gradients a step uses, who averages them, masks, errors.

With an engine, its partitioner asks `takes_averages` and averages beforehand, overlapped with
backward. Without one (plain torch), give each rank's own gradients always: the optimizer then
averages them itself.

[Note: parameters without a gradient] Where gradients are each rank's own, one that is missing
counts as zero, so that all ranks exchange the same tensors. A parameter that had no gradient in the
whole warm-up has no variance, so it is not updated later either.

[Note: elements without variance] One sign bit cannot say zero. An element whose gradient was zero
in the whole warm-up (an unused row of an embedding) would get the scale of its tensor, divided by
eps; its momentum is kept at zero instead. ``exp_avg_mask`` in a parameter group, a tensor of the
parameter's shape, silences further elements.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.optim import Optimizer

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_optimizers.onebit.compress import Errors, Exchange, average_together, padded

if TYPE_CHECKING:
    from ds_optimizer_kit import Layout

log = logging.getLogger("ds_optimizers")

BACKENDS = ("nccl", "hccl", "compressed")
Work = list[tuple[Tensor, Tensor]]
"""Parameters of one group, each with the gradient that its step uses."""
# Kinds of errors: of the exchange of one parameter, and of a fused one that begins with it.
_EACH = "each"
_FUSED = "fused"
Kind = tuple[ProcessGroup | None, torch.dtype, torch.device]


def check_arguments(
    *, amsgrad: bool, max_grad_norm: float, deepspeed: Any, cuda_aware: bool, comm_backend_name: str
) -> None:
    """Check the arguments that all of the family accept and do not support (ValueError)."""
    if deepspeed is not None:
        log_once(
            log,
            logging.INFO,
            "deepspeed= of a 1-bit optimizer has no effect: the engine connects by itself",
        )
    if amsgrad:
        raise ValueError("amsgrad: the 1-bit family has no AMSGrad variant; leave it out")
    if max_grad_norm:
        raise ValueError(
            f"max_grad_norm {max_grad_norm}: clipping is the engine's; set gradient_clipping"
        )
    if cuda_aware:
        raise ValueError("cuda_aware is for MPI, which is not used here; leave it out")
    if comm_backend_name not in BACKENDS:
        raise ValueError(
            f"comm_backend_name {comm_backend_name!r}: messages go over the run's own process "
            f"groups, whatever their backend is; leave it out ({', '.join(BACKENDS)} are accepted "
            "and mean just that)"
        )


class OneBit(Optimizer):
    """Base of the family; see the module's notes.

    Satisfies `ds_optimizers.onebit.partitioner.ReducingOptimizer`.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # ``exp_avg_mask`` of the user's, by parameter.
        self._masks: dict[Tensor, Tensor] = {}
        # Which elements have a variance; None: all. See [Note: elements without variance].
        self._alive: dict[Tensor, Tensor | None] = {}
        # Errors of compression, by kind and parameter.
        self._errors: dict[tuple[str, Tensor], Errors] = {}
        self._exchanges: dict[ProcessGroup | None, Exchange] = {}
        # Set by an engine: the ranks that share a parameter. None: plain torch, all ranks.
        self._group_of: Callable[[Tensor], ProcessGroup | None] | None = None
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """UsageError: what it exchanges with other ranks cannot be copied."""
        raise UsageError(
            f"{type(self).__name__} cannot be copied or pickled; make a new one and give it "
            "state_dict() and rank_state_dict()"
        )

    # -- with the engine ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def takes_averages(self) -> bool:
        """Whether the next step wants gradients that are averaged over ranks.

        The same on all ranks.
        """

    def connect(self, group_of: Callable[[Tensor], ProcessGroup | None]) -> None:
        """An engine averages gradients when it should; `group_of` gives the ranks that share a
        parameter.
        """
        self._group_of = group_of

    def synchronize(self) -> None:
        """Make weights and states equal on all ranks.

        Collective. They always are, but for `ZeroOneAdam`.
        """

    def loaded(self) -> None:
        """States are those of a checkpoint now: compression begins with no errors, unless they are
        loaded next.
        """
        self._errors.clear()
        self._alive.clear()

    def rank_state_dict(self) -> dict[str, Any]:
        """The errors of compression on this rank, for a checkpoint: "<kind>.<group>.<position>" ->
        errors.
        """
        return {
            f"{kind}.{place}": {"worker": errors.worker, "server": errors.server}
            for place, param in self._places()
            for kind in (_EACH, _FUSED)
            if (errors := self._errors.get((kind, param))) is not None
        }

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `rank_state_dict` gave on this rank of as many."""
        for place, param in self._places():
            for kind in (_EACH, _FUSED):
                if (saved := state.get(f"{kind}.{place}")) is not None:
                    found = (saved[key].to(param.device, copy=True) for key in ("worker", "server"))
                    self._errors[kind, param] = Errors(*found)

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        for g, group in enumerate(self.param_groups):
            for p, param in enumerate(group["params"]):
                yield f"{g}.{p}", param

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """torch's; then `loaded`."""
        super().load_state_dict(dict(state_dict))
        self.loaded()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others in compressed exchanges."""
        return sum(e.sent for e in self._exchanges.values())

    @property
    def bytes_uncompressed(self) -> int:
        """What a ring all-reduce would have sent for the same tensors."""
        return sum(e.full for e in self._exchanges.values())

    # -- one step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collective where there are several ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """What `step` does."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; a mask (``exp_avg_mask``) is kept apart, since it is the user's and not part of
        a checkpoint.
        """
        group = dict(param_group)
        mask = group.pop("exp_avg_mask", None)
        super().add_param_group(group)
        if mask is not None:
            for param in self.param_groups[-1]["params"]:
                if mask.shape != param.shape:
                    raise ValueError(
                        f"exp_avg_mask has shape {tuple(mask.shape)}, its parameter "
                        f"{tuple(param.shape)}"
                    )
                self._masks[param] = mask

    def work(self) -> Iterator[tuple[dict[str, Any], Work]]:
        """Each group with the parameters that this step updates and their gradients, averaged if
        they should be.
        """
        averaged = self.takes_averages
        found = []
        for group in self.param_groups:
            rows: Work = []
            for param in group["params"]:
                grad = param.grad
                if grad is not None and grad.is_sparse:
                    raise UsageError(
                        f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} has a "
                        "sparse gradient, which the 1-bit family cannot compress; use nn.Embedding(sparse=False)"
                    )
                if param.is_complex():
                    raise UsageError(
                        f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} is "
                        f"{param.dtype}; complex numbers have no sign to send"
                    )
                # The engine has averaged: a gradient is there on all ranks or on none.
                if averaged and self._group_of is not None:
                    if grad is not None:
                        rows.append((param, grad))
                # Each rank's own: see [Note: parameters without a gradient].
                elif averaged or self.state.get(param):
                    if param.requires_grad or grad is not None:
                        rows.append((param, torch.zeros_like(param) if grad is None else grad))
            found.append((group, rows))
        if averaged and self._group_of is None:
            self.mean([pair for _, rows in found for pair in rows])
        return iter(found)

    def begin_state(self, param: Tensor, *extra: str) -> dict[str, Any]:
        """The state of `param`: step, exp_avg, exp_avg_sq and `extra`, zero at first."""
        state: dict[str, Any] = self.state[param]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in ("exp_avg", "exp_avg_sq", *extra):
                state[key] = torch.zeros_like(param)
        return state

    # -- between ranks -----------------------------------------------------------------------------

    def _kinds(self, pairs: Work) -> dict[Kind, Work]:
        kinds: dict[Kind, Work] = {}
        for param, tensor in pairs:
            group = None if self._group_of is None else self._group_of(param)
            kinds.setdefault((group, tensor.dtype, tensor.device), []).append((param, tensor))
        return kinds

    def _exchange(self, group: ProcessGroup | None) -> Exchange:
        if group not in self._exchanges:
            self._exchanges[group] = Exchange(group)
        return self._exchanges[group]

    def compress(self, pairs: Work) -> None:
        """Replace the tensors by their compressed average, each with a scale of its own.

        Collective.
        """
        for (group, _, _), members in self._kinds(pairs).items():
            exchange = self._exchange(group)
            if exchange.ranks == 1:
                continue
            errors = [self._errors_of(_EACH, p, t, exchange.ranks) for p, t in members]
            exchange.average([t for _, t in members], errors)

    def compress_fused(self, pairs: Work, layout: Layout) -> None:
        """The same with one scale for all tensors of the model, also those that ranks along other
        axes have, as if they were one tensor. Collective over the world.

        Tensors that lie alike are one flat tensor. A tied one is by itself, so that all stages that
        have it give its elements to the same servers.
        """
        flats: list[tuple[Tensor, Tensor, Work]] = []
        exchanges = []
        for (group, _, _), members in self._kinds(pairs).items():
            exchange = self._exchange(group)
            if exchange.ranks == 1:
                continue
            found = [(alike[0][0], _flat(alike), alike) for alike in _alike(members, layout)]
            errors = [self._errors_of(_FUSED, p, flat, exchange.ranks) for p, flat, _ in found]
            exchanges.append(exchange.rounds([flat for _, flat, _ in found], errors))
            flats += found

        def one_scale(views: list[list[Tensor]]) -> list[Tensor]:
            """The root mean square over the model."""
            each = itertools.chain(*views)
            sizes = {
                first: torch.stack([v.double().square().sum(), v.new_tensor(v.numel()).double()])
                for (first, _, _), v in zip(flats, each, strict=True)
            }
            square, count = layout.over_model(sizes, 2)
            root = (square / count.clamp(min=1)).sqrt()
            return [root.to(v[0]).repeat(len(v)) for v in views]

        average_together(exchanges, one_scale)
        for _, flat, alike in flats:
            _part(flat, alike)

    def _errors_of(self, kind: str, param: Tensor, tensor: Tensor, ranks: int) -> Errors:
        """The errors kept under `param`; none lost yet, if there are none or they are of another
        size or dtype.
        """
        found = self._errors.get((kind, param))
        if found is None or (found.worker.numel(), found.worker.dtype) != (
            padded(tensor.numel(), ranks),
            tensor.dtype,
        ):
            found = self._errors[kind, param] = Errors.of(tensor, ranks)
        return found

    def mean(self, pairs: Work) -> None:
        """Replace the tensors by their average in full precision. Collective."""
        for group, _, flat in self._together(pairs):
            comm.all_reduce(flat, op=torch.distributed.ReduceOp.AVG, group=group)

    def equalize(self, pairs: Work) -> None:
        """Replace the tensors, which differ by rounding, by those of the first rank. Collective."""
        for group, _, flat in self._together(pairs):
            comm.broadcast(flat, get_process_group_ranks(group)[0], group)

    def _together(self, pairs: Work) -> Iterator[tuple[ProcessGroup | None, Tensor, Tensor]]:
        """Where there are other ranks: group, first parameter, and the tensors as one, whose values
        are copied back afterwards.
        """
        for (group, _, _), members in self._kinds(pairs).items():
            if comm.world_size(group) > 1:
                # One collective per kind of tensors instead of one per tensor.
                flat = _flat(members)
                yield group, members[0][0], flat
                _part(flat, members)

    # -- arithmetic --------------------------------------------------------------------------------

    def mask(self, pairs: Work) -> None:
        """Silence elements that may not move; see [Note: elements without variance]."""
        for param, tensor in pairs:
            if param not in self._alive:
                alive = self.state[param]["exp_avg_sq"] > 0
                self._alive[param] = None if bool(alive.all()) else alive
            found = self._alive[param]
            if found is not None:
                tensor.mul_(found)
            if (given := self._masks.get(param)) is not None:
                tensor.mul_(given.to(tensor))

    def variance_changed(self) -> None:
        """Variances moved, so which elements have one is to be found anew."""
        self._alive.clear()


def _flat(members: Work) -> Tensor:
    """The tensors as one."""
    return torch.cat([t.reshape(-1) for _, t in members])


def _part(flat: Tensor, members: Work) -> None:
    """Write the values of `flat` into the tensors."""
    for (_, tensor), piece in zip(
        members, flat.split([t.numel() for _, t in members]), strict=True
    ):
        tensor.copy_(piece.view(tensor.shape))


def _alike(members: Work, layout: Layout) -> list[Work]:
    """Those of which the same ranks have other parts, together; each tied one alone."""
    found: dict[tuple[Any, ...], Work] = {}
    for param, tensor in members:
        part = layout.parts[param]
        found.setdefault((part.held, part.name if part.tied else ""), []).append((param, tensor))
    return list(found.values())


def denominator(variance: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The divisor of momentum: √v + eps, or √(v + eps)."""
    eps: float = group["eps"]
    return (variance + eps).sqrt_() if group["eps_inside_sqrt"] else variance.sqrt().add_(eps)
