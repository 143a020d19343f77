"""From what a program gave to the output of its model, by the model's own code.

A model that is more than its base (a classifier, an encoder's language model head) runs its own
forward with the base model replaced by one that returns what the program gave. The replacement is
in a shallow copy, which shares all other modules; the model itself is not changed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def finisher(model: Any, base: Any, logits: bool) -> Callable[..., Any]:
    """The function (output of the program, keywords of forward) -> output of `model`.

    logits: the program gave them.
    """
    outputs = importlib.import_module("transformers.modeling_outputs")
    if logits:
        return lambda given, **keywords: _make_causal(model, outputs, given, **keywords)
    if model is base:
        return lambda given, **keywords: _make_hidden(
            base, outputs, given, keywords.get("return_dict")
        )
    given_base = _Given(base, outputs)
    # A shallow copy with another table of modules: all else, parameters included, is the model's.
    head = copy.copy(model)
    head.__dict__["_modules"] = {
        name: given_base if module is base else module for name, module in model._modules.items()
    }
    return lambda given, **keywords: given_base.then(head, given, keywords)


def _make_causal(
    model: Any, outputs: Any, given: Tensor, labels: Tensor | None = None, **keywords: Any
) -> Any:
    """The logits, and the loss where there are labels."""
    loss = None
    if labels is not None:
        more = {
            name: keywords[name]
            for name in ("num_items_in_batch", "shift_labels")
            if name in keywords
        }
        loss = model.loss_function(given, labels, vocab_size=model.config.vocab_size, **more)
    out = outputs.CausalLMOutputWithPast(loss=loss, logits=given)
    return _shape(out, model.config, keywords.get("return_dict"))


def _make_hidden(base: Any, outputs: Any, given: Tensor, return_dict: bool | None) -> Any:
    """The last hidden states, and what a pooler makes of them."""
    pooler = getattr(base, "pooler", None)
    if "pooler" in base._modules:
        pooled = None if pooler is None else pooler(given)
        kind = outputs.BaseModelOutputWithPoolingAndCrossAttentions
        return _shape(kind(last_hidden_state=given, pooler_output=pooled), base.config, return_dict)
    return _shape(
        outputs.BaseModelOutputWithPast(last_hidden_state=given), base.config, return_dict
    )


def _shape(output: Any, config: Any, return_dict: bool | None) -> Any:
    wanted = config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


class _Given(nn.Module):
    """Stands for a base model whose output is known."""

    def __init__(self, base: Any, outputs: Any) -> None:
        super().__init__()
        # Not as submodules: the base would be registered a second time.
        self.__dict__.update(_base=base, _outputs=outputs, _given=None)

    def then(self, head: nn.Module, given: Tensor, keywords: dict[str, Any]) -> Any:
        """What `head` makes of `given`."""
        self.__dict__["_given"] = given
        try:
            return head(**keywords)
        finally:
            # The output must not live until the next call.
            self.__dict__["_given"] = None

    def forward(self, *_: Any, return_dict: bool | None = None, **__: Any) -> Any:
        """The output of the base model."""
        return _make_hidden(self._base, self._outputs, self._given, return_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)
