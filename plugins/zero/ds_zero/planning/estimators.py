"""How much memory the model states need under ZeRO: arithmetic and the printed tables (torch-free).

Model states are weights, gradients and Adam's moments; activations and temporaries come on top.
"live" functions count a model's parameters, "cold" ones take the counts as arguments. In the tables
1 GB is 2**30 bytes.

[Note: bytes per parameter] A half-precision weight takes 2 bytes and its gradient 2; in fp32
weight, gradient and the two moments take 4 each, 16 together. A process that builds the model in
fp32 on the host takes 4 more, so n processes of a machine take 4n: this is what `zero_init` saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

GB = 2**30


def count_params(model: nn.Module) -> tuple[int, int]:
    """Number of elements of all parameters, and of the module with the most direct parameters (not
    its children's).

    Parameters that share memory count once in the first number. Works on the meta device too. Call
    it before
    `initialize`: the parameters of a model under stage 3 are empty between its passes.
    """
    elements: dict[tuple[Any, ...], int] = {}
    for param in model.parameters():
        storage = param.untyped_storage()
        # On the meta device all pointers are 0, and only the storage object shows what is shared.
        place = (storage.data_ptr() or storage._cdata, param.storage_offset())
        elements[place] = max(elements.get(place, 0), param.numel())
    largest = max(
        sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
    )
    return sum(elements.values()), largest


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory per node, and of device memory per device, under stage 2.

    total_params: elements. cpu_offload: the optimizer's states are on the host.
    additional_buffer_factor: safety factor on the host memory. Raises ValueError when a number of
    devices or nodes is below 1.
    """
    devices = _devices(num_gpus_per_node, num_nodes)
    if cpu_offload:
        device = 2 * total_params
        host = total_params * max(4 * num_gpus_per_node, 16)
    else:
        device = 4 * total_params + 16 * total_params / devices
        host = total_params * 4 * num_gpus_per_node
    return int(host * additional_buffer_factor), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of host memory per node, of device memory per device, and how many of these the largest
    layer takes.

    total_params, largest_layer_params: elements. cpu_offload: the optimizer's states are on the
        host.
    cpu_offload_params: the weights are there too; they never are without the optimizer's states, so
        this has no effect when `cpu_offload` is False. zero_init: the model is sharded while it is
        built, and never complete on the host.
    additional_buffer_factor: safety factor on the host memory. Raises ValueError when a
        number of devices or nodes is below 1.
    """
    devices = _devices(num_gpus_per_node, num_nodes)
    # weights and gradients of the gathered layer, in half precision
    layer = int(4 * largest_layer_params)
    unsharded = 4 * num_gpus_per_node
    if cpu_offload:
        device, kept = (
            (layer, 18) if cpu_offload_params else (layer + int(2 * total_params / devices), 16)
        )
        share = kept / num_nodes
        host = total_params * (share if zero_init else max(unsharded, share))
    else:
        device = layer + int(18 * total_params / devices)
        host = (largest_layer_params if zero_init else total_params) * unsharded
    return int(host * additional_buffer_factor), device, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what stage 2 needs for `model`, with and without offload; see
    `estimate_zero2_model_states_mem_needs`.
    """
    total, _ = count_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what stage 2 needs, with and without offload; see
    `estimate_zero2_model_states_mem_needs`.
    """

    def rows() -> Iterator[tuple[int, int, str]]:
        for offload in (True, False):
            host, device = estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            )
            # "None" and not "none": this is how the documented table of stage 2 has it.
            yield host, device, f"offload_optimizer={'cpu' if offload else 'None'}"

    _print_table(f"{_millions(total_params)} total params.", num_gpus_per_node, num_nodes, rows())


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what stage 3 needs for `model`, for all options; see
    `estimate_zero3_model_states_mem_needs`.
    """
    total, largest = count_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what stage 3 needs, for all options; see `estimate_zero3_model_states_mem_needs`."""

    def rows() -> Iterator[tuple[int, int, str]]:
        for params, optimizer in ((True, True), (False, True), (False, False)):
            for init in (True, False):
                host, device, _ = estimate_zero3_model_states_mem_needs(
                    total_params,
                    largest_layer_params,
                    num_gpus_per_node,
                    num_nodes,
                    cpu_offload=optimizer,
                    cpu_offload_params=params,
                    zero_init=init,
                    additional_buffer_factor=additional_buffer_factor,
                )
                places = [f"{'cpu' if there else 'none':4}" for there in (params, optimizer)]
                options = (
                    f"offload_param={places[0]}, offload_optimizer={places[1]}, zero_init={init:d}"
                )
                yield host, device, options

    model = (
        f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest "
        "layer "
        "params."
    )
    _print_table(model, num_gpus_per_node, num_nodes, rows())


def _devices(num_gpus_per_node: int, num_nodes: int) -> int:
    """All devices."""
    for name, value in (("num_gpus_per_node", num_gpus_per_node), ("num_nodes", num_nodes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    return num_gpus_per_node * num_nodes


def _millions(params: float) -> str:
    return f"{int(params / 1e6)}M"


def _print_table(
    model: str, num_gpus_per_node: int, num_nodes: int, rows: Iterable[tuple[int, int, str]]
) -> None:
    """Print the heading and `rows` of (host bytes, device bytes, options); nothing when the rows
    raise.
    """
    lines = [
        f"{host / GB:8.2f}GB | {device / GB:6.2f}GB | {options}" for host, device, options in rows
    ]
    nodes = f"{num_nodes} {'node' if num_nodes == 1 else 'nodes'}"
    devices = f"{num_gpus_per_node} {'GPU' if num_gpus_per_node == 1 else 'GPUs'}"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes}, {devices} per node.")
    print(f"SW: Model with {model}")
    print("  per CPU  |  per GPU |   Options")
    print("\n".join(lines))
