"""The loader: equal shares, epochs, drop_last, containers, and going on at any batch."""

from __future__ import annotations

import pytest
import torch
from ds_testing import LoaderConformance, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from ds_core.engine import DistributedLoader, LoaderRequest, RepeatingLoader
from ds_core.errors import UsageError


def loader_of(dataset, batch_size, **options):
    return DistributedLoader(LoaderRequest(dataset, batch_size, **options))


class TestDistributedLoader(LoaderConformance):
    pads = True

    def samples_of(self, batch):
        return batch.tolist()


@given(st.integers(5, 40), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_ranks_share_every_epoch_fairly(length, replicas, drop_last, epoch):
    shares = []
    for index in range(replicas):
        loader = loader_of(range(length), 1, replicas=replicas, index=index, drop_last=drop_last)
        loader.set_epoch(epoch)
        shares.append([batch.item() for batch in loader])
    assert {len(s) for s in shares} == {len(loader)}
    seen = [i for share in shares for i in share]
    if drop_last:
        assert len(seen) == len(set(seen)) == length // replicas * replicas
    else:
        assert set(seen) == set(range(length))
        assert len(seen) - length < replicas


def test_set_epoch_keeps_a_position_within_it():
    """As a user's own loop calls it, also after a checkpoint was loaded."""
    loader = loader_of(list(range(12)), 3)
    epochs = [[b.tolist() for b in loader] for _ in range(3)]
    for epoch in (2, 0, 0, 1):
        loader.set_epoch(epoch)
        assert next(iter(loader)).tolist() == epochs[epoch][0]
    place = loader.state_dict()
    resumed = loader_of(list(range(12)), 3)
    resumed.load_state_dict(place)
    resumed.set_epoch(1)
    assert [b.tolist() for b in resumed] == epochs[1][1:]
    resumed.set_epoch(0)
    assert [b.tolist() for b in resumed] == epochs[0]


def test_epochs_shuffle_differently_and_reproducibly():
    loader = loader_of(list(range(20)), 5)
    first = [b.tolist() for b in loader]
    second = [b.tolist() for b in loader]
    assert first != second
    again = loader_of(list(range(20)), 5)
    assert [b.tolist() for b in again] == first


def test_iterating_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    list(loader_of(list(range(20)), 5))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
def test_a_loader_goes_on_where_it_stopped(stop):
    whole, part = (iter(RepeatingLoader(loader_of(list(range(16)), 4))) for _ in range(2))
    wanted = [next(whole).tolist() for _ in range(10)]
    assert [next(part).tolist() for _ in range(stop)] == wanted[:stop]
    resumed = loader_of(list(range(16)), 4)
    resumed.load_state_dict(part.loader.state_dict())
    rest = iter(RepeatingLoader(resumed))
    assert [next(rest).tolist() for _ in range(10 - stop)] == wanted[stop:]


def test_resuming_does_not_load_what_was_seen():
    touched = []

    class Data:
        def __len__(self):
            return 12

        def __getitem__(self, i):
            touched.append(i)
            return i

    loader = loader_of(Data(), 3)
    loader.load_state_dict({"epoch": 0, "batches": 3, "samples": 9})
    assert len(list(loader)) == 1
    assert len(touched) == 3


def test_position_carries_over_to_another_world_size():
    two = loader_of(list(range(32)), 2, replicas=2)
    it = iter(two)
    for _ in range(4):
        next(it)
    one = loader_of(list(range(32)), 4, replicas=1)
    one.load_state_dict(two.state_dict())
    assert len(list(one)) == 4


@pytest.mark.parametrize(
    ("sample", "check"),
    [
        (lambda i: torch.tensor([i, i]), lambda b: b.shape == (2, 2)),
        (lambda i: (torch.tensor(i), i), lambda b: len(b) == 2),
        (lambda i: {"x": torch.tensor(i), "name": str(i)}, lambda b: set(b) == {"x", "name"}),
    ],
)
def test_batches_of_any_shape(sample, check):
    (first, *_) = loader_of([sample(i) for i in range(4)], 2)
    assert check(first)


def test_collate_drop_last_and_workers():
    loader = loader_of(list(range(7)), 2, drop_last=True, collate_fn=sorted)
    assert len(loader) == 3
    assert all(isinstance(b, list) and len(b) == 2 for b in loader)
    assert len(loader_of(list(range(7)), 2)) == 4


def test_iterable_data_pass_through_and_resume():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    loader = loader_of(Stream(), 2)
    it = iter(loader)
    assert next(it).tolist() == [0, 1]
    other = loader_of(Stream(), 2)
    other.load_state_dict(loader.state_dict())
    assert [b.tolist() for b in other] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_errors_name_the_numbers():
    with pytest.raises(UsageError, match="empty"):
        loader_of([], 2)
    with pytest.raises(
        UsageError, match=r"3 samples, fewer than one batch of 4 on each of 1 ranks"
    ):
        loader_of([1, 2, 3], 4, drop_last=True)
    with pytest.raises(UsageError, match="batch_size is 0"):
        loader_of([1], 0)
    with pytest.raises(UsageError, match="is empty"):
        next(iter(RepeatingLoader([])))


def test_a_pass_left_early_is_followed_by_the_next_epoch():
    loader = loader_of(list(range(12)), 3)
    first = next(iter(loader)).tolist()
    second = next(iter(loader)).tolist()
    assert loader.epoch == 1
    assert first != second


def _shares_of_samples(stage: int) -> tuple[list[list[float]], int, float]:
    """What each of 4 ranks is given with an axis whose 2 ranks share samples, and the weight after
    a step.
    """
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
        "fake_axes": {"axes": {"sp": 2}},
        **({"zero_optimization": {"stage": stage}} if stage else {}),
    }
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    data = [torch.tensor([float(i)]) for i in range(4)]
    engine, _, loader, _ = ds_core.initialize(model=model, config=config, training_data=data)
    loader.set_epoch(0)
    given = []
    for batch in loader:
        given.append(batch.flatten().tolist())
        # As with a part of each sequence: ranks of one sample have gradients of their own, and the
        # mean counts.
        engine.backward(engine(batch).sum() * (2 * engine.ctx.mesh.index("sp")))
        engine.step()
    weight = float(engine.module.state_dict()["weight"].sum()) if stage < 3 else 0.0
    train = engine.ctx.batch.train
    engine.destroy()
    return given, train, weight


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_along_an_axis_with_the_same_batch_get_the_same_samples(stage):
    shares = run_ranks(4, _shares_of_samples, stage)
    (a, train, weight), (b, *_), (c, *_), (d, *_) = shares
    assert a == b
    assert c == d
    assert sorted(x for batch in a + c for x in batch) == [0.0, 1.0, 2.0, 3.0]
    assert train == 2
    # each sample's gradient once, averaged over the 2 samples of a step
    assert weight == -(0 + 1 + 2 + 3) / 2
