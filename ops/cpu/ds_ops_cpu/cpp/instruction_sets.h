// What this processor runs, and which of the tables of kernels that it can use is in use; for both modules.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "ops.h"

namespace ds {

#ifdef DS_X86
inline bool runs_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

inline bool runs_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

// Begins with the best of `usable`, and gives Python the names of all and, for tests, a function that takes another.
template <class Table>
void choose_instruction_set(pybind11::module_& m, const std::vector<const Table*>& usable, const Table*& chosen) {
    chosen = usable.front();
    m.def("instruction_sets", [usable] {
        pybind11::list names;
        for (auto table : usable) names.append(table->name);
        return names;
    }, "Those this processor can run, best first.");
    m.def("use_instruction_set", [usable, &chosen](const std::string& name) {
        std::string before = chosen->name;
        for (auto table : usable)
            if (name == table->name) {
                chosen = table;
                return before;
            }
        throw pybind11::value_error("this processor cannot run " + name);
    }, "For tests: choose one; returns the one before.");
}

}  // namespace ds
