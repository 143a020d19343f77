"""`MMapIndexedDataset` and its builder: rows of numbers in two files, as DeepSpeed and Megatron
write them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_core.errors import UsageError
from ds_data_sampling.curricula.index import HEADER, MAGIC, TYPES, Array, read_rows


class MMapIndexedDataset(torch.utils.data.Dataset[Any]):
    """The rows of a pair of files, memory-mapped.

    path: without ``.idx`` and ``.bin``.
    """

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        super().__init__()
        self._path = str(path)
        self._elements, sizes = read_rows(self._path)
        self.sizes = np.asarray(sizes)
        self._ends = np.cumsum(self.sizes, dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        """A row, or a list of the rows of a slice."""
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return self.get(range(len(self))[index])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """The row `idx` from its element `offset` on; length: how many elements, None: all."""
        end = int(self._ends[idx])
        start = end - int(self.sizes[idx]) + offset
        return np.asarray(
            self._elements[start : end if length is None else min(start + length, end)]
        )

    def size(self, index: int) -> int:
        """Elements of a row."""
        return int(self.sizes[index])

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self._elements.dtype

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return Path(f"{path}.idx").is_file() and Path(f"{path}.bin").is_file()


class MMapIndexedDatasetBuilder:
    """Writes rows.

    out_file: the ``.bin``; `finalize` writes the ``.idx``.
    dtype: integers, numpy's or torch's.
    """

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        self._dtype = np.dtype(name).newbyteorder("<")
        kinds = {np.dtype(text): kind for kind, text in TYPES.items()}
        if np.dtype(name) not in kinds:
            raise UsageError(
                f"rows of {dtype} cannot be written; use an integer type of 1 to 8 bytes"
            )
        self._kind = kinds[np.dtype(name)]
        self._documents = [0]
        self._sizes: list[int] = []
        self._data = Path(out_file).open("wb")  # noqa: SIM115  finalize closes it

    def add_item(self, tensor: torch.Tensor) -> None:
        """A row, from a tensor."""
        self.add_item_numpy(tensor.numpy())

    def add_item_numpy(self, np_array: Array) -> None:
        """A row, from an array."""
        self._data.write(np_array.astype(self._dtype).tobytes())
        self._sizes.append(np_array.size)

    def add_items(self, arr_list: list[Array]) -> None:
        """Several rows."""
        for each in arr_list:
            self.add_item_numpy(each)

    def end_document(self) -> None:
        """What follows is of another document; readers of rows need none."""
        self._documents.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append the rows of another pair of files."""
        other = MMapIndexedDataset(another_file)
        for row in range(len(other)):
            self.add_item_numpy(other[row])
        self.end_document()

    def finalize(self, index_file: str) -> None:
        """Close the data and write the index."""
        self._data.close()
        sizes = np.array(self._sizes, "<i4")
        places = (np.cumsum(sizes, dtype="<i8") - sizes).astype("<i8") * self._dtype.itemsize
        head = MAGIC + HEADER.pack(1, self._kind, len(sizes), len(self._documents))
        documents = np.array(self._documents, "<i8")
        Path(index_file).write_bytes(
            head + sizes.tobytes() + places.tobytes() + documents.tobytes()
        )
