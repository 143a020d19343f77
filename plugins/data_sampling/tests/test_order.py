from __future__ import annotations

from ds_data_sampling.batching.order import Order, Shuffled

from ds_core.engine import DistributedLoader, LoaderRequest


def epoch(order: Order, number: int, chunk: int) -> list[int]:
    order.start(number)
    found: list[int] = []
    while more := order.take(chunk, len(found)):
        found += more
    return found


def test_the_shuffled_order_is_that_of_the_cores_loader() -> None:
    plain = DistributedLoader(LoaderRequest(range(23), 1, seed=5))
    for number in range(3):
        expected = [int(batch) for batch in plain]
        assert sorted(expected) == list(range(23))
        assert all(epoch(Shuffled(23, 5), number, chunk) == expected for chunk in (1, 4, 100))
    assert epoch(Shuffled(5, 0, shuffle=False), 1, 2) == [0, 1, 2, 3, 4]


def test_the_shuffled_order_goes_on_from_its_state() -> None:
    first = Shuffled(23, 5)
    second = Shuffled(23, 5)
    first.start(2)
    first.take(9, 0)
    second.load_state_dict(first.state_dict())
    assert second.take(100, 0) == first.take(100, 0)
