// Instructions of an inference program, a unit at a time, for the instruction set that the including file names.
#pragma once

#include "attention.h"
#include "products/products.h"

namespace ds {
namespace inference {
namespace {

inline long rows_of(const Run& run, int reg) { return run.kept[reg] ? run.wanted : run.rows; }

inline float* row(const Run& run, int reg, long r) { return run.registers[reg] + r * run.widths[reg]; }

// -- small instructions: a row per unit ----------------------------------------------------------------------------

void embed(const Op& op, const Run& run, long r, Thread& t) {
    const long n = run.widths[op.out];
    float* to = row(run, op.out, r);
    const float* from;
    float scale = op.scale;
    if (op.by == 0 && run.embeds) {
        from = run.embeds + r * n;
        scale = 1;
    } else {
        const int* index = op.by == 0 ? run.tokens : op.by == 1 ? run.positions : run.types;
        const long line = (index ? index[r] : 0) + op.offset;
        from = open((void*)(op.a.data + line * op.a.stride * (op.a.form == F32 ? 4 : 2)), op.a.form, t.room, n);
    }
    each(n, [&](long i, long m) {
        F x = part(from + i, m) * set(scale);
        if (op.accumulate) x += part(to + i, m);
        put(to + i, x, m);
    });
}

void normalize(const Op& op, const Run& run, long r, Thread& t) {
    const long n = run.widths[op.x] / op.groups;
    float* weight = op.bias.data ? open((void*)op.bias.data, op.bias.type, t.room, n) : nullptr;
    float* bias = op.second.data ? open((void*)op.second.data, op.second.type, t.room + n, n) : nullptr;
    for (long g = 0; g < op.groups; g++) {
        const float* x = row(run, op.x, r) + g * n;
        float* to = row(run, op.out, r) + g * n;
        float mean = 0;
        if (op.layer_norm) {
            F sum = {};
            each(n, [&](long i, long m) { sum += part(x + i, m); });
            mean = total(sum) / (float)n;
        }
        F squares = {};
        each(n, [&](long i, long m) {
            F away = part(x + i, m) - set(mean);
            if (m < W) away = first_lanes(away, m);
            squares = fma(away, away, squares);
        });
        const float factor = 1 / __builtin_sqrtf(total(squares) / (float)n + op.eps);
        each(n, [&](long i, long m) {
            F y = (part(x + i, m) - set(mean)) * set(factor);
            if (weight) y *= part(weight + i, m);
            if (bias) y += part(bias + i, m);
            put(to + i, y, m);
        });
    }
}

void rotate(const Op& op, const Run& run, long r, Thread&) {
    const long half = op.dims / 2, at = (long)run.positions[r] * half;
    const float *cos = op.cos + at, *sin = op.sin + at;
    float* x = row(run, op.x, r);
    for (float* end = x + run.widths[op.x]; x < end; x += op.head_dim) {
        if (op.pairs) {
            for (long i = 0; i < half; i++) {
                const float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = a * cos[i] - b * sin[i];
                x[2 * i + 1] = b * cos[i] + a * sin[i];
            }
            continue;
        }
        each(half, [&](long i, long m) {
            const F a = part(x + i, m), b = part(x + half + i, m), c = part(cos + i, m), s = part(sin + i, m);
            put(x + i, a * c - b * s, m);
            put(x + half + i, b * c + a * s, m);
        });
    }
}

void add(const Op& op, const Run& run, long r, Thread& t) {
    const long n = run.widths[op.out];
    const float *x = row(run, op.x, r), *y = row(run, op.y, r);
    const float* bias = op.bias.data ? open((void*)op.bias.data, op.bias.type, t.room, n) : nullptr;
    float* to = row(run, op.out, r);
    each(n, [&](long i, long m) {
        F sum = part(x + i, m) + part(y + i, m);
        if (bias) sum += part(bias + i, m);
        put(to + i, sum, m);
    });
}

void columns(const Op& op, const Run& run, long r, Thread&) {
    const long whole = run.widths[op.x] / op.groups, n = run.widths[op.out] / op.groups;
    for (long g = 0; g < op.groups; g++)
        memcpy(row(run, op.out, r) + g * n, row(run, op.x, r) + g * whole + op.offset, (size_t)n * 4);
}

void keep(const Op& op, const Run& run, long r, Thread&) {
    const long from = run.wants ? (long)run.wants[r] : r;
    memcpy(row(run, op.out, r), row(run, op.x, from), (size_t)run.widths[op.x] * 4);
}

// -- products -------------------------------------------------------------------------------------------------------

void linear(const Op& op, const Run& run, long unit, Thread& t) {
    const long n = rows_of(run, op.x), from = unit * op.unit, to = least(from + op.unit, op.a.out);
    const float* x[MOST_ROWS];
    float* y[MOST_ROWS];
    const bool apart = op.added == op.out;  // the sum is added to what stands where the product would
    float* room = t.room + room_of_product(op.a, op.unit, n);
    for (long r = 0; r < n; r++) {
        x[r] = row(run, op.x, r);
        y[r] = apart ? room + r * op.unit : row(run, op.out, r) + from;
    }
    product(&op, run, op.a, from, to, x, n, y, t);
    for (long r = 0; r < n; r++)
        completed(op, y[r], from, op.added < 0 ? nullptr : row(run, op.added, r) + from, row(run, op.out, r) + from, to - from);
}

void gated(const Op& op, const Run& run, long unit, Thread& t) {
    const long n = rows_of(run, op.x), from = unit * op.unit, to = least(from + op.unit, op.a.out);
    const float* x[MOST_ROWS];
    float *y[MOST_ROWS], *z[MOST_ROWS], *room = t.room + room_of_product(op.a, op.unit, n);
    for (long r = 0; r < n; r++) {
        x[r] = row(run, op.x, r);
        y[r] = room + r * op.unit;
        z[r] = row(run, op.out, r) + from;
    }
    const bool alike = prepared_alike(op.a, op.b);
    product(alike ? &op : nullptr, run, op.a, from, to, x, n, y, t);
    product(alike ? &op : nullptr, run, op.b, from, to, x, n, z, t);
    for (long r = 0; r < n; r++) gate(op, y[r], z[r], from, z[r], to - from);
}

// -- experts --------------------------------------------------------------------------------------------------------

// op.out: for each row, top_k numbers of experts, then their shares.
void route(const Op& op, const Run& run, long r, Thread& t) {
    const long n = op.a.out, k = op.top_k;
    const float* x = row(run, op.x, r);
    float *scores = t.room + room_of_product(op.a, n, 1), *chosen = row(run, op.out, r), *shares = chosen + k;
    product(nullptr, run, op.a, 0, n, &x, 1, &scores, t);
    float most = scores[0], sum = 0, kept = 0;
    for (long e = 1; e < n; e++) most = scores[e] > most ? scores[e] : most;
    for (long e = 0; e < n; e++) sum += scores[e] = exponential(set(scores[e] - most))[0];
    for (long c = 0; c < k; c++) {
        long best = 0;
        for (long e = 1; e < n; e++) best = scores[e] > scores[best] ? e : best;
        chosen[c] = (float)best;
        kept += shares[c] = scores[best] / sum;
        scores[best] = -1;
    }
    for (long c = 0; c < k && op.normalize; c++) shares[c] /= kept;
}

// The rows that chose expert `e`: which of their choices, as places in op.y's registers.
inline long takers(const Op& op, const Run& run, long e, long* rows, long* choices) {
    long n = 0;
    for (long r = 0; r < rows_of(run, op.y); r++)
        for (long c = 0; c < op.top_k; c++)
            if ((long)row(run, op.y, r)[c] == e + op.first) {
                rows[n] = r;
                choices[n++] = c;
            }
    return n;
}

// x: rows, y: choices, out: the inner values of each row's experts side by side.
void experts_in(const Op& op, const Run& run, long unit, Thread& t) {
    const long inner = op.gates[0].out, parts = (inner + op.unit - 1) / op.unit, e = unit / parts;
    const long from = unit % parts * op.unit, to = least(from + op.unit, inner);
    long rows[MOST_ROWS], choices[MOST_ROWS];
    const long n = takers(op, run, e, rows, choices);
    if (!n) return;
    const float* x[MOST_ROWS];
    float *y[MOST_ROWS], *z[MOST_ROWS], *room = t.room + room_of_product(op.gates[e], op.unit, n);
    for (long i = 0; i < n; i++) {
        x[i] = row(run, op.x, rows[i]);
        y[i] = room + i * op.unit;
        z[i] = row(run, op.out, rows[i]) + choices[i] * inner + from;
    }
    product(nullptr, run, op.gates[e], from, to, x, n, y, t);
    product(nullptr, run, op.ups[e], from, to, x, n, z, t);
    for (long i = 0; i < n; i++) gate(op, y[i], z[i], from, z[i], to - from);
}

// x: the inner values, y: choices.
void experts_out(const Op& op, const Run& run, long unit, Thread& t) {
    const long from = unit * op.unit, to = least(from + op.unit, run.widths[op.out]);
    for (long r = 0; r < rows_of(run, op.out); r++) memset(row(run, op.out, r) + from, 0, (size_t)(to - from) * 4);
    for (long e = 0; e < op.experts; e++) {
        long rows[MOST_ROWS], choices[MOST_ROWS];
        const long n = takers(op, run, e, rows, choices);
        const Weight& w = op.downs[e];
        const float* x[MOST_ROWS];
        float *y[MOST_ROWS], *room = t.room + room_of_product(w, op.unit, n);
        for (long i = 0; i < n; i++) {
            x[i] = row(run, op.x, rows[i]) + choices[i] * w.in;
            y[i] = room + i * op.unit;
        }
        if (n) product(nullptr, run, w, from, to, x, n, y, t);
        for (long i = 0; i < n; i++) {
            const F share = set(row(run, op.y, rows[i])[op.top_k + choices[i]]);
            float* sum = row(run, op.out, rows[i]) + from;
            each(to - from, [&](long j, long m) { put(sum + j, fma(share, part(y[i] + j, m), part(sum + j, m)), m); });
        }
    }
}

void unit(const Op& op, const Run& run, long number, Thread& t) {
    if (op.kind != LINEAR && op.kind != GATED) t.prepared = nullptr;
    switch (op.kind) {
        case EMBED: return embed(op, run, number, t);
        case NORMALIZE: return normalize(op, run, number, t);
        case LINEAR: return linear(op, run, number, t);
        case GATED: return gated(op, run, number, t);
        case ROTATE: return rotate(op, run, number, t);
        case STORE: return store_rows(op, run, number);
        case ATTEND: return attend(op, run, number, t);
        case ROUTE: return route(op, run, number, t);
        case EXPERTS_IN: return experts_in(op, run, number, t);
        case EXPERTS_OUT: return experts_out(op, run, number, t);
        case ADD: return add(op, run, number, t);
        case COLUMNS: return columns(op, run, number, t);
        case KEEP: return keep(op, run, number, t);
    }
}

// -- for products that torch makes ----------------------------------------------------------------------------------

void widen_rows(const Weight& w, long first, long last, void* to, int type, float* room) {
    for (long j = first; j < last; j++) {
        char* at = (char*)to + (j - first) * w.in * (type == F32 ? 4 : 2);
        if (type == F32) {
            widen_row(w, j, (float*)at, room);
        } else {
            widen_row(w, j, room, room + w.in);
            narrow(at, room, type, w.in);
        }
    }
}

void finish(const Op& op, const void* y, const void* second, int type, const float* added, float* to, long n) {
    // A piece at a time: 16-bit products are widened into `a` and `b`.
    float a[512], b[512];
    for (long i = 0; i < n; i += 512) {
        const long m = least(512, n - i), size = type == F32 ? 4 : 2;
        const float* gates = open((void*)((const char*)y + i * size), type, a, m);
        if (second) gate(op, gates, open((void*)((const char*)second + i * size), type, b, m), i, to + i, m);
        else completed(op, gates, i, added ? added + i : nullptr, to + i, m);
    }
}

void narrow_some(void* to, const float* from, int type, long n) {
    if (type == F32) memcpy(to, from, (size_t)n * 4);
    else narrow(to, from, type, n);
}

}  // namespace

extern const Table DS_ISA;
const Table DS_ISA = {DS_NAME, W, &unit, &widen_rows, &finish, &narrow_some};

}  // namespace inference
}  // namespace ds
