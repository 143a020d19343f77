// Attention of a step, divided into tasks that threads share.
#pragma once

#include <algorithm>
#include <vector>

#include "weights.h"

namespace ds {
namespace inference {

constexpr long CHUNK = 8;             // rows of one sequence that a unit of attention takes
constexpr long PART = 2;              // blocks of context, at least, that are a unit of their own
constexpr long PARTS = 32;            // of a context, at most

struct Tasks {
    std::vector<Task> tasks;
    long groups = 0, partials = 0;
};

// The tasks of an op: chunks of a sequence's rows, and of a single row's context.
inline Tasks divide(const Op& op, const Run& run, bool cached) {
    Tasks out;
    const long B = BLOCK_TOKENS, step = op.heads * (2 + round_up(op.head_dim, WIDEST));
    for (int s = 0; s < run.sequences; s++) {
        const long start = run.starts[s], rows = run.starts[s + 1] - start, length = cached ? run.lengths[s] : rows;
        // From the last rows on, which have most to do.
        for (long last = rows; last > 0; last -= CHUNK) {
            const long first = std::max(0L, last - CHUNK), at = length - rows + first;
            const long to = op.causal ? length - rows + last : length;
            const long from = op.window > 0 ? std::max(0L, at - op.window + 1) / B * B : 0;
            const long blocks = (to - from + B - 1) / B;
            long per = blocks;
            if (rows == 1) per = std::max(PART, (blocks + PARTS - 1) / PARTS);
            const int parts = (int)((blocks + per - 1) / per);
            for (int p = 0; p < parts; p++)
                out.tasks.push_back({s, start + first, start + last, from + p * per * B,
                                     std::min(to, from + (p + 1) * per * B), p, parts, out.partials, (int)out.groups});
            if (parts > 1) {
                out.partials += parts * step;
                out.groups++;
            }
        }
    }
    return out;
}

// Rows whose keys and values are put into the cache before attention reads them: row, sequence and token of each. A
// sequence's single row is left to its task of attention.
inline std::vector<int> rows_to_store(const Run& run) {
    std::vector<int> stores;
    for (long s = 0; run.keys && s < run.sequences; s++) {
        const int rows = run.starts[s + 1] - run.starts[s];
        for (int r = 0; rows > 1 && r < rows; r++) {
            stores.push_back(run.starts[s] + r);
            stores.push_back((int)s);
            stores.push_back(run.lengths[s] - rows + r);
        }
    }
    return stores;
}

}  // namespace inference
}  // namespace ds
