// Lists of torch tensors as C++ sees them: addresses, sizes and types, without a header of torch's.
//
// They come from Python as numbers, or straight from the tensors through DLPack's exchange table, a stable C interface
// that torch has since 2.10: one call of 20 ns says all of a tensor, where Python takes 50 ns for each of five questions.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ops.h"

namespace ds {

namespace py = pybind11;
using Addresses = std::vector<char*>;
using Sizes = std::vector<long>;

inline long width(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

// -- DLPack's exchange table, version 1.x (what is not used of it has no name) -------------------------------------------

struct DLTensor {
    void* data;
    int32_t device_type, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLExchange {
    uint32_t major, minor;
    void *older, *unused[3];
    int (*describe)(void* py_object, DLTensor* out);  // borrows; 0 for success, else a Python exception is set
    void* unused_too;
};

inline int type_of(const DLTensor& t) {
    if (t.lanes != 1) return NONE;
    if (t.code == 2) return t.bits == 32 ? F32 : t.bits == 16 ? F16 : t.bits == 64 ? F64 : NONE;
    return t.code == 4 && t.bits == 16 ? BF16 : NONE;
}

inline bool is_contiguous(const DLTensor& t) {
    if (!t.strides) return true;
    int64_t expected = 1;
    for (int i = t.dimensions - 1; i >= 0; i--) {
        if (t.shape[i] != 1 && t.strides[i] != expected) return false;
        expected *= t.shape[i];
    }
    return true;
}

// -- a list of lists ---------------------------------------------------------------------------------------------------

// lists[i][t]: tensor t of list i, such as parameters, gradients, states. types[i][t], or types[i][0] for all of a list.
struct Tensors {
    Sizes sizes;
    std::vector<Addresses> lists;
    std::vector<std::vector<int>> types;

    int type(size_t list) const { return types[list].empty() ? NONE : types[list][0]; }
};

template <class T>
std::vector<T> numbers(const py::handle& from) {
    PyObject* fast = PySequence_Fast(from.ptr(), "a list of whole numbers is needed");
    if (!fast) throw py::error_already_set();
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    std::vector<T> out((size_t)n);
    for (Py_ssize_t i = 0; i < n; i++) out[(size_t)i] = (T)PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(fast, i));
    Py_DECREF(fast);
    if (PyErr_Occurred()) throw py::error_already_set();
    return out;
}

// From numbers that Python has looked up: sizes, for each list its type or types, for each list its addresses.
inline Tensors from_numbers(py::object sizes, py::list types, py::list lists) {
    Tensors out;
    out.sizes = numbers<long>(sizes);
    for (auto list : lists) {
        const auto found = numbers<uintptr_t>(list);
        if (found.size() != out.sizes.size())
            throw py::value_error("a list of " + std::to_string(found.size()) + " tensors, but " +
                                  std::to_string(out.sizes.size()) + " sizes");
        Addresses addresses(found.size());
        for (size_t i = 0; i < found.size(); i++) {
            if (!found[i] && out.sizes[i]) throw py::value_error("tensor " + std::to_string(i) + " has no memory");
            addresses[i] = reinterpret_cast<char*>(found[i]);
        }
        out.lists.push_back(std::move(addresses));
    }
    for (auto list : types) out.types.push_back(numbers<int>(list));
    if (out.types.size() != out.lists.size()) throw py::value_error("types: one list for each list of tensors is needed");
    for (const auto& of_list : out.types)
        if (of_list.size() != 1 && of_list.size() != out.sizes.size())
            throw py::value_error("types: one for a list, or one for each tensor is needed");
    return out;
}

// Reads what will be asked of `n` tensors of one class, a step at a time since each leads to the next. Plain reads, many
// side by side: prefetching does nothing where the page too has to be found anew (0.9 ms for 4,000 tensors became 0.4).
inline void fetch(PyObject** items, Py_ssize_t n) {
    constexpr Py_ssize_t MOST = 16;
    const auto word = [](const void* object, int i) { return static_cast<const char* const*>(object)[i]; };
    const char* tensors[MOST];
    int all = 0;
    n = std::min(n, MOST);
    for (Py_ssize_t i = 0; i < n; i++)
        if (Py_TYPE(items[i]) != Py_TYPE(items[0])) return;
    for (Py_ssize_t i = 0; i < n; i++) tensors[i] = word(items[i], 2);
    for (Py_ssize_t i = 0; i < n; i++) all += tensors[i][64] + tensors[i][128] + tensors[i][152];
    for (Py_ssize_t i = 0; i < n; i++)
        if (const char* storage = word(tensors[i], 2)) all += storage[24] + storage[80];  // sparse ones have none
    asm volatile("" : : "r"(all));
}

// From the tensors themselves; None where something is not plain (not on the CPU, not contiguous, of another size than
// the first list's, of a type that has no number, of two types in one list unless `mixed`): Python then sorts it out.
// fetching: whether a tensor object's third word is its implementation, and that's third word its storage. After a step
// over gigabytes nothing of a tensor is in the cache, and one line after the other would be waited for. What follows a
// tensor and is of its class is one too.
inline py::object from_tensors(py::capsule table, py::list lists, bool mixed, bool fetching) {
    auto api = static_cast<const DLExchange*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
    if (!api) throw py::error_already_set();
    if (api->major != 1 || !api->describe) return py::none();
    Tensors out;
    for (auto list : lists) {
        PyObject* fast = PySequence_Fast(list.ptr(), "a list of tensors is needed");
        if (!fast) throw py::error_already_set();
        const py::object holder = py::reinterpret_steal<py::object>(fast);
        const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
        PyObject** items = PySequence_Fast_ITEMS(fast);
        const bool first = out.lists.empty();
        if (first) out.sizes.resize((size_t)n);
        if ((size_t)n != out.sizes.size()) return py::none();
        Addresses addresses((size_t)n);
        std::vector<int> types;
        for (Py_ssize_t i = 0; i < n; i++) {
            if (fetching && i > 0 && i % 16 == 1 && Py_TYPE(items[i]) == Py_TYPE(items[i - 1])) fetch(items + i, n - i);
            DLTensor t;
            if (api->describe(items[i], &t) != 0) {
                PyErr_Clear();
                return py::none();
            }
            long size = 1;
            for (int d = 0; d < t.dimensions; d++) size *= t.shape[d];
            const int type = type_of(t);
            if (t.device_type != 1 || type == NONE || !is_contiguous(t)) return py::none();
            if (first) out.sizes[(size_t)i] = size;
            else if (out.sizes[(size_t)i] != size) return py::none();
            if (size && !t.data) return py::none();
            if (i == 0 || mixed) types.push_back(type);
            else if (types[0] != type) return py::none();
            addresses[(size_t)i] = static_cast<char*>(t.data) + t.byte_offset;
        }
        out.lists.push_back(std::move(addresses));
        out.types.push_back(std::move(types));
    }
    return py::cast(std::move(out));
}

}  // namespace ds
