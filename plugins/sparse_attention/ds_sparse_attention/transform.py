"""The transform: transformers models get another attention function, others have modules of ours."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_sparse_attention.attention import SparseAttention, SparseSelfAttention
from ds_sparse_attention.blocks import Allowed
from ds_sparse_attention.config import SparseAttentionConfig

if TYPE_CHECKING:
    from ds_core.context import Context

_names = itertools.count()


def make_sparse(model: nn.Module, ctx: Context) -> nn.Module:
    """Switch sparse attention on; raises UsageError where the model has no attention that could
    be."""
    config = ctx.config.section(SparseAttentionConfig)
    assert config is not None
    attention = SparseAttention(config)
    mine = [m for m in model.modules() if isinstance(m, SparseSelfAttention)]
    theirs = [m for m in model.modules() if _of_transformers(m)][:1]
    if config.different_layout_per_head and any(
        ctx.mesh.has(a) and ctx.mesh.size(a) > 1 for a in ("tp", "sp")
    ):
        raise UsageError(
            "sparse_attention.different_layout_per_head: heads are divided over ranks "
            "(tensor_parallel, sequence_parallel), and would get patterns of other heads; leave it out"
        )
    # A stage of a pipeline may have none; an error is raised on all ranks, or none.
    if not any(comm.all_gather_json(bool(mine or theirs))):
        raise UsageError(
            f"sparse_attention: {type(model).__name__} is no transformers model and has no "
            "ds_sparse_attention.SparseSelfAttention; use that module in its attention, or leave "
            "the section out"
        )
    for module in mine:
        if module.attention is None:
            module.attention = attention
            ctx.undo(functools.partial(setattr, module, "attention", None))
    for model_of_transformers in theirs:
        ctx.undo(Registered(model_of_transformers, attention).close)
    return model


def _of_transformers(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return hasattr(module, "set_attn_implementation") and hasattr(config, "_attn_implementation")


class Registered:
    """A transformers model whose attention function is ours."""

    def __init__(self, model: Any, attention: SparseAttention) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        name = type(model).__name__
        if not getattr(model, "_supports_attention_backend", False):
            raise UsageError(
                f"sparse_attention: {name} does not use transformers' attention functions"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise UsageError(
                f"sparse_attention: the decoder of {name} looks at another sequence, too; only "
                "models whose attention is that of a sequence to itself can be sparse"
            )
        self.model = model
        self.attend = attention
        self.before = model.config._attn_implementation or "eager"
        self.name = f"ds_sparse_attention_{next(_names)}"
        AttentionInterface.register(self.name, self.attention)
        AttentionMaskInterface.register(self.name, make_mask)
        model.set_attn_implementation(self.name)

    def close(self) -> None:
        """Give the model its own attention back."""
        from transformers import AttentionInterface, AttentionMaskInterface

        self.model.set_attn_implementation(self.before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """An attention function of transformers: [batch, heads, tokens, size] -> [batch, tokens,
        heads, size].
        """
        # Changes of the scores that torch's attention cannot make.
        for option in ("softcap", "s_aux", "position_bias", "head_mask"):
            if options.get(option) is not None:
                raise UsageError(
                    f"sparse_attention: {type(module).__name__} asks for {option}, which it "
                    "cannot do"
                )
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        mask = _limits(attention_mask, is_causal)
        options = {"causal": mask.causal, "allowed": mask.allowed, "first": mask.first}
        out = self.attend(query, key, value, dropout=dropout, scale=scaling, **options)
        return out.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, eq=False)
class Mask:
    """Stands for the mask of a micro-batch: rules over positions, read for blocks that are seen."""

    causal: bool
    allowed: Allowed | None = None
    first: int | None = None
    """The position of the first query among the keys; None: the queries are the last."""
    ndim: ClassVar[int] = 4
    """To transformers, which makes masks of static caches before it calls the model, it is like a
    mask of four dimensions."""

    def contiguous(self) -> Mask:
        """Itself."""
        return self


def make_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | Mask | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Mask:
    """A mask function of transformers."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if isinstance(attention_mask, Mask):
        return attention_mask
    if use_vmap:
        raise UsageError(
            "sparse_attention cannot use this model's own mask: it is not made of positions"
        )
    function: Any = causal_mask_function if mask_function is None else mask_function
    plain = function is causal_mask_function or function is bidirectional_mask_function
    padding = None if attention_mask is None else attention_mask.bool()
    # A static cache has more keys than there are tokens yet.
    if padding is not None and padding.ndim == 2 and padding.shape[1] < kv_length:
        padding = nn.functional.pad(padding, (0, kv_length - padding.shape[1]), value=False)
    # Nothing is padded: no mask at all. Inside a graph the values are not known.
    if padding is not None and not torch.compiler.is_compiling() and bool(padding.all()):
        padding = None
    if plain and padding is None:
        return Mask(function is causal_mask_function, None, q_offset)

    def allowed(sample: Tensor, q: Tensor, k: Tensor) -> Tensor:
        head = torch.zeros_like(sample)
        shown: Tensor = (
            torch.ones_like(k, dtype=torch.bool) if plain else function(sample, head, q, k)
        )
        return shown if padding is None else shown & padding[sample, k]

    return Mask(function is causal_mask_function, allowed, q_offset)


def _limits(mask: Any, is_causal: bool) -> Mask:
    """What transformers gives as the mask."""
    if mask is None:
        return Mask(is_causal)
    if isinstance(mask, Mask):
        return mask
    if (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.ndim == 4
        and mask.shape[1] == 1
    ):
        whole = mask[:, 0]
        seen = mask.shape[3] - mask.shape[2]

        def allowed(sample: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return whole[sample if len(whole) > 1 else torch.zeros_like(sample), q - seen, k]

        return Mask(False, allowed)
    raise UsageError(
        "sparse_attention: attention_mask must be [batch, tokens], or bool [batch, 1, tokens, "
        "tokens]"
    )
