"""A base for optimizers of matrices: whoever inherits writes ``update`` and knows of no layout."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_core.errors import UsageError
from ds_optimizer_kit.exchange import MatrixExchange, Unit, group_alike, product_cost
from ds_optimizer_kit.layout import Layout
from ds_optimizer_kit.owned import OwnedStates
from ds_optimizer_kit.planning import ExchangeNeed, plan_exchange
from ds_optimizer_kit.splitting import split_alike

if TYPE_CHECKING:
    from ds_run_state.states import StateSource, StateTensor
    from ds_state_stores import StateStore
    from jaxtyping import Float

    from ds_core.partition import StepInputs

Group = dict[str, Any]

_NOT_HIDDEN = ("embed", "lm_head")
# "experts.up.weight" has the matrices of all experts, "experts.3.up.weight" that of one.
_STACK = re.compile(r"\bexperts\.(?!\d)")


class MatrixOptimizer(Optimizer):
    """Matrices by `update`, the rest by AdamW, under any layout.

    A group of matrices has ``matrices`` true (`split` makes it so by shape and name). States of a
    matrix's own shape are made by `prepare`, which works element by element on what this rank has;
    what it returns is brought to one rank per matrix, whole, and stacked by shape. States of any
    other shape are made by `update`, and stay with that rank.
    """

    takes_inputs = True

    def __init__(self, params: Any, defaults: Mapping[str, Any]) -> None:
        super().__init__(
            params,
            {
                "matrices": True,
                "stacked": 0,
                "weight_decay": 0.0,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                **defaults,
            },
        )
        self._layout: Layout | None = None
        self._store: StateStore | None = None
        self._exchange: tuple[list[int], MatrixExchange, OwnedStates] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, and of `load_state_dict`."""
        super().__setstate__(state)
        # A copy has tensors of its own, so it finds them anew.
        for name in ("_layout", "_store", "_exchange"):
            self.__dict__.setdefault(name, None)

    # -- what a subclass writes --------------------------------------------------------------------

    def prepare(self, group: Group, grad: Tensor, state: dict[str, Any]) -> Tensor:
        """Update the element-wise `state` from `grad`; what is to be transformed. Here: `grad`.

        grad: this rank's elements of one matrix's gradient, flat or in its shape.
        """
        return grad

    @abstractmethod
    def update(
        self,
        stack: Float[Tensor, "n rows columns"],
        group: Group,
        states: dict[str, Tensor],
        step: int,
    ) -> Float[Tensor, "n rows columns"]:
        """What to subtract of the matrices, times the learning rate, from what `prepare` gave.

        states: of these matrices, by any key but "step", [n, ...] each: what is put in is there
            again in the next update, also after a checkpoint in another layout. Empty in the first
            one.
        step: the number of this update of these matrices, from 1.
        """

    def cost(self, rows: int, columns: int) -> float:
        """What `update` takes for one matrix, in any unit: by this, matrices are shared out."""
        return product_cost(rows, columns)

    def planned_exchange(self, world: int, *, sharded: bool) -> ExchangeNeed:
        """What collecting takes on so many ranks, for ``dscore plan``; see `plan_exchange`."""
        stacked = {p: int(g["stacked"]) for p, g in self._groups().items()}
        return plan_exchange(shapes_of(stacked), world, self.cost, sharded=sharded)

    # -- checkpoints -------------------------------------------------------------------------------

    def owned_states(self) -> Iterable[StateTensor]:
        """The states that `update` has made here; see `ds_run_state.states.HasOwnedStates`."""
        return self._matrices(self._groups())[1].pieces()

    def load_owned_states(self, source: StateSource) -> None:
        """Take those of the matrices that are transformed here."""
        self._matrices(self._groups())[1].load(source)

    # -- single parameters; see `ds_access.HasWholeStates` -----------------------------------------

    def whole_state(self, param: Tensor, key: str) -> Tensor | None:
        """State `key` of the matrices in `param`; None where `update` has made none.

        Collective over the ranks that have parts or copies of the parameter.
        """
        groups = self._groups()
        if param not in groups:
            return None
        exchange, owned = self._matrices(groups)
        found = exchange.owners_of(param)
        return None if found is None else owned.whole(*found, key)

    def put_whole_state(self, param: Tensor, key: str, value: Tensor) -> None:
        """Make `value`, of the shape that `whole_state` gives, that state."""
        exchange, owned = self._matrices(self._groups())
        if (found := exchange.owners_of(param)) is not None:
            owned.put(found[1], key, value)

    # -- the step ----------------------------------------------------------------------------------

    def bind_layout(self, layout: Layout) -> None:
        """Where the tensors of this optimizer lie in full parameters; without it they are full."""
        self._layout = layout

    def step_in_parts(self, store: StateStore) -> None:
        """From now on `step` is given gradients of some parameters, then of others.

        The same ones on all ranks at once, until all that have a gradient are updated. Meanwhile
        the states that `update` has made of other matrices are in `store`.
        """
        self._store = store
        self._exchange = None

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, inputs: StepInputs | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; see `ds_core.partition.StepInputs`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = self._gradients(inputs)
        copies = self._copies(inputs)
        matrices = self._groups()
        having = [p for p in matrices if p in given]
        used = set(having) if self._layout is None else self._layout.used(having)
        # 1. What this rank has of each matrix. Where others have a gradient, none here is zero.
        values = {
            p: self.prepare(
                g, given[p] if p in given else torch.zeros_like(p), self.state[p]
            ).reshape(-1)
            for p, g in matrices.items()
            if p in used and p.numel()
        }
        exchange, owned = self._matrices(matrices)
        exchange.start(values, used)
        owned.expect(unit for unit in exchange.owned() if unit.tensor in used)
        # 2. While matrices are on their way: everything else.
        for group in self.param_groups:
            if not group["matrices"]:
                for param in group["params"]:
                    if param in given:
                        adamw(param, given[param], self.state[param], group)
        # 3. The matrices that this rank is to transform, and back.
        results: dict[Unit, Tensor] = {}
        for whole in exchange.finish():
            results.update(self._transform(whole, matrices, owned))
        for param, change in exchange.give_back(results).items():
            group = matrices[param]
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.sub_(group["lr"] * change.view(param.shape).to(param))
        for param, copy in copies.items():
            if param in given or param in used:
                copy.copy_(param)
        return loss

    def _gradients(self, inputs: StepInputs | None) -> dict[Tensor, Tensor]:
        """By parameter, in its dtype, unscaled and clipped."""
        params = [p for g in self.param_groups for p in g["params"]]
        grads: Sequence[Tensor | None] = [p.grad for p in params]
        scale = 1.0
        if inputs is not None:
            grads = grads if inputs.grads is None else inputs.grads
            scale = inputs.scale
        return {
            p: grad.to(p.dtype) if scale == 1 else grad.to(p.dtype) * scale
            for p, grad in zip(params, grads, strict=True)
            if grad is not None
        }

    def _copies(self, inputs: StepInputs | None) -> dict[Tensor, Tensor]:
        if inputs is None or inputs.copies is None:
            return {}
        params = [p for g in self.param_groups for p in g["params"]]
        pairs = zip(params, inputs.copies, strict=True)
        return {p: copy for p, copy in pairs if copy is not None}

    def _groups(self) -> dict[Tensor, Group]:
        """The group of each tensor of matrices."""
        return {p: g for g in self.param_groups if g["matrices"] for p in g["params"]}

    def _matrices(self, groups: Mapping[Tensor, Group]) -> tuple[MatrixExchange, OwnedStates]:
        ids = list(map(id, groups))
        if self._exchange is None or self._exchange[0] != ids:
            layout = Layout.local(groups) if self._layout is None else self._layout
            for param, group in groups.items():
                _check_matrices(layout.parts[param].shape, group["stacked"])
            stacked = {p: g["stacked"] for p, g in groups.items()}
            exchange = MatrixExchange(layout, stacked, self.cost)
            params = [p for g in self.param_groups for p in g["params"]]
            places = {param: place for place, param in enumerate(params)}
            self._exchange = (
                ids,
                exchange,
                OwnedStates(self, exchange.owned(), places, self._store),
            )
        return self._exchange[1:]

    def _transform(
        self,
        whole: Iterable[tuple[Unit, Tensor]],
        groups: Mapping[Tensor, Group],
        owned: OwnedStates,
    ) -> dict[Unit, Tensor]:
        """`update` of the matrices of each group, shape and number of updates at once."""

        def key(unit: Unit) -> tuple[int, tuple[int, int], int]:
            return id(groups[unit.tensor]), unit.rows_columns, owned.step(unit)

        found: dict[Unit, Tensor] = {}
        for members in group_alike(whole, key):
            units = [unit for unit, _ in members]
            group = groups[units[0].tensor]
            stack = torch.stack([matrix.reshape(unit.rows_columns) for unit, matrix in members])
            states = owned.stacked(units, stack)
            changes = self.update(stack, group, states, owned.step(units[0]))
            owned.keep(units, states)
            for (unit, _), change in zip(members, changes, strict=True):
                found[unit] = change.reshape(unit.shape)
        return found


def shapes_of(stacked: Mapping[Tensor, int]) -> list[tuple[int, int]]:
    """Rows and columns of each matrix in full parameters, of which so many dimensions number them."""
    return [
        (param.shape[count], math.prod(param.shape[count + 1 :]))
        for param, count in stacked.items()
        for _ in range(math.prod(param.shape[:count]))
    ]


def _check_matrices(shape: Sequence[int], stacked: int) -> None:
    if len(shape) - stacked < 2:
        raise UsageError(
            f"a parameter of shape {tuple(shape)} is in a group of matrices; give groups with "
            "matrices true and false (ds_optimizer_kit.matrix_optimizer.split makes them)"
        )


def adamw(param: Tensor, grad: Tensor, state: dict[str, Any], group: Group) -> None:
    """One step of AdamW (Loshchilov & Hutter 2019) in place."""
    beta1, beta2 = group["betas"]
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    state["step"] += 1
    count = float(state["step"])
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    size = group["lr"] / (1 - beta1**count)
    deviation = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.addcdiv_(state["exp_avg"], deviation, value=-size)


def split(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **others: Any
) -> list[Group]:
    """`split_here`, alike on all ranks; for ``OptimizerEntry(groups=...)``. Collective."""
    return split_alike(
        groups, lambda some: split_here(some, names), ("matrices", "stacked"), _matrices_first
    )


def split_here(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **others: Any
) -> list[Group]:
    """Each group as one of matrices and one of the rest, empty ones left out.

    Matrices have two dimensions or more and are neither embeddings nor the head, by name.
    """
    found: list[Group] = []
    for group in groups:
        kinds: dict[tuple[bool, int], list[Any]] = {}
        for param in group["params"]:
            name = names.get(param, "")
            stacked = stack_dims(param, name)
            matrices = is_matrix(param, name, stacked)
            kinds.setdefault((matrices, stacked if matrices else 0), []).append(param)
        for kind in sorted(kinds, key=_matrices_first):
            matrices, stacked = kind
            some = kinds[kind]
            found.append({**group, "params": some, "matrices": matrices, "stacked": stacked})
    return found


def _matrices_first(kind: Sequence[Any]) -> tuple[bool, int]:
    """The order of groups: matrices, then stacks of them, then the rest."""
    return not kind[0], kind[1]


def stack_dims(param: Tensor, name: str) -> int:
    """How many of the first dimensions number matrices: 1 for all experts in one parameter.

    The attribute ``stacked`` of the parameter says so, or its name.
    """
    said = getattr(param, "stacked", None)
    return int(_STACK.search(name) is not None) if said is None else int(said)


def is_matrix(param: Tensor, name: str, stacked: int = 0) -> bool:
    """Whether a parameter of the model, of this name, is a hidden matrix, or a stack of such."""
    # Of a parameter that is partitioned already, the full shape.
    dims = len(getattr(param, "ds_shape", param.shape)) - stacked
    return dims >= 2 and not param.is_complex() and not any(word in name for word in _NOT_HIDDEN)
