"""Rules for models without a description: by the usual names of layers, where their widths agree."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from torch import nn

from ds_tensor_parallel.layers.linear import is_linear, widths
from ds_tensor_parallel.planning.rules import Kind, Rule, Rules

ROWS = {
    *(
        "o_proj",
        "out_proj",
        "down_proj",
        "c_proj",
        "dense_4h_to_h",
        "fc2",
        "fc_out",
        "w2",
        "wo",
        "o",
        "lin2",
        "out_lin",
    ),
    *("linear2", "output_proj", "proj_out"),
}
COLUMNS = {
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "q",
        "k",
        "v",
        "query",
        "key",
        "value",
        "q_lin",
        "k_lin",
        "v_lin",
        "q_attn",
    ),
    *("qkv_proj", "query_key_value", "c_attn", "Wqkv", "q_b_proj", "kv_b_proj"),
    *(
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "c_fc",
        "fc1",
        "fc_in",
        "dense_h_to_4h",
        "w1",
        "w3",
        "wi",
        "wi_0",
        "wi_1",
    ),
    *("lin1", "linear1"),
}
FUSED = {"c_attn": 3, "Wqkv": 3, "gate_up_proj": 2}
"""Columns in which equal matrices lie one after the other."""
ACTIVATIONS = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Tanh,
        nn.Sigmoid,
        nn.Hardswish,
        nn.ELU,
        nn.LeakyReLU,
    ),
    *(nn.Softplus, nn.Dropout, nn.Identity),
)
"""Modules that work on each element by itself."""


def guess(model: nn.Module, rows: Collection[str] = (), source: str = "heuristics") -> Rules:
    """Rules for the linear layers that are pairs: columns, and the row that reads their outputs.

    rows: ends of names of the layers that are rows, where the user says it.

    A layer that fits no pair has no rule.
    """
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    columns: dict[str, dict[str, nn.Module]] = defaultdict(dict)  # by the module around them
    for name, module in linears.items():
        if _is_column(name, rows):
            columns[_parent(name)][name] = module
    # Columns may be one module deeper than their row (BERT: attention.self.query,
    # attention.output.dense).
    above: dict[str, list[str]] = defaultdict(list)
    for parent in columns:
        above[_parent(parent)].append(parent)
    found: dict[str, Rule] = {}
    for name, module in linears.items():
        if not _is_row(name, rows):
            continue
        around = _parent(name)
        # Nearest first: beside the row, below its parent, below its grandparent.
        for place in (around, *above[around], *(above[_parent(around)] if around else ())):
            if pairs := _pair(columns.get(place, {}), widths(module)[0], source):
                found |= pairs | {name: Rule(Kind.ROW, source=source)}
                break
    return found | _plain_pairs(model, found, source)


def _pair(columns: Mapping[str, nn.Module], width: int, source: str) -> dict[str, Rule]:
    """Rules of the columns beside each other, if one of them gives a row its `width` inputs."""
    rules = {
        name: Rule(Kind.COLUMN, segments=FUSED.get(_last(name), 1), source=source)
        for name in columns
    }
    # A name proves nothing: at least one column must be as wide as the row expects.
    outs = {widths(module)[1] // FUSED.get(_last(name), 1) for name, module in columns.items()}
    outs |= {
        widths(module)[1] // 3
        for name, module in columns.items()
        if _last(name) == "query_key_value"
    }
    return rules if width in outs else {}


def _plain_pairs(model: nn.Module, known: Collection[str], source: str) -> dict[str, Rule]:
    """Modules of two linear layers, wide inside, with nothing between them but activations."""
    found: dict[str, Rule] = {}
    for name, module in model.named_modules():
        children = {f"{name}.{key}".lstrip("."): child for key, child in module.named_children()}
        linears = [key for key, child in children.items() if is_linear(child)]
        others = [child for key, child in children.items() if key not in linears]
        if (
            len(linears) != 2
            or any(key in known for key in linears)
            or not all(_elementwise(c) for c in others)
        ):
            continue
        (hidden, wide), (wide_in, out) = (widths(children[key]) for key in linears)
        # Wider inside than outside is the shape of an MLP; anything else may be two unrelated layers.
        if wide == wide_in and wide > hidden and hidden == out:
            found |= {
                linears[0]: Rule(Kind.COLUMN, source=source),
                linears[1]: Rule(Kind.ROW, source=source),
            }
    return found


def _elementwise(module: nn.Module) -> bool:
    own = any(True for _ in module.parameters()) or any(True for _ in module.children())
    return isinstance(module, ACTIVATIONS) or ("activation" in type(module).__module__ and not own)


def ends_with(name: str, end: str) -> bool:
    """Whether the last parts of the name of a module are `end`."""
    return name == end or name.endswith("." + end)


def _is_row(name: str, rows: Collection[str]) -> bool:
    if rows:
        return any(ends_with(name, end) for end in rows)
    if _last(name) == "dense":
        return _last(_parent(name)) != "intermediate"
    return _last(name) in ROWS


def _is_column(name: str, rows: Collection[str]) -> bool:
    if rows and _is_row(name, rows):
        return False
    return _last(name) in COLUMNS or (
        _last(name) == "dense" and _last(_parent(name)) == "intermediate"
    )


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return re.split(r"\.", name)[-1]
