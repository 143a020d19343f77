"""The conformance kit of config formats: `ds_config_formats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from ds_core.config import Pairs, Unreadable
from ds_core.entries import resolve


class ConfigFormatConformance:
    """Inherit, and set the class attributes."""

    plugin: str = ""
    """Reference to the declaration module."""
    samples: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    """By suffix, a text and the data that it means."""
    broken: ClassVar[Mapping[str, str]] = {}
    """By suffix, a text that is not of the format."""
    repeated: ClassVar[Mapping[str, str]] = {}
    """By suffix, a text in which the top level repeats the key ``"a"``; leave out a format that
    cannot.
    """

    def parsers(self) -> dict[str, Callable[[str], Any]]:
        """Suffix -> its parser."""
        found: Mapping[str, str] = resolve(self.plugin).ds_config_formats()
        return {suffix: resolve(ref) for suffix, ref in found.items()}

    def test_every_suffix_starts_with_a_dot_and_has_samples(self) -> None:
        """``".ini"``, in lower case, with a sample and a broken text."""
        suffixes = set(self.parsers())
        assert suffixes, f"{self.plugin}.ds_config_formats offers no format"
        odd = [s for s in suffixes if not s.startswith(".") or s != s.lower()]
        assert not odd, f"{odd}: a suffix begins with a dot and is in lower case, as in '.ini'"
        for name in ("samples", "broken"):
            has = set(getattr(self, name))
            assert has == suffixes, (
                f"{type(self).__name__}.{name} has {sorted(has)}; give one for each of "
                f"{sorted(suffixes)}"
            )

    def test_samples_are_read(self) -> None:
        """Each sample gives its data."""
        for suffix, parse in self.parsers().items():
            text, data = self.samples[suffix]
            found = parse(text)
            assert found == data, f"{suffix}: {text!r} is read as {found!r}, not {data!r}"

    def test_broken_text_is_unreadable(self) -> None:
        """A broken text raises `Unreadable`, and nothing else."""
        for suffix, parse in self.parsers().items():
            with pytest.raises(Unreadable):
                parse(self.broken[suffix])

    def test_repeated_keys_are_remembered_or_refused(self) -> None:
        """The result is a `Pairs` that names the key, or `Unreadable` has the key as its path."""
        for suffix, text in self.repeated.items():
            try:
                found = self.parsers()[suffix](text)
            except Unreadable as error:
                assert error.path == "a", (
                    f"{suffix}: give the repeated key as the path of Unreadable, not {error.path!r}"
                )
            else:
                known = isinstance(found, Pairs) and found.repeated == ("a",)
                assert known, (
                    f"{suffix}: a key that comes twice is lost; make objects with "
                    "ds_core.config.to_pairs"
                )
