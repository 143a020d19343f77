"""Pickles as data: what one describes, with nothing of it made or called.

Python's own unpickler imports what a pickle names and calls it. This reader follows the same
opcodes on a stack of plain values. A name stays a `Global`, and a call or an object stays a `Made`,
which says what would have been called with what. There is no way from here to code.

Every size is bounded before anything is made of it.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds_core.errors import CheckpointError

MOST_BYTES = 1 << 28
_MOST_MADE = 1 << 24
_MOST_DIGITS = 1 << 10
_MOST_KEY = 1 << 60
"""Of an int that is a key: larger ones could be chosen to have the same hash."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by its full name."""

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What would be an object: `kind` called with `args`, then given `state` and `items`.

    Two are equal only if they are the same one, so that they can be keys.
    """

    kind: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Outside:
    """What is stored beside the pickle, by what identifies it there."""

    key: Any


class _Mark:
    """Where the elements of a container begin on the stack."""


_MARK = _Mark()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = (
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "UNICODE",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
)
_PLAIN = frozenset((*_NUMBERS, *_TEXTS))
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, what: str, allowed: Callable[[str], bool] = lambda _: True) -> Any:
    """What `data` describes, of None, bool, numbers, str, bytes, lists, tuples, dicts, sets, and
    the classes of this module.

    what: names it in errors.
    allowed: whether a class or function of that full name may be in it.

    Raises CheckpointError, which names the first name that is not allowed, or what is damaged.
    """
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{what} has {len(data)} bytes; {MOST_BYTES} are the most")
    try:
        return _Machine(what, allowed).run(data)
    except CheckpointError:
        raise
    # The bytes are a stranger's: an opcode may find anything on the stack, and a text may be one that
    # Python warns of.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, Warning) as error:
        raise CheckpointError(
            f"{what} is no whole pickle ({type(error).__name__}: {str(error)[:100]}); copy it again"
        ) from error


class _Machine:
    """The stack, and the opcodes' effects on it."""

    def __init__(self, what: str, allowed: Callable[[str], bool]) -> None:
        self._what = what
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[Any, Any] = {}
        self._made = 0

    def run(self, data: bytes) -> Any:
        """The value on the stack at the end."""
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            self._made += 1
            if self._made > _MOST_MADE:
                raise CheckpointError(f"{self._what} makes more than {_MOST_MADE} values")
            name = opcode.name
            if name in _PLAIN:
                self._stack.append(_checked(argument))
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _PUTS:
                self._memo[argument] = self._stack[-1]
            elif name in _GETS:
                self._stack.append(self._memo[argument])
            elif name in _TUPLES:
                self._stack.append(tuple(self._pop(_TUPLES[name])))
            elif name == "STOP":
                return self._end()
            elif name not in ("PROTO", "FRAME"):
                self._other(name, argument)
        raise ValueError("it has no end")

    def _end(self) -> Any:
        [value] = self._stack
        return value

    def _other(self, name: str, argument: Any) -> None:
        effect = getattr(self, f"_op_{name.lower()}", None)
        if effect is None:
            raise CheckpointError(f"{self._what} uses the opcode {name}, which none of torch's has")
        effect(argument)

    def _pop(self, count: int) -> list[Any]:
        if count == 0:
            return []
        found = self._stack[-count:]
        if len(found) < count or _MARK in found:
            raise ValueError("its stack ends too early")
        del self._stack[-count:]
        return found

    def _to_mark(self) -> list[Any]:
        """The values above the last mark, which goes as well."""
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("it ends a container that never began")
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    # -- containers --------------------------------------------------------------------------------

    def _op_mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _op_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _op_pop(self, _: Any) -> None:
        self._stack.pop()

    def _op_pop_mark(self, _: Any) -> None:
        self._to_mark()

    def _op_empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _op_empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _op_empty_set(self, _: Any) -> None:
        self._stack.append(set())

    def _op_list(self, _: Any) -> None:
        self._stack.append(self._to_mark())

    def _op_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._to_mark()))

    def _op_dict(self, _: Any) -> None:
        pairs = self._to_mark()
        self._stack.append({})
        self._set(pairs)

    def _op_frozenset(self, _: Any) -> None:
        self._stack.append(frozenset(map(_key, self._to_mark())))

    def _op_append(self, _: Any) -> None:
        [value] = self._pop(1)
        self._extend([value])

    def _op_appends(self, _: Any) -> None:
        self._extend(self._to_mark())

    def _op_additems(self, _: Any) -> None:
        values = self._to_mark()
        self._stack[-1].update(map(_key, values))

    def _op_setitem(self, _: Any) -> None:
        self._set(self._pop(2))

    def _op_setitems(self, _: Any) -> None:
        self._set(self._to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise ValueError(f"it appends to a {type(target).__name__}")

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if len(pairs) % 2:
            raise ValueError("a key has no value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(target, Made):
                target.items.append((_key(key), value))
            elif isinstance(target, dict):
                target[_key(key)] = value
            else:
                raise ValueError(f"it sets items of a {type(target).__name__}")

    # -- names, calls and objects ------------------------------------------------------------------

    def _op_global(self, argument: str) -> None:
        self._name(argument.replace(" ", "."))

    def _op_stack_global(self, _: Any) -> None:
        module, name = self._pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is no text")
        self._name(f"{module}.{name}")

    def _name(self, name: str) -> None:
        if not self._allowed(name):
            raise CheckpointError(
                f"{self._what} names {name[:200]!r}, which has no place there; nothing of it was run. "
                "Save the checkpoint again from plain tensors and values"
            )
        self._stack.append(Global(name))

    def _op_reduce(self, _: Any) -> None:
        kind, args = self._pop(2)
        self._make(kind, args)

    _op_newobj = _op_reduce

    def _op_newobj_ex(self, _: Any) -> None:
        kind, args, named = self._pop(3)
        self._make(kind, (*args, named) if named else args)

    def _make(self, kind: Any, args: Any) -> None:
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise ValueError("it calls what has no name")
        self._stack.append(Made(kind, args))

    def _op_build(self, _: Any) -> None:
        [state] = self._pop(1)
        target = self._stack[-1]
        if not isinstance(target, Made):
            raise ValueError(f"it gives a state to a {type(target).__name__}")
        target.state = state

    def _op_binpersid(self, _: Any) -> None:
        [key] = self._pop(1)
        self._stack.append(Outside(key))


def _checked(value: Any) -> Any:
    """A number whose printing takes no time."""
    if isinstance(value, int) and value.bit_length() > 4 * _MOST_DIGITS:
        raise ValueError("it has an int of thousands of digits")
    return value


def _key(key: Any) -> Any:
    """What may be a key: its hash cannot be chosen."""
    plain = isinstance(key, str | bool | float | Made | Global) or key is None
    if not plain and not (isinstance(key, int) and abs(key) < _MOST_KEY):
        raise ValueError(f"a {type(key).__name__} is a key")
    return key
