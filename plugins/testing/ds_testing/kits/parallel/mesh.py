"""The conformance kits for the process mesh: `MeshAxisConformance`, `MeshConformance`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ds_testing.kits.train.partitioner import with_plugins
from ds_testing.pool import reference, run_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn


def _layer() -> nn.Module:
    from torch import nn

    return nn.Linear(4, 1)


def _rows() -> Tensor:
    import torch

    from ds_core import comm

    return torch.ones(2, 4) * (1 + comm.rank())


class MeshAxisConformance:
    """Inherit; for a plugin with `ds_mesh_axes` or `ds_param_axes`.

    The class's name must start with Test.
    """

    config: ClassVar[Mapping[str, Any]] = {}
    """What switches the plugin on, with an axis that is larger than 1 on `world` ranks."""
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""
    world: ClassVar[int] = 2
    make_model: ClassVar[Callable[[], Any]] = staticmethod(_layer)
    """``() -> module``, given as ``staticmethod``; its output is a loss, or is squared and
    averaged.
    """
    make_batch: ClassVar[Callable[[], Any]] = staticmethod(_rows)
    """``() -> input``, on each rank, given likewise."""
    held: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Axis -> the names of the parameters that differ along it; all others are the same on all
    ranks.
    """

    def _run(self, world: int) -> list[dict[str, Any]]:
        functions = [reference(f) for f in (type(self).make_model, type(self).make_batch)]
        found: list[dict[str, Any]] = run_ranks(
            world, _train, functions, dict(self.config), list(self.load)
        )
        return found

    def test_the_axes_are_there(self) -> None:
        """Every axis in `held` is one of the mesh, and larger than 1; every rank is told the same
        mesh.
        """
        ranks = self._run(self.world)
        sizes = ranks[0]["sizes"]
        assert all(rank["sizes"] == sizes for rank in ranks), (
            "ranks plan different meshes; do not choose axes by rank"
        )
        for axis in self.held:
            assert axis in sizes, (
                f"the mesh has {sizes}; axis {axis!r} is not in it: does ds_mesh_axes give it?"
            )
            assert sizes[axis] > 1, (
                f"axis {axis!r} has size 1 on {self.world} ranks; make it larger in `config`"
            )

    def test_parameters_are_held_as_declared(self) -> None:
        """`ds_param_axes` gives the axes of `held` for its parameters, and none for the others; on
        all ranks.
        """
        for number, rank in enumerate(self._run(self.world)):
            wanted: dict[str, list[str]] = {name: [] for name in rank["held"]}
            for axis, names in self.held.items():
                for name in names:
                    assert name in wanted, (
                        f"the model has no parameter {name!r}; it has {sorted(wanted)}"
                    )
                    wanted[name].append(axis)
            for name, axes in rank["held"].items():
                assert sorted(axes) == sorted(wanted[name]), (
                    f"rank {number}: {name} is held on {axes}, not {wanted[name]}"
                )

    def test_what_is_shared_stays_the_same(self) -> None:
        """After training, ranks have one value of what they share, and one norm; what they hold
        differs.
        """
        import torch

        ranks = self._run(self.world)
        assert len({rank["norm"] for rank in ranks}) == 1, (
            f"gradient norms are {[r['norm'] for r in ranks]}"
        )
        own = {name for names in self.held.values() for name in names}
        for name in ranks[0]["weights"]:
            values = [rank["weights"][name] for rank in ranks]
            alike = all(torch.equal(values[0], value) for value in values)
            if name in own:
                assert not alike, (
                    f"{name} is the same on all ranks, though it is held: give it in ds_param_axes"
                )
            else:
                assert alike, (
                    f"{name} differs between ranks, and no axis holds it: give its axis in "
                    "ds_param_axes"
                )


class MeshConformance:
    """Inherit; for a plugin with `ds_mesh`. The class's name must start with Test."""

    make_mpu: ClassVar[Callable[[], Any]]
    """``() -> object``, what users give as ``initialize(mpu=...)``, made on each rank; as
    ``staticmethod``.
    """
    sizes: ClassVar[Mapping[str, int]] = {}
    """Of axes of the mesh, on `world` ranks."""
    world: ClassVar[int] = 2
    config: ClassVar[Mapping[str, Any]] = {}
    """What else is in the config."""
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""

    def _run(self) -> list[dict[str, Any]]:
        functions = [reference(f) for f in (_layer, _rows, type(self).make_mpu)]
        found: list[dict[str, Any]] = run_ranks(
            self.world, _train, functions, dict(self.config), list(self.load)
        )
        return found

    def test_sizes_and_places(self) -> None:
        """The mesh has `sizes`; each rank stands where the process group has it, and its groups are
        those it is in.
        """
        for number, rank in enumerate(self._run()):
            assert (rank["rank"], rank["world"]) == (number, self.world), (
                f"rank {number} of {self.world} was given the mesh of rank {rank['rank']} of "
                f"{rank['world']}; "
                "use the arguments rank and world_size"
            )
            for axis, size in self.sizes.items():
                have = rank["sizes"].get(axis)
                assert have == size, (
                    f"axis {axis!r} has size {have}, not {size}; the mesh has {rank['sizes']}"
                )
            for axis, group in rank["groups"].items():
                assert number in group, (
                    f"rank {number}: its group along {axis!r} is {group}, without it"
                )

    def test_it_trains(self) -> None:
        """All ranks have the same weights after some steps over the mesh's groups."""
        import torch

        ranks = self._run()
        for name, value in ranks[0]["weights"].items():
            same = all(torch.equal(value, rank["weights"][name]) for rank in ranks)
            assert same, (
                f"{name} differs between ranks: the axes of dp must hold all ranks with the same "
                "model"
            )

    def test_objects_of_others_are_left(self) -> None:
        """It answers None for an object that it does not know."""
        (answers,) = run_ranks(1, _strangers, dict(self.config), list(self.load))
        assert answers == [], (
            f"{answers} gave a mesh for a plain object(); answer None for what is not yours"
        )


def _train(functions: list[Any], extra: dict[str, Any], load: list[str]) -> dict[str, Any]:
    """Three steps on each rank, whose random numbers differ.

    functions: of the model, a batch, and an mpu or none.
    """
    import torch

    import ds_core
    from ds_core import comm
    from ds_testing.worker import find_function

    torch.manual_seed(comm.rank())
    make_model, make_batch, *make_mpu = map(find_function, functions)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    mpu = make_mpu[0]() if make_mpu else None
    engine, *_ = ds_core.initialize(
        model=make_model(), config=with_plugins(config, extra, load), mpu=mpu
    )
    mesh = engine.ctx.mesh
    for _ in range(3):
        output = engine(make_batch())
        engine.backward(output if output.dim() == 0 else output.square().mean())
        engine.step()
    names = [*mesh.names, *mesh.alias]
    found = {
        "sizes": {name: mesh.size(name) for name in names},
        "groups": {name: mesh.ranks(name) for name in names},
        "rank": mesh.rank,
        "world": mesh.world_size,
        "held": {info.name: list(info.held) for info in engine.ctx.params.values()},
        "norm": engine.get_global_grad_norm(),
        "weights": {
            name: param.detach().clone() for name, param in engine.module.named_parameters()
        },
    }
    engine.destroy()
    return found


def _strangers(extra: dict[str, Any], load: list[str]) -> list[str]:
    from ds_core.setup.compose import compose

    plugins = compose(with_plugins({"train_micro_batch_size_per_gpu": 1}, extra, load)).plugins
    rows = [
        answer
        for installed in (False, True)
        for answer in plugins.ask(
            "ds_mesh", installed=installed, mpu=object(), rank=0, world_size=1
        )
    ]
    return [str(answer.plugin) for answer in rows]
