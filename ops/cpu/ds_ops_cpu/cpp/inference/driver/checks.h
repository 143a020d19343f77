// What a step must keep to before kernels read by its numbers, without bounds of their own.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <set>
#include <string>
#include <tuple>

#include "../table.h"

namespace ds {
namespace inference {

[[noreturn]] inline void refuse(const std::string& why) { throw pybind11::value_error("inference_program: " + why); }

inline void check_numbers(const Run& run, const char* what, const int* numbers, long offset, long below) {
    for (long r = 0; r < run.rows; r++) {
        const long n = (numbers ? numbers[r] : 0) + offset;
        if (n < 0 || n >= below)
            refuse(std::string(what) + " of row " + std::to_string(r) + " is " + std::to_string(n) + "; there are " +
                   std::to_string(below));
    }
}

// Whatever the caller numbers must exist: sequences' rows, blocks of the cache, lines of tables. ValueError in Python.
inline void check_step(const Run& run, const std::deque<Op>& ops, long known_blocks) {
    if (run.starts[0] != 0 || run.starts[run.sequences] != run.rows) refuse("starts do not cover the rows");
    for (long s = 0; s < run.sequences; s++) {
        const long n = run.starts[s + 1] - run.starts[s];
        if (n < 0) refuse("starts decrease");
        if (!run.keys) continue;
        const long length = run.lengths[s], blocks = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        if (length < n) refuse("sequence " + std::to_string(s) + " is shorter than its rows");
        if (blocks > known_blocks) refuse("sequence " + std::to_string(s) + " has too few blocks for its length");
        for (long b = 0; b < blocks; b++) {
            const int block = run.blocks[s * run.blocks_stride + b];
            if (block < 0 || block >= run.cache_blocks)
                refuse("block " + std::to_string(block) + " of sequence " + std::to_string(s) + " is not in the cache");
        }
    }
    for (long i = 0; run.wants && i < run.wanted; i++)
        if (run.wants[i] < 0 || run.wants[i] >= run.rows) refuse("row " + std::to_string(run.wants[i]) + " is wanted, which is none");
    std::set<std::tuple<int, long, long>> seen;
    for (const Op& op : ops) {
        if (op.kind == EMBED && !(op.by == 0 && run.embeds)) {
            if (!seen.insert({op.by, op.offset, op.a.out}).second) continue;
            const int* numbers[] = {run.tokens, run.positions, run.types};
            const char* names[] = {"token", "position", "type"};
            check_numbers(run, names[op.by], numbers[op.by], op.offset, op.a.out);
        }
        if (op.kind == ROTATE && seen.insert({9, 0, op.positions}).second)
            check_numbers(run, "position", run.positions, 0, op.positions);
    }
}

}  // namespace inference
}  // namespace ds
