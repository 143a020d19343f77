// Attention of the queries of a task to the keys of one key head, block by block of the cache.
#pragma once

#include "maths.h"

namespace ds {
namespace inference {
namespace {

constexpr long B = BLOCK_TOKENS;

inline long padded(long dim) { return (dim + W - 1) / W * W; }

inline char* in_cache(char* arena, const Op& op, const Run& run, int sequence, long token, long kv) {
    const long block = run.blocks[sequence * run.blocks_stride + token / B];
    const long place = ((op.layer * run.cache_blocks + block) * op.kv_heads + kv) * B + token % B;
    return arena + place * op.head_dim * (run.cache_type == F32 ? 4 : 2);
}

inline void put_in_cache(const Op& op, const Run& run, int sequence, long token, long r, long kv) {
    const long at = r * op.kv_heads * op.head_dim + kv * op.head_dim;
    const float *k = run.registers[op.y] + at, *v = run.registers[op.v] + at;
    char *keys = in_cache(run.keys, op, run, sequence, token, kv), *values = in_cache(run.values, op, run, sequence, token, kv);
    if (run.cache_type == F32) {
        memcpy(keys, k, (size_t)op.head_dim * 4);
        memcpy(values, v, (size_t)op.head_dim * 4);
    } else {
        narrow(keys, k, run.cache_type, op.head_dim);
        narrow(values, v, run.cache_type, op.head_dim);
    }
}

// run.store_rows: for each such row its number, sequence and token.
void store_rows(const Op& op, const Run& run, long unit) {
    const int* at = run.store_rows + 3 * unit;
    for (long kv = 0; kv < op.kv_heads; kv++) put_in_cache(op, run, at[1], at[2], at[0], kv);
}

// Keys or values in rows of `stride` elements. soon: as many bytes that are asked for while these are read, or null.
struct Tokens {
    const void* at;
    int type;
    long stride;
    const char* soon;
};

// B keys or values from `token` on: where they are, or in fp32 in `room` in rows of `padded(dim)`, when rows are not whole
// vectors or are to be read `often`.
inline Tokens some_tokens(
    char* arena, int reg, const Op& op, const Run& run, int sequence, long token, long count, long kv, bool often, float* room) {
    const long dim = op.head_dim, wide = padded(dim);
    Tokens from{nullptr, arena ? run.cache_type : (int)F32, arena ? dim : op.kv_heads * dim, nullptr};
    if (arena) from.at = in_cache(arena, op, run, sequence, token, kv);
    else from.at = run.registers[reg] + (run.starts[sequence] + token) * from.stride + kv * dim;
    if (dim == wide && (from.type == F32 || !often)) return from;
    for (long t = 0; t < count; t++) {
        const char* at = (const char*)from.at + t * from.stride * size_of(from.type);
        if (from.type == F32) memcpy(room + t * wide, at, (size_t)dim * 4);
        else widen(room + t * wide, at, from.type, dim);
    }
    return {room, F32, wide, nullptr};
}

#if defined(DS_AVX512)
constexpr int HEADS = 4;  // that are worked on together, in registers
#else
constexpr int HEADS = 2;
#endif

// Scores of Q queries, one after the other at `q`, with `count` keys.
template <int T, int Q>
inline void scores_of(
    const float* q, const typename Of<T>::element* keys, long stride, long count, long wide, const char* soon, float (*scores)[B]) {
    for (long t = 0; t < count; t += 4) {
        const typename Of<T>::element* k[4];
        for (int j = 0; j < 4; j++) k[j] = keys + least(t + j, count - 1) * stride;
        if (soon) prefetch(soon + t * wide * size_of(T), 4 * wide * size_of(T));
        F s[Q][4] = {};
        for (long i = 0; i < wide; i += W) {
            F v[4];
            for (int j = 0; j < 4; j++) v[j] = Of<T>::get(k[j] + i);
            for (int n = 0; n < Q; n++) {
                const F u = load(q + n * wide + i);
                for (int j = 0; j < 4; j++) s[n][j] = fma(v[j], u, s[n][j]);
            }
        }
        for (int n = 0; n < Q; n++) {
            const F4 sums = totals(s[n][0], s[n][1], s[n][2], s[n][3]);
            memcpy(scores[n] + t, &sums, sizeof sums);
        }
    }
}

// What is summed up of a query: the largest score, the sum of shares, the weighted values; the next query's is `wanted` on.
constexpr long MOST = 0, SHARES = 1, VALUES = 2;

// The values, each by its share, are added to what is there, times `scale`.
template <int T, int Q, int N>
inline void weigh(
    const float (*p)[B], const typename Of<T>::element* values, long stride, long count, const char* soon,
    const float* scale, float* sums, long wanted) {
    F s[Q][N];
    for (int n = 0; n < Q; n++)
        for (int i = 0; i < N; i++) s[n][i] = load(sums + n * wanted + i * W) * set(scale[n]);
    for (long t = 0; t < count; t++) {
        F v[N];
        if (soon) prefetch(soon + t * N * W * size_of(T), N * W * size_of(T));
        for (int i = 0; i < N; i++) v[i] = Of<T>::get(values + t * stride + i * W);
        for (int n = 0; n < Q; n++)
            for (int i = 0; i < N; i++) s[n][i] = fma(set(p[n][t]), v[i], s[n][i]);
    }
    for (int n = 0; n < Q; n++)
        for (int i = 0; i < N; i++) store(sums + n * wanted + i * W, s[n][i]);
}

// Q queries of one row, of heads that share keys.
template <int T, int Q>
inline void attend_block(
    const Op& op, const float* q, const int* heads, long at, long first, long count, const Tokens& keys, const Tokens& values,
    long wide, float* sums, long wanted) {
    typedef const typename Of<T>::element* E;
    const long last = op.causal ? least(first + count, at + 1) : first + count;
    long begin = op.window > 0 && at - op.window + 1 > first ? at - op.window + 1 : first;
    if (begin >= last) return;
    begin -= first;
    const long n = last - first - begin;
    alignas(64) float p[Q][B];
    float scales[Q];
    scores_of<T, Q>(q, (E)keys.at + begin * keys.stride, keys.stride, n, wide, keys.soon, p);
    const F places = counting();
    for (int k = 0; k < Q; k++) {
        float* own = sums + k * wanted;
        F top = set(own[MOST]), sum = {};
        for (long t = 0; t < n; t += W) {
            F x = load(p[k] + t) * set(op.scale);
            if (op.slopes) x = fma(set(op.slopes[heads[k]]), places + set((float)(first + begin + t - at)), x);
            x = places < set((float)(n - t)) ? x : set(-__builtin_inff());
            top = larger(top, x);
            store(p[k] + t, x);
        }
        const float most = largest(top);
        for (long t = 0; t < n; t += W) {
            const F e = exponential(load(p[k] + t) - set(most));
            store(p[k] + t, e);
            sum += e;
        }
        scales[k] = exponential(set(own[MOST] - most))[0];
        own[SHARES] = own[SHARES] * scales[k] + total(sum);
        own[MOST] = most;
    }
    const E from = (E)values.at + begin * values.stride;
    long i = 0;
    for (; i + 4 * W <= wide; i += 4 * W) {
        const char* soon = values.soon ? values.soon + i * n * size_of(T) : nullptr;
        weigh<T, Q, 4>(p, from + i, values.stride, n, soon, scales, sums + VALUES + i, wanted);
    }
    for (; i < wide; i += W) weigh<T, Q, 1>(p, from + i, values.stride, n, nullptr, scales, sums + VALUES + i, wanted);
}

// All `heads` of a row that share keys.
template <int T>
inline void attend_row(
    const Op& op, const float* q, const int* heads, long heads_count, long at, long first, long count, Tokens keys,
    Tokens values, long wide, float* sums, long wanted) {
    const auto some = [&](auto fn, int n) {
        fn(op, q, heads, at, first, count, keys, values, wide, sums, wanted);
        q += n * wide;
        heads += n;
        heads_count -= n;
        keys.soon = values.soon = nullptr;
        sums += n * wanted;
    };
    while (heads_count >= HEADS) some(attend_block<T, HEADS>, HEADS);
    if (HEADS == 4 && heads_count == 3) some(attend_block<T, 3>, 3);
    if (HEADS == 4 && heads_count == 2) some(attend_block<T, 2>, 2);
    if (heads_count) some(attend_block<T, 1>, 1);
}

// Adds what the parts of a context gave for one query, in their order; they are used up.
inline void merge(float* parts, long step, int count, long dim, float* to) {
    float most = parts[MOST], shares = 0;
    for (int p = 1; p < count; p++) most = parts[p * step + MOST] > most ? parts[p * step + MOST] : most;
    for (int p = 0; p < count; p++) {
        float& factor = parts[p * step + MOST];
        factor = exponential(set(factor - most))[0];
        shares += parts[p * step + SHARES] * factor;
    }
    for (long i = 0; i < dim; i += W) {
        F sum = {};
        for (int p = 0; p < count; p++) sum = fma(set(parts[p * step + MOST]), load(parts + p * step + VALUES + i), sum);
        put(to + i, sum / set(shares), least(W, dim - i));
    }
}

void attend(const Op& op, const Run& run, long unit, Thread& t) {
    const Task& task = run.tasks[op.number][unit / op.kv_heads];
    const long kv = unit % op.kv_heads, dim = op.head_dim, wide = padded(dim);
    const int* heads = op.order + op.first_of[kv];
    const long count = op.first_of[kv + 1] - op.first_of[kv], queries = (task.last - task.first) * count;
    if (!count) return;
    const bool cached = run.keys && op.layer >= 0;
    const long start = run.starts[task.sequence], rows = run.starts[task.sequence + 1] - start;
    const long length = cached ? run.lengths[task.sequence] : rows;
    if (cached && rows == 1 && task.to == length) put_in_cache(op, run, task.sequence, length - 1, start, kv);
    const long wanted = 2 + wide;
    float *k_room = t.room, *v_room = k_room + B * wide, *q_room = v_room + B * wide, *sums = q_room + queries * wide;
    if (dim != wide) memset(k_room, 0, (size_t)(2 * B * wide) * 4);
    for (long n = 0; n < queries; n++) {
        const float* q = run.registers[op.x] + (task.first + n / count) * op.heads * dim + heads[n % count] * dim;
        memset(q_room + n * wide, 0, (size_t)wide * 4);
        memcpy(q_room + n * wide, q, (size_t)dim * 4);
        sums[n * wanted] = -__builtin_inff();
        memset(sums + n * wanted + 1, 0, (size_t)(1 + wide) * 4);
    }
    const bool often = task.last - task.first > 1;
    for (long first = task.from; first < task.to; first += B) {
        const long tokens = least(B, task.to - first);
        char *keys_of = cached ? run.keys : nullptr, *values_of = cached ? run.values : nullptr;
        Tokens keys = some_tokens(keys_of, op.y, op, run, task.sequence, first, tokens, kv, often, k_room);
        Tokens values = some_tokens(values_of, op.v, op, run, task.sequence, first, tokens, kv, often, v_room);
        if (cached && !often && dim == wide) {  // blocks lie apart in memory
            keys.soon = (const char*)values.at;
            if (first + B < task.to) values.soon = in_cache(keys_of, op, run, task.sequence, first + B, kv);
        }
        const auto one = keys.type == F32 ? attend_row<F32> : keys.type == BF16 ? attend_row<BF16> : attend_row<F16>;
        for (long r = task.first; r < task.last; r++) {
            const long n = (r - task.first) * count, at = length - rows + (r - start);
            one(op, q_room + n * wide, heads, count, at, first, tokens, keys, values, wide, sums + n * wanted, wanted);
        }
    }
    const auto place = [&](long n) {
        return run.registers[op.out] + (task.first + n / count) * op.heads * dim + heads[n % count] * dim;
    };
    if (task.parts == 1) {
        for (long n = 0; n < queries; n++) merge(sums + n * wanted, 0, 1, dim, place(n));
        return;
    }
    // partial: [part][head of all][most, shares, values]
    const long step = op.heads * wanted;
    float* mine = run.partials + task.partial + task.part * step;
    for (long n = 0; n < queries; n++) memcpy(mine + heads[n % count] * wanted, sums + n * wanted, (size_t)wanted * 4);
    int* finished = &run.finished[op.number][task.group * op.kv_heads + kv];
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) != task.parts) return;
    for (long n = 0; n < queries; n++)
        merge(run.partials + task.partial + heads[n % count] * wanted, step, task.parts, dim, place(n));
}

}  // namespace
}  // namespace inference
}  // namespace ds
