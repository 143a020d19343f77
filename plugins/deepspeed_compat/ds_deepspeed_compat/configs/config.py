"""The documents' config structs: attributes and items are the same values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ds_core.config.core import complete
from ds_core.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from typing_extensions import Self


class Config:
    """A struct: build it by keywords or `from_dict`, read it by attribute or by item.

    fields: the names a subclass accepts, each with its default; None (this class) accepts any name.
    nested: which fields hold a config of their own.
    """

    fields: ClassVar[Mapping[str, Any] | None] = None
    nested: ClassVar[Mapping[str, type[Config]]] = {}

    def __init__(self, **values: Any) -> None:
        for name, default in (self.fields or {}).items():
            setattr(self, name, default)
        for name, value in values.items():
            self[name] = value

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; nested mappings become the nested configs."""
        return cls(**values)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.fields is not None and name not in self.fields:
            hint = nearest(name, self.fields)
            fix = f"did you mean {hint!r}?" if hint else f"known: {', '.join(self.fields)}"
            raise ConfigError([Problem(name, f"{type(self).__name__} has no field {name!r}", fix)])
        kind = self.nested.get(name)
        super().__setattr__(
            name, kind.from_dict(value) if kind and isinstance(value, Mapping) else value
        )

    def __getitem__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]

    def resolve(self) -> None:
        """Fill in what can be inferred; nothing here, subclasses do."""

    def is_valid(self) -> bool:
        """Resolve, then say whether this config and every nested one is valid."""
        self.resolve()
        return self._valid() and all(
            v.is_valid() for v in self.__dict__.values() if isinstance(v, Config)
        )

    def _valid(self) -> bool:
        return True


class BatchConfig(Config):
    """The batch triple for one rank: `resolve` completes the third value when two are given."""

    fields: ClassVar[Mapping[str, Any] | None] = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None

    def resolve(self) -> None:
        """Complete the triple from any two values; with fewer, or sizes of 0 and below, leave
        it."""
        values = [self[name] for name in self.fields or ()]
        given = [v for v in values if v is not None]
        if len(given) == 2 and all(_positive(v) for v in given):
            train, micro, gas = values
            for name, value in zip(self.fields or (), complete(train, micro, gas, 1), strict=True):
                self[name] = value

    def _valid(self) -> bool:
        train, micro, gas = (self[name] for name in self.fields or ())
        return (
            _positive(train) and _positive(micro) and _positive(gas) and train % (micro * gas) == 0
        )


class FP16Config(Config):
    """enabled: train in fp16. clip: maximum gradient norm."""

    fields: ClassVar[Mapping[str, Any] | None] = {"enabled": None, "clip": None}
    enabled: bool | None
    clip: float | None

    def _valid(self) -> bool:
        number = (
            isinstance(self.clip, (int, float))
            and not isinstance(self.clip, bool)
            and 0 <= self.clip < float("inf")
        )
        return self.enabled in (None, True, False) and (self.clip is None or number)


class TrainingConfig(Config):
    """batch and fp16, each a config of its own or None."""

    fields: ClassVar[Mapping[str, Any] | None] = {"batch": None, "fp16": None}
    nested: ClassVar[Mapping[str, type[Config]]] = {"batch": BatchConfig, "fp16": FP16Config}
    batch: BatchConfig | None
    fp16: FP16Config | None


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
