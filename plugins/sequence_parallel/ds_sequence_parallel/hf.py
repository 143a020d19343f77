"""A transformers model whose sequences are divided over ranks, with no change to its code.

[Note: how it is done] A hook before the model's forward cuts the inputs. The model's attention
implementation is one that is registered with transformers for this run: its mask function builds no
mask of the part, but a `Part`, which has the mask of the full sequence and reaches each
attention as its ``attention_mask``, so that a block that is computed again finds it too; its
attention function exchanges heads (Ulysses) or goes round the ring. A model that does not use the
registry (Bloom) is given a cache, `GatheredKeys`, whose update gathers keys and values of the whole
sequence. The loss is divided by the number of tokens of all shards; see
`ds_sequence_parallel.losses`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ds_comm_autograd import gather_to, mean
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.errors import UsageError
from ds_sequence_parallel.attention.hf_attention import (
    Part,
    Tokens,
    attend_part,
    attend_whole,
    documents,
    make_part,
    plain_attention,
    plain_mask,
)
from ds_sequence_parallel.attention.layout import Layout

_ALONG = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "token_type_ids": 1,
    "labels": -1,
    "shift_labels": -1,
    "position_ids": -1,
}
"""Arguments of a transformers model, and the dimension of each that is the sequence."""
_LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}
"""transformers' losses that are a mean over tokens, and whether labels are those of the next token.
"""
IGNORED = -100
_names = itertools.count(1)


def argument_names(model: nn.Module) -> list[str]:
    """The arguments of the model's forward, by place, without the model itself."""
    return list(inspect.signature(model.forward).parameters)


def root_model(model: nn.Module) -> Any:
    """The outermost transformers model in `model`; None without one.

    UsageError where there are several.
    """
    base: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if base is not None else ():
        inner = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, base) and not inner:
            found[name] = module
    if len(found) > 1:
        raise UsageError(
            f"sequence_parallel: the model holds several transformers models ({', '.join(found)}); "
            "their inputs cannot be distinguished: cut them yourself, and use "
            "ds_sequence_parallel.DistributedAttention"
        )
    return next(iter(found.values()), None)


@dataclass(eq=False)
class _Inputs(Tokens):
    """The micro-batch that is on its way through the model."""

    items: Any = None
    """The divisor of this rank's loss: tokens of the full sequence / ranks."""
    labelled: bool = False
    """Whether there are labels, and so a loss."""
    losses: int = 0
    """Calls of the loss function."""
    attended: bool = False
    """Whether an attention was divided. No count: torch.compile would make a graph for each."""


class GatheredKeys:
    """Stands in for a model's cache: an attention that updates it gets the keys and values of the
    whole sequence.
    """

    recompute_safe = True
    """It keeps nothing, so a block may be computed again with it."""

    def __init__(self, inputs: _Inputs, group: ProcessGroup) -> None:
        self.inputs = inputs
        self.group = group

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, [batch, heads, positions, size], of all ranks. Collective."""
        self.inputs.attended = True
        sizes = self.inputs.layout.sizes
        return gather_to(key, self.group, 2, sizes), gather_to(value, self.group, 2, sizes)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this micro-batch."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of this rank's first token."""
        return self.inputs.layout.pieces(comm.rank(self.group))[0][0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys, and the position of the first."""
        return self.inputs.layout.length, 0


class ShardedModel:
    """The hooks of one transformers model; see the module.

    more: further arguments of the forward and the dimension of each that is cut; None for one that
    is left whole.
    """

    def __init__(
        self,
        model: Any,
        group: ProcessGroup,
        *,
        ring: bool,
        more: Mapping[str, int | None],
        heads_over: int = 1,
    ) -> None:
        self.model = model
        self.group = group
        self.rank = comm.rank(group)
        self.ranks = comm.world_size(group)
        self.more = more
        self.ring = ring

        # State.
        # Of the forward under way; None outside, and where the model runs undivided.
        self.inputs: _Inputs | None = None
        # The engine has ended; hooks of copies of the model then do nothing.
        self.closed = False
        self.copied = False

        # The model's forward and attention.
        parameters = inspect.signature(model.forward).parameters
        self.names = argument_names(model)
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.before: str = model.config._attn_implementation or "eager"
        self.registered = bool(getattr(model, "_supports_attention_backend", False))
        self._check_model()
        if self.registered:
            self._register()

        # Its loss function, which is replaced by one that divides by the tokens of all shards.
        self.loss: Any = None
        self.old_loss: Any = getattr(model, "loss_function", None)
        # The property loss_function stores under this name; a value that the user set is put back
        # by `close`.
        self.own_loss = {k: v for k, v in vars(model).items() if k == "_loss_function"}
        self.shifts = _LOSSES.get(getattr(self.old_loss, "__name__", ""))
        if callable(self.old_loss):
            model.loss_function = self.loss = self._over_all_shards(self.old_loss)
        self._handles = [
            model.register_forward_pre_hook(self.begin, with_kwargs=True),
            model.register_forward_hook(self.end, always_call=True),
        ]
        # Router logits are read between the base model and the loss, in the model's own forward.
        if (inner := getattr(model, "base_model", model)) is not model:
            self._handles.append(inner.register_forward_hook(self.join_routers))

    def _check_model(self) -> None:
        name = type(self.model).__name__
        # These models derive positions from tokens or masks, and would count a part from 0.
        own_positions = [
            m for m in self.model.modules() if hasattr(m, "create_position_ids_from_input_ids")
        ]
        self.needs_positions = bool(own_positions) or name.startswith("OPT")
        if self.registered:
            return
        if self.ring:
            raise UsageError(
                f"sequence_parallel.mode is ring, and {name} does not use transformers' attention "
                "functions; leave mode out"
            )
        if "past_key_values" not in self.names:
            raise UsageError(
                f"sequence_parallel: {name} neither uses transformers' attention functions nor has "
                "a cache of keys and values, so its attention cannot be divided"
            )

    def _register(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        # A name of its own per engine, so that several engines in one process do not meet.
        self.name = f"ds_sequence_parallel_{next(_names)}"
        AttentionInterface.register(self.name, self.attention)
        AttentionMaskInterface.register(self.name, self.mask)
        self.model.set_attn_implementation(self.name)

    def __deepcopy__(self, memo: Any) -> ShardedModel:
        """The hooks of a copy of the model are these; when the engine ends, it is an ordinary model
        as well.
        """
        self.copied = True
        return self

    def close(self) -> None:
        """Restore the model. Copies of it that were made meanwhile run undivided from now on."""
        for handle in self._handles:
            handle.remove()
        self.closed = True
        if self.registered:
            self.model.set_attn_implementation(self.before)
            self._unregister()
        own = self.model.__dict__
        if callable(self.old_loss) and own.get("_loss_function") is self.loss:
            own.pop("_loss_function")
            own.update(self.own_loss)

    def _unregister(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)
        # Copies of the model look attention up by this name: for them it is now the model's own.
        if self.copied:
            AttentionInterface.register(self.name, functools.partial(attend_whole, self.before))
            if (mask := plain_mask(self.before)) is not None:
                AttentionMaskInterface.register(self.name, mask)

    # -- inputs ------------------------------------------------------------------------------------

    def begin(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Cut the inputs; before the model's forward."""
        if self.closed:
            return None
        given = {**dict(zip(self.names, args)), **kwargs}  # noqa: B905 (the rest are defaults)
        given = {name: value for name, value in given.items() if value is not None}
        # Generation: each rank runs the full model.
        if given.get("use_cache") or "past_key_values" in given:
            self.inputs = None
            return None
        layout = self._layout(given)
        padding = given.pop("attention_mask", None)
        if padding is not None and (
            not isinstance(padding, Tensor) or padding.shape[1:] != (layout.length,)
        ):
            shown = tuple(padding.shape) if isinstance(padding, Tensor) else type(padding).__name__
            raise UsageError(
                "sequence_parallel: attention_mask must be [batch, sequence] with the "
                f"{layout.length} tokens of the whole sequence, and is {shown}"
            )
        positions = given.get("position_ids")
        segments = documents(positions) if padding is None else None
        self.inputs = inputs = _Inputs(layout, padding, segments, positions)
        self._labels(given, inputs)
        device = next(v.device for v in given.values() if isinstance(v, Tensor))
        if positions is None and "position_ids" in self.names:
            if self.needs_positions:
                raise UsageError(
                    f"sequence_parallel: {type(self.model).__name__} counts positions in its own "
                    "way; give it position_ids"
                )
            given["position_ids"] = torch.arange(layout.length, device=device).unsqueeze(0)
        self._cut(given, layout)
        # The full mask, also where there was none: else the model would look for documents in the
        # positions of its part.
        if self.registered:
            batch = self._batch(given)
            whole = (
                torch.ones(batch, layout.length, dtype=torch.bool, device=device)
                if padding is None
                else padding
            )
            given["attention_mask"] = whole.bool()
        else:
            self._gather_keys(given, inputs)
        if "use_cache" in self.names or self.takes_any:
            given["use_cache"] = False
        return (), given

    def _gather_keys(self, given: dict[str, Any], inputs: _Inputs) -> None:
        if inputs.segments is not None:
            raise UsageError(
                "sequence_parallel: packed sequences need transformers' attention functions, "
                f"which {type(self.model).__name__} does not use"
            )
        if inputs.padding is not None:
            given["attention_mask"] = inputs.padding
        given["past_key_values"] = GatheredKeys(inputs, self.group)

    def _layout(self, given: Mapping[str, Any]) -> Layout:
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is None:
            raise UsageError(
                "sequence_parallel: the model was called without input_ids and inputs_embeds"
            )
        return Layout(tokens.shape[1], self.ranks, self.ring)

    @staticmethod
    def _batch(given: Mapping[str, Any]) -> int:
        return int(given["input_ids" if "input_ids" in given else "inputs_embeds"].shape[0])

    def _labels(self, given: dict[str, Any], inputs: _Inputs) -> None:
        """Labels of the whole sequence: shifted where the loss is of the next token, and
        counted."""
        labels = given.get("labels")
        shifted = given.pop("shift_labels", None)
        items = given.pop("num_items_in_batch", None)
        if labels is None and shifted is None:
            return
        if self.shifts is None:
            raise UsageError(
                f"sequence_parallel: the loss of {type(self.model).__name__} is not known to be a "
                "mean over tokens; call the model without labels, and compute the loss with "
                "ds_sequence_parallel.token_mean"
            )
        if shifted is None:
            assert labels is not None
            shifted = (
                nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if self.shifts else labels
            )
        # Gradients are averaged over ranks, so each divides by the tokens of all / ranks; see
        # `losses`.
        items = (shifted != IGNORED).sum() if items is None else items
        inputs.items = items / self.ranks
        inputs.labelled = True
        given["labels"] = shifted
        if self.takes_any:
            given["num_items_in_batch"] = inputs.items
            if self.shifts:
                given["shift_labels"] = shifted

    def _cut(self, given: dict[str, Any], layout: Layout) -> None:
        along = {**_ALONG, **self.more}
        for name, value in given.items():
            dim = along.get(name)
            if isinstance(value, Tensor) and dim is not None:
                given[name] = layout.cut(value, self.rank, dim).contiguous()
            elif (
                isinstance(value, Tensor) and name not in along and layout.length in value.shape[1:]
            ):
                raise UsageError(
                    f"sequence_parallel: argument {name!r} of shape {tuple(value.shape)} may "
                    "belong to the tokens; say which "
                    'dimension is cut, or null for none: "sequence_parallel": {"inputs": '
                    f'{{"{name}": 1}}}}'
                )

    # -- attention ---------------------------------------------------------------------------------

    def mask(self, batch_size: int, q_length: Any, kv_length: int, **options: Any) -> Any:
        """transformers' mask function: a `Part`, or the usual mask where the model runs whole."""
        inputs = self.inputs
        if inputs is None:
            build = plain_mask(self.before)
            sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
            return None if build is None else build(**sizes, **options)
        return make_part(inputs, self.ring, self.before, batch_size, **options)

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: [batch, heads, positions, size] -> [batch, positions,
        heads, size].
        """
        if self.inputs is not None:
            self.inputs.attended = True
        # Outside of a divided forward: the model's own attention. With gradients it may be a block
        # that is computed again, whose mask is a `Part`.
        elif not isinstance(attention_mask, Part) and not torch.is_grad_enabled():
            return plain_attention(self.before, module)(
                module, query, key, value, attention_mask, **options
            )[0], None
        return attend_part(
            module, query, key, value, attention_mask, self.group, self.ring, self.before, options
        ), None

    # -- the loss ----------------------------------------------------------------------------------

    def _over_all_shards(self, function: Any) -> Any:
        """The model's loss function, divided by the tokens of all shards."""

        @functools.wraps(function)
        def loss(logits: Tensor, labels: Tensor | None = None, *args: Any, **options: Any) -> Any:
            if (inputs := self.inputs) is not None and inputs.labelled:
                inputs.losses += 1
                options = self.complete(labels, options)
            return function(logits, labels, *args, **options)

        return loss

    def complete(self, labels: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
        """Options of the loss function, also of a forward that takes no ``**kwargs`` and so passes
        on labels alone.
        """
        if (inputs := self.inputs) is None or not inputs.labelled:
            return options
        known = {"num_items_in_batch": inputs.items} | (
            {"shift_labels": labels} if self.shifts else {}
        )
        return options | {name: value for name, value in known.items() if options.get(name) is None}

    def join_routers(self, module: Any, args: Any, output: Any) -> None:
        """Give the model the router logits of all tokens: what it computes of them is no mean over
        shards.
        """
        inputs = self.inputs
        routers = getattr(output, "router_logits", None)
        if inputs is None or not routers:
            return
        batch = output.last_hidden_state.shape[0]
        sizes = inputs.layout.sizes

        def join(logits: Tensor) -> Tensor:
            parts = gather_to(logits.reshape(batch, -1, logits.shape[-1]), self.group, 1, sizes)
            whole = inputs.layout.in_order(parts, 1)
            return whole.flatten(0, 1) if logits.dim() == 2 else whole

        output.router_logits = tuple(join(r) if isinstance(r, Tensor) else r for r in routers)

    def end(self, module: Any, args: Any, output: Any) -> Any:
        """Show the mean over all shards; after the model's forward, also one that failed."""
        inputs = self.inputs
        self.inputs = None
        if inputs is None or output is None:
            return None
        # Each rank would have attended to its part alone, without an error.
        if not inputs.attended:
            raise UsageError(
                f"sequence_parallel: no attention of {type(self.model).__name__} was divided; is "
                "it one?"
            )
        # The placeholder for a cache is not returned to users.
        if not isinstance(output, tuple) and getattr(output, "past_key_values", None) is not None:
            output.past_key_values = None
        if not inputs.labelled:
            return output
        # A loss function that another transform installed may not call this one.
        if not inputs.losses and self.model.loss_function is self.loss:
            raise UsageError(
                f"sequence_parallel: {type(self.model).__name__} computes its loss itself, over "
                "this rank's tokens alone; call it without labels, and use ds_sequence_parallel.cross_entropy"
            )
        if isinstance(output, tuple):
            return mean(output[0], self.group), *output[1:]
        output.loss = mean(output.loss, self.group)
        return output
