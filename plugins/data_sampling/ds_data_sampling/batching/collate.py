"""From samples of unequal length to tensors: padded to the longest, or packed into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ds_core.errors import UsageError

IGNORED = -100  # labels of this value do not count; torch's and transformers' default


class Padder:
    """Pads samples at the right, to the longest in the micro-batch.

    A sample is a tensor or list of numbers [tokens, ...], or a mapping or tuple of these and of
    what torch's `default_collate` takes. In a mapping, labels are filled up with -100,
    ``input_ids`` with `token`, and all else with 0; where ``input_ids`` are padded and there is no
    ``attention_mask``, one is made.
    """

    def __init__(self, token: int = 0) -> None:
        self.token = token

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch of `samples`."""
        first = samples[0]
        if isinstance(first, Mapping):
            return self._mapping(samples)
        if isinstance(first, tuple):
            return tuple(
                self._column(list(column), self.token) for column in zip(*samples, strict=True)
            )
        return self._column(samples, self.token)

    def _mapping(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        fill = {"input_ids": self.token, "labels": IGNORED}
        batch = {
            name: self._column([s[name] for s in samples], fill.get(name, 0)) for name in samples[0]
        }
        if "input_ids" in batch and "attention_mask" not in batch:
            lengths = torch.tensor([len(s["input_ids"]) for s in samples])
            width = batch["input_ids"].shape[1]
            if bool((lengths < width).any()):
                batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch

    def _column(self, values: Sequence[Any], fill: int) -> Any:
        tensors = [_tensor(value) for value in values]
        if (
            any(t is None or t.ndim == 0 for t in tensors)
            or len({t.shape for t in tensors if t is not None}) == 1
        ):
            return default_collate(list(values)) if tensors[0] is None else torch.stack(tensors)  # type: ignore[arg-type]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)  # type: ignore[arg-type]


class Packer:
    """Puts the samples of each row one after the other, and fills the row up to `tokens`.

    A sample is a tensor or list of token numbers, or a mapping with ``input_ids``, and perhaps
    ``labels`` and other values of one number per token. The batch has ``input_ids``, ``labels`` and
    ``position_ids`` [rows, tokens], and the others. Positions begin at 0 with each sample, which is
    how attention tells samples apart; no label leads from one sample to the next. What fills up is
    a sample of its own, without labels.

    truncate: a longer sample is cut.
    """

    def __init__(self, tokens: int, token: int = 0, *, truncate: bool = False) -> None:
        self.tokens = tokens
        self.token = token
        self.truncate = truncate

    def __call__(self, rows: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """The batch of `rows`, each of which is a list of samples."""
        made = [self._row([self._sample(sample) for sample in row]) for row in rows]
        return {name: torch.stack([row[name] for row in made]) for name in made[0]}

    def _sample(self, sample: Any) -> dict[str, Tensor]:
        given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
        if "input_ids" not in given:
            raise UsageError(
                "packing needs samples of token numbers, or mappings with input_ids; one has "
                f"{', '.join(given)}"
            )
        values = {name: torch.as_tensor(value) for name, value in given.items()}
        length = len(values["input_ids"])
        if (mask := values.pop("attention_mask", None)) is not None and not bool(mask.all()):
            raise UsageError(
                "packing: a sample's attention_mask hides tokens; give samples without padding"
            )
        for name, value in values.items():
            if value.shape != (length,):
                raise UsageError(
                    f"packing: a sample has {length} tokens, and {name!r} of shape "
                    f"{tuple(value.shape)}; it needs one "
                    "number per token (leave out others, or use dynamic_batching)"
                )
        if length > self.tokens:
            if not self.truncate:
                raise UsageError(f"packing: a sample has {length} tokens, and a row {self.tokens}")
            values = {name: value[: self.tokens] for name, value in values.items()}
            length = self.tokens
        labels = values.get("labels", values["input_ids"]).clone()
        labels[:1] = IGNORED
        return {**values, "labels": labels, "position_ids": torch.arange(length)}

    def _row(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        row = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        rest = self.tokens - len(row["input_ids"])
        fill = {"input_ids": self.token, "labels": IGNORED}
        for name, value in row.items():
            end = (
                torch.arange(rest)
                if name == "position_ids"
                else value.new_full((rest,), fill.get(name, 0))
            )
            row[name] = torch.cat([value, end])
        return row


class Rows:
    """A dataset whose items are rows of samples, for a list of indices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Sequence[int]) -> list[Any]:
        return [self.dataset[index] for index in indices]


Collate = Callable[[list[Any]], Any]


def _tensor(value: Any) -> Tensor | None:
    """`value` as a tensor where it is one or a list of numbers."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float)):
        return torch.tensor(value)
    return torch.as_tensor(value) if type(value).__module__ == "numpy" else None
