from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import LoaderConformance

pytest.importorskip("ds_checkpoint")  # the kit saves and loads

LENGTHS = [3 + (7 * i) % 11 for i in range(50)]


def sampling(**keys: Any) -> dict[str, Any]:
    """The config of a run whose samples come by this section."""
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, **keys}}}


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample i has LENGTHS[i] tokens, each of them i + 1."""

    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(LENGTHS):
            raise IndexError(index)
        return {"input_ids": torch.full((LENGTHS[index],), index + 1)}


class TestFixed(LoaderConformance):
    config = sampling()
    pads = True

    def samples_of(self, batch: Any) -> list[int]:
        found: list[int] = batch.tolist()
        return found


class TestFixedWithoutTheLast(LoaderConformance):
    config = {**sampling(), "dataloader_drop_last": True}
    drops = True

    def samples_of(self, batch: Any) -> list[int]:
        found: list[int] = batch.tolist()
        return found

    def make_loader(
        self, engine: Any, replicas: int = 1, index: int = 0, dataset: Any = None
    ) -> Any:
        from dataclasses import replace

        from ds_core.engine import LoaderRequest

        request = replace(
            LoaderRequest(dataset or self.make_dataset(), self.micro),
            replicas=replicas,
            index=index,
        )
        return engine.ctx.plugins.driver(
            "ds_loader", ctx=engine.ctx, request=replace(request, drop_last=True)
        ).value


class ByTokens(LoaderConformance):
    pads = True  # where fewer samples are left than micro-batches in a step

    def make_dataset(self) -> Any:
        return Sentences()

    def all_samples(self) -> list[int]:
        return [i + 1 for i in range(len(LENGTHS))]

    def samples_of(self, batch: Any) -> list[int]:
        assert batch["input_ids"].numel() <= 40
        found: list[int] = batch["input_ids"][:, 0].tolist()
        return found


class TestByTokens(ByTokens):
    config = sampling(dynamic_batching={"enabled": True, "max_tokens": 40})


class TestByLength(ByTokens):
    config = sampling(
        dynamic_batching={
            "enabled": True,
            "max_tokens": 40,
            "max_batch_size": 6,
            "sequence_picking_order": "seqlen",
            "sequence_picking_window": 3,
        }
    )


class TestPacked(ByTokens):
    config = sampling(packing={"enabled": True, "row_tokens": 20})

    def samples_of(self, batch: Any) -> list[int]:
        ids = batch["input_ids"]
        positions = batch["position_ids"]
        assert ids.shape == (2, 20)
        found: list[int] = ids[(positions == 0) & (ids > 0)].tolist()
        return found


class TestMixed(LoaderConformance):
    config = sampling(mixing={"weights": {"few": 1, "many": 4}})
    pads = True
    drops = True

    def make_dataset(self) -> Any:
        return {"many": list(range(30)), "few": list(range(100, 120))}

    def test_making_and_loading_reads_nothing(self, engine: Any) -> None:
        class Unread:
            def __len__(self) -> int:
                return 30

            def __getitem__(self, index: int) -> int:
                raise AssertionError("a sample was read")

        loader = self.make_loader(engine, dataset={"few": Unread(), "many": Unread()})
        loader.load_state_dict(loader.state_dict())

    def all_samples(self) -> list[int]:
        return [*range(30), *range(100, 120)]

    def samples_of(self, batch: Any) -> list[int]:
        found: list[int] = batch.tolist()
        return found
