"""Sends activations and gradients between stages, asynchronously; shapes are sent only when they
are new.

[Note: channels] Messages are sent over several groups along pp, chosen so that on each of them a
rank only sends to one peer or only receives from one. So messages are received in the order in
which they were sent, whatever else is under way, and no backend can block one behind another (NCCL
carries out what is asked of a group one after the other).

[Note: shapes] A stage's outputs have the shapes of the last batch unless the model's inputs have
changed. Only then, and always for models with ``dynamic_shape``, a header is sent before the
message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.context import Context

HEADER = 256
"""Numbers in a header; enough for some 30 tensors."""
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class Meta(NamedTuple):
    """Description of a message: per tensor (shape, dtype, whether its gradient is sent back);
    whether it is a tuple.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    is_tuple: bool


class Incoming(NamedTuple):
    """A message that will be received.

    kind: "act" or "grad"; part: the part of the model that it is for.
    """

    kind: str
    part: int


def describe(tensors: Sequence[Tensor], is_tuple: bool) -> Meta:
    """The meta of outputs."""
    return Meta(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), is_tuple)


class StageTransport:
    """This stage's messages. Made on all ranks together.

    stages, chunks: of the pipeline.
    split: whether tensor-parallel ranks send shares of activations, of gradients.
    """

    def __init__(
        self, ctx: Context, stages: int, stage: int, chunks: int, split: tuple[bool, bool]
    ) -> None:
        self._stages = stages
        self._stage = stage
        self._device = ctx.accelerator.current_device()
        mesh = ctx.mesh

        # -- The peers.

        # The ranks of this pipeline, by stage.
        self._column = mesh.ranks("pp")
        # By name, see [Note: channels].
        self._groups = _channels(ctx, stages, chunks)
        # The group of tensor-parallel ranks, and this rank's place in it.
        self._tp = mesh.group("tp") if mesh.has("tp") else None
        count = mesh.size("tp") if mesh.has("tp") else 1
        self._tp_place = (mesh.index("tp"), count) if count > 1 else (0, 1)
        # Tensor-parallel ranks have equal activations: whether each sends a share of a message, which
        # the receivers gather.
        self._share = {"act": split[0] and count > 1, "grad": split[1] and count > 1}

        # -- The messages.

        # Shapes of what a part receives, by (whether gradients are needed, part). See [Note:
        # shapes].
        self._known: dict[tuple[bool, int], Meta] = {}
        # With one stage, what its chunks give to each other.
        self._local: dict[str, deque[tuple[Meta, list[Tensor]]]] = {"act": deque(), "grad": deque()}
        self.begin((), train=True, headers="none", most=1)

    def begin(self, incoming: Iterable[Incoming], *, train: bool, headers: str, most: int) -> None:
        """A batch begins.

        incoming: what will be received, in order.
        headers: "none", "first" (per part) or "each".

        most: messages of a kind that may be under way at a time.
        """
        self._train = train
        self._headers = headers
        self._most = most
        self._wants: dict[str, deque[Incoming]] = {"act": deque(), "grad": deque()}
        for want in incoming:
            self._wants[want.kind].append(want)
        # Parts whose header was sent in this batch.
        self._told: set[int] = set()
        # Parts whose header was received in this batch.
        self._heard: set[int] = set()
        # Per kind the messages that are being sent, with their tensors, the oldest first.
        self._sending: dict[str, deque[list[tuple[Any, Tensor]]]] = {
            "act": deque(),
            "grad": deque(),
        }
        # By kind, the messages whose receipt has begun, in their order.
        self._posted: dict[str, deque[tuple[Meta, list[_Arriving]]]] = {
            "act": deque(),
            "grad": deque(),
        }
        for queue in self._local.values():
            queue.clear()
        # The first messages are received while this stage loads its micro-batches.
        for kind in ("act", "grad"):
            self._post(kind)

    # -- sending -----------------------------------------------------------------------------------

    def send_activation(self, part: int, tensors: Sequence[Tensor], is_tuple: bool) -> Meta:
        """Send the outputs that are the input of `part`; their meta."""
        meta = describe(tensors, is_tuple)
        key = (self._train, part)
        if self._stages == 1:
            self._local["act"].append((meta, [t.detach() for t in tensors]))
            return meta
        flat = [self._outgoing(tensor, "act") for tensor in tensors]
        if self._headers == "each" or (self._headers == "first" and part not in self._told):
            flat.insert(0, _header(meta).to(self._device))
            self._known[key] = meta
            self._told.add(part)
        elif self._known[key] != meta:
            raise UsageError(
                f"stage {self._stage} gives {_shown(meta)}, and gave {_shown(self._known[key])} "
                "before, for inputs "
                "of the same shapes; call engine.reset_activation_shape() before the batch on "
                "every rank when the "
                "model has changed, build the PipelineModule with dynamic_shape=True when the "
                "shapes depend on values"
            )
        self._send(flat, "act", part)
        return meta

    def send_gradient(self, part: int, grads: Sequence[Tensor]) -> None:
        """Send the gradients of `part`'s outputs that want one."""
        if self._stages == 1:
            self._local["grad"].append((Meta((), False), list(grads)))
            return
        self._send([self._outgoing(grad, "grad") for grad in grads], "grad", part)

    def _outgoing(self, tensor: Tensor, kind: str) -> Tensor:
        flat = _bytes(tensor.detach())
        place, count = self._tp_place
        if self._share[kind] and _divides(count, tensor):
            flat = flat.view(count, -1)[place]
        return flat

    def _send(self, message: Sequence[Tensor], kind: str, part: int) -> None:
        """Begin to send.

        Tensors are kept until they have gone, which waits for the oldest when there are many.
        """
        target = self._column[part % self._stages]
        group = self._groups[_channel(kind, self._stage, self._stages)]
        sending = self._sending[kind]
        sending.append(
            [
                (_named(kind, comm.isend, flat, target, group), flat)
                for flat in message
                if flat.numel()
            ]
        )
        # That this ends, whatever other stages wait for, has been proved: see `StagePlans`.
        while len(sending) > self._most:
            _wait(sending.popleft())

    def finish(self) -> None:
        """Wait for all sends."""
        for sending in self._sending.values():
            while sending:
                _wait(sending.popleft())

    # -- receiving ---------------------------------------------------------------------------------

    def receive_activation(self, part: int) -> tuple[Meta, list[Tensor]]:
        """The input of `part`, in schedule order."""
        if self._stages == 1:
            return self._local["act"].popleft()
        return self._receive("act", part, None)

    def receive_gradient(self, part: int, outputs: Meta) -> list[Tensor]:
        """The gradients of `part`'s outputs that want one."""
        if self._stages == 1:
            return self._local["grad"].popleft()[1]
        return self._receive("grad", part, outputs)[1]

    def _receive(self, kind: str, part: int, outputs: Meta | None) -> tuple[Meta, list[Tensor]]:
        if self._posted[kind]:
            meta, arriving = self._posted[kind].popleft()
        else:
            want = self._wants[kind].popleft()
            assert want.part == part, (want, part)
            meta = outputs if outputs is not None else self._meta(part)
            arriving = self._start(kind, part, meta)
        tensors = [a.wait() for a in arriving]
        # The next message travels while this one is computed with.
        self._post(kind)
        return meta, tensors

    def _post(self, kind: str) -> None:
        """Begin to receive what comes next, if its shapes are known."""
        incoming = self._wants[kind]
        if not incoming or self._headers == "each":
            return
        part = incoming[0].part
        if kind == "act":
            ready = self._headers == "none" or part in self._heard
            meta = self._known.get((self._train, part)) if ready else None
        else:
            # Gradients have the shapes of this stage's own outputs, the input of the next part.
            ready = self._headers == "none" or part + 1 in self._told
            meta = self._known.get((self._train, part + 1)) if ready else None
        if meta is not None:
            incoming.popleft()
            self._posted[kind].append((meta, self._start(kind, part, meta)))

    def _meta(self, part: int) -> Meta:
        if self._headers == "each" or (self._headers == "first" and part not in self._heard):
            header = torch.empty(HEADER * 8, dtype=torch.uint8, device=self._device)
            _named("act", comm.irecv, header, *self._source("act", part)).wait()
            self._known[self._train, part] = _read_header(header.view(torch.int64).tolist())
            self._heard.add(part)
        return self._known[self._train, part]

    def _start(self, kind: str, part: int, meta: Meta) -> list[_Arriving]:
        source, group = self._source(kind, part)
        return [
            _Arriving(self, kind, shape, dtype, source, group)
            for shape, dtype, wants_grad in meta.tensors
            if kind == "act" or wants_grad
        ]

    def _source(self, kind: str, part: int) -> tuple[int, Any]:
        """The rank that sends a message for `part`, and the channel."""
        stage = (part - 1 if kind == "act" else part + 1) % self._stages
        return self._column[stage], self._groups[_channel(kind, stage, self._stages)]


class _Arriving:
    """A tensor on its way here."""

    def __init__(
        self,
        owner: StageTransport,
        kind: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        source: int,
        group: Any,
    ) -> None:
        self._whole = torch.empty(shape, dtype=dtype, device=owner._device)
        place, count = owner._tp_place
        self._group = owner._tp if owner._share[kind] and _divides(count, self._whole) else None
        flat = self._whole.view(-1).view(torch.uint8)
        self._into = flat.view(count, -1)[place].clone() if self._group is not None else flat
        self._work = _named(kind, comm.irecv, self._into, source, group) if flat.numel() else None

    def wait(self) -> Tensor:
        """The tensor."""
        if self._work is not None:
            self._work.wait()
            if self._group is not None:
                comm.all_gather_into_tensor(
                    self._whole.view(-1).view(torch.uint8), self._into, group=self._group
                )
        return self._whole


def _named(kind: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Start a message, and say what it is."""
    comm.label("activations" if kind == "act" else "gradients of activations")
    return call(*arguments)


def _wait(message: Iterable[tuple[Any, Tensor]]) -> None:
    for work, _ in message:
        work.wait()


def _channel(kind: str, source: int, stages: int) -> str:
    """The group over which stage `source` sends; even and odd stages have different ones, the way
    round the end too.
    """
    wraps = source == (stages - 1 if kind == "act" else 0)
    return f"{kind} wrap" if wraps else f"{kind} {source % 2}"


def _channels(ctx: Context, stages: int, chunks: int) -> dict[str, Any]:
    """Groups along pp, one of them the mesh's own. Collective."""
    mesh = ctx.mesh
    if stages == 1:
        return {}
    names = {_channel(kind, source, stages) for kind in ("act", "grad") for source in range(stages)}
    # Only with several chunks does the last stage send to the first one.
    if chunks == 1:
        names -= {"act wrap", "grad wrap"}
    found: dict[str, Any] = {"act 0": mesh.group("pp")}
    return found | {name: mesh.own_group("pp") for name in sorted(names - set(found))}


def _divides(count: int, tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.numel() % count == 0


def _bytes(tensor: Tensor) -> Tensor:
    """`tensor` as flat bytes, which every backend can send."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _header(meta: Meta) -> Tensor:
    numbers = [len(meta.tensors), int(meta.is_tuple)]
    for shape, dtype, wants_grad in meta.tensors:
        numbers += [DTYPES.index(dtype), int(wants_grad), len(shape), *shape]
    if len(numbers) > HEADER:
        raise UsageError(
            f"a stage gives {len(meta.tensors)} tensors, too many to describe; pack some into one"
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64).view(
        torch.uint8
    )


def _read_header(numbers: list[int]) -> Meta:
    count = numbers[0]
    is_tuple = bool(numbers[1])
    at = 2
    tensors = []
    for _ in range(count):
        dtype, wants_grad, dims = numbers[at : at + 3]
        tensors.append((tuple(numbers[at + 3 : at + 3 + dims]), DTYPES[dtype], bool(wants_grad)))
        at += 3 + dims
    return Meta(tuple(tensors), is_tuple)


def _shown(meta: Meta) -> str:
    """For messages; a star where the gradient is wanted."""
    return (
        ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}{'*' * w}" for s, d, w in meta.tensors)
        or "nothing"
    )
