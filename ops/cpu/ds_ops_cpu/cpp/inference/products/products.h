// y = x @ w.T for a few rows x, reading each weight once from memory: which of the ways, and what it needs of x.
#pragma once

#include "integers.h"
#include "one_row.h"
#include "several_rows.h"

namespace ds {
namespace inference {
namespace {

// [Note: room] of a product, in floats: x as the kernels want it (of all rows; sums of groups behind it where there is one), the
// factors of all rows of a unit, then what `several` takes.
inline long room_of_product(const Weight& w, long unit, long count) {
    const long groups = w.group ? w.in / w.group : 0;
    return count * whole(w.in) + whole(groups) + whole(2 * unit * groups) + (J + 2) * whole(w.in) + whole(2 * groups);
}

inline bool in_bf16(const Run& run, const Weight& w, long count) {
#if defined(DS_BF16)
    return run.bf16 && count > 1 && !w.columns;
#else
    return false;
#endif
}

inline bool prepared_alike(const Weight& a, const Weight& b) {
    return a.form == b.form && a.group == b.group && !a.lows == !b.lows && a.columns == b.columns;
}

// x as the kernels want it, at the beginning of the room. It is made once by each thread for products of one x between two
// barriers (op: null: always); others that use the room leave `prepared` null.
inline void prepare(const Op* op, const Run& run, const Weight& w, const float* const* x, long count, Thread& t) {
    const Op* last = t.prepared;
    t.prepared = op;
    if (op && last && op->x == last->x && op->phase == last->phase && prepared_alike(op->a, last->a)) return;
    if (w.columns) return;
#if defined(DS_BF16)
    if (in_integers(run, w)) {
        const Blocks blocks(w);
        for (long r = 0; r < count; r++) round_row(w, blocks, x[r], t.room + r * rounded_size(w, count), are_few(w, count));
        return;
    }
#endif
    const bool four = w.form == INT4 && is_direct(w), narrows = in_bf16(run, w, count);
    if (count == 1 && is_direct(w)) {
        rearranged(w, x[0], t.room);
        if (w.lows) sum_groups(w, x[0], t.room + whole(w.in));
    } else if (four || narrows) {
        float* last = t.room + (count - 1) * whole(w.in);  // the last row's place holds each in turn
        for (long r = 0; r < count; r++) {
            float* to = narrows ? last : t.room + r * whole(w.in);
            const float* from = four ? rearranged(w, x[r], to) : x[r];
            if (narrows) narrow_as<BF16>((uint16_t*)t.room + r * whole(w.in), from, w.in, false);
        }
    }
}

// y[r][0 .. to - from) = x[r] . rows from .. to of w.
inline void product(
    const Op* op, const Run& run, const Weight& w, long from, long to, const float* const* x, long count, float* const* y,
    Thread& t) {
    if (w.columns) {
        if (w.form == F32) return by_columns<F32>(w, from, to, x, count, y);
        if (w.form == BF16) return by_columns<BF16>(w, from, to, x, count, y);
        return by_columns<F16>(w, from, to, x, count, y);
    }
    prepare(op, run, w, x, count, t);
    const long wide = whole(w.in), groups = w.group ? w.in / w.group : 0;
#if defined(DS_BF16)
    if (in_integers(run, w)) {
        return in_integers(w, from, to, t.room, count, y, t.room + count * wide);
    }
#endif
    float *scales = t.room + count * wide + whole(groups), *lows = nullptr, *rest = scales + whole(2 * (to - from) * groups);
    if (groups && is_direct(w)) {
        const long n = (to - from) * groups;
        widen_as<F16>(scales, w.scales + from * groups, n);
        if (w.lows) widen_as<F16>(lows = scales + n, w.lows + from * groups, n);
    }
    if (count == 1 && is_direct(w)) {
        const float* moved = rearranges(w) ? t.room : x[0];
        for (long j = from; j < to; j += J) {
            long places[J];
            for (int k = 0; k < J; k++) places[k] = least(j + k, to - 1);
            const F4 sums = one_row(w, places, moved, from, scales, lows);
            memcpy(y[0] + (j - from), &sums, (size_t)least(J, to - j) * 4);
        }
        return;
    }
#if defined(DS_BF16)
    if (in_bf16(run, w, count)) {
        const uint16_t* narrow[MOST_ROWS];
        for (long r = 0; r < count; r++) narrow[r] = (const uint16_t*)t.room + r * wide;
        return several<uint16_t>(w, from, to, narrow, count, y, scales, lows, rest);
    }
#endif
    const float* moved[MOST_ROWS];
    for (long r = 0; r < count; r++) moved[r] = w.form == INT4 && is_direct(w) ? t.room + r * wide : x[r];
    several<float>(w, from, to, moved, count, y, scales, lows, rest);
}

}  // namespace
}  // namespace inference
}  // namespace ds
