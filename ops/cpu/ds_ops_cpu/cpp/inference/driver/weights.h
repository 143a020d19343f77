// Weights as Python describes them, and how their products are cut into units.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>

#include "../table.h"

namespace ds {
namespace inference {

namespace py = pybind11;

constexpr long WIDEST = 16;           // floats of a vector
constexpr long UNIT_BYTES = 48 << 10; // of weights
constexpr long UNITS = 64;            // of large matrices, until they are of 8 UNIT_BYTES

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

template <class T>
T* address(const py::handle& from) {
    return reinterpret_cast<T*>(from.cast<uintptr_t>());
}

inline Weight weight(const py::handle& from) {
    const auto t = from.cast<py::tuple>();  // data, scales, lows, form, columns, out, in, stride, group
    return {address<const char>(t[0]), address<const uint16_t>(t[1]), address<const uint16_t>(t[2]), t[3].cast<int>(),
            t[4].cast<bool>(), t[5].cast<long>(), t[6].cast<long>(), t[7].cast<long>(), t[8].cast<long>()};
}

inline long row_bytes(const Weight& w) {
    return w.form == INT4 ? w.in / 2 : w.form == INT8 ? w.in : w.stride * (w.form == F32 ? 4 : 2);
}

// Outputs of one unit of a product.
inline long unit_of(const Weight& w, int matrices = 1) {
    const long fair = round_up((w.out + 3) / 4, WIDEST);
    if (w.columns) return fair;
    const long bytes = std::max(1L, row_bytes(w) * matrices), wanted = std::max(UNIT_BYTES, bytes * w.out / UNITS);
    return std::max(WIDEST, std::min(fair, round_up(std::min(wanted, 8 * UNIT_BYTES) / bytes, WIDEST)));
}

// As `room_of_product` in products.h, and the products.
inline long room_of(const Weight& w, long unit, long rows) {
    const long wide = 2 * WIDEST, in = round_up(w.in, wide), groups = w.group ? w.in / w.group : 0;
    rows = std::min(rows, MOST_ROWS);
    return (rows + 6) * in + round_up(groups, wide) + round_up(2 * unit * groups, wide) + round_up(2 * groups, wide) + rows * unit;
}

}  // namespace inference
}  // namespace ds
