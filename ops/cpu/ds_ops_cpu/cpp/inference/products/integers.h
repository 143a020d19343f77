// Products of weights in 8 and 4 bits with x in 8 bits, in whole numbers: four products and their sum per lane (VNNI).
//
// [Note: rounding x] Each X_BLOCK of x is rounded to whole numbers of 8 bits of a scale of its own; few rows, which wait for
// memory, to 16 bits, which are multiplied as two of 8. Weights become numbers without sign, q + offset, as the instruction
// wants. A block's share of a product is then
//     scale of w * scale of x * (sum of (q + offset) * x - offset * sum of x) + low * scale of x * sum of x.
//
// [Note: 16 rows of weights] With few rows of x, a vector is 64 weights of one row. With more, a lane is a row of weights,
// of which it takes four at a time, so that nothing is left to add across lanes; 16 rows of weights are put into that
// order in the first-level cache, once for all rows of x.
#pragma once

#include "unpack.h"

#if defined(DS_BF16)  // such processors have VNNI

namespace ds {
namespace inference {
namespace {

constexpr long X_BLOCK = 32;
// Bytes, into the second-level cache: the first level waits for few lines at a time, fewer than memory takes to answer.
constexpr long FAR_AHEAD = 16384;

inline bool in_integers(const Run& run, const Weight& w) {
    return run.bf16 && w.group && w.group % X_BLOCK == 0 && W % (w.group / X_BLOCK) == 0 && w.in % (2 * X_BLOCK) == 0;
}

// What division gives, once for a product.
struct Blocks {
    long of_row, groups, each;  // blocks of a row, its groups, blocks of a group
    __m512i which;              // group of each of W blocks
    __mmask16 of_last;          // groups of the last W blocks

    explicit Blocks(const Weight& w) : of_row(w.in / X_BLOCK), groups(w.in / w.group), each(w.group / X_BLOCK) {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        which = _mm512_srli_epi32(lanes, (unsigned)__builtin_ctzl((unsigned long)each));
        of_last = (__mmask16)((1u << (((of_row - 1) % W + 1) / each)) - 1);
    }
    long padded() const { return (of_row + W - 1) / W * W; }

    // Scales or lows, of a row whose begin at `from`, of the W blocks from `block` on.
    inline F factors(const uint16_t* from, long block) const {
        const bool all = block + W <= of_row;
        if (each == 1 && all) return from_f16_of(from + block);
        const __m256i found = _mm256_maskz_loadu_epi16(all ? (__mmask16)((1u << (W / each)) - 1) : of_last, from + block / each);
        return _mm512_permutexvar_ps(which, _mm512_cvtph_ps(found));
    }

    static inline F from_f16_of(const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
};

// Whether so many rows of x are few.
inline bool are_few(const Weight& w, long count) { return count < (w.form == INT4 ? 4 : 5); }

// Floats from one row of x to the next.
inline long rounded_size(const Weight& w, long count) { return (are_few(w, count) ? 2 : 1) * whole(w.in); }

// A row of x; of 16 bits, x is 256 * bytes + lower. Per block, with zeros up to a whole vector: its scale; -offset * sum of x; scale * sum of x.
struct Rounded {
    int8_t *bytes, *lower;
    float *scales, *offsets, *sums;

    Rounded(const float* room, const Weight& w, const Blocks& blocks, bool few) : bytes((int8_t*)room), lower(few ? bytes + w.in : nullptr) {
        scales = (float*)(bytes + (few ? 2 : 1) * w.in);
        offsets = scales + blocks.padded();
        sums = offsets + blocks.padded();
    }
};

// 32 bytes, the lowest of each lane, at `to`; `apart`: those at even places there, those at odd places X_BLOCK on.
inline void put_bytes(int8_t* to, __m512i low, __m512i high, bool apart) {
    const __m128i a = _mm512_cvtepi32_epi8(low), c = _mm512_cvtepi32_epi8(high), byte = _mm_set1_epi16(255);
    const __m128i even = _mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(c, byte));
    const __m128i odd = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(c, 8));
    _mm_storeu_si128((__m128i*)to, apart ? even : a);
    _mm_storeu_si128((__m128i*)(to + (apart ? X_BLOCK : W)), apart ? odd : c);
}

// Room: `rounded_size` floats. Of 4 bits those at even places of each 64 come first.
inline void round_row(const Weight& w, const Blocks& blocks, const float* x, float* room, bool few) {
    const Rounded to(room, w, blocks, few);
    const bool four = w.form == INT4;
    const float offset = w.lows ? 0 : four ? 8 : 128, most = few ? 127 * 256 : 127;
    long b = 0;
    for (; b < blocks.of_row; b++, x += X_BLOCK) {
        const F first = load(x), second = load(x + W);
        const float scale = largest(larger(larger(first, -first), larger(second, -second))) / most;
        const F inverse = set(scale > 0 ? 1 / scale : 0);
        __m512i low = _mm512_cvtps_epi32(first * inverse), high = _mm512_cvtps_epi32(second * inverse);
        const float sum = (float)_mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
        const long at = four ? b / 2 * 2 * X_BLOCK + b % 2 * W : b * X_BLOCK;
        if (few) {
            put_bytes(to.lower + at, low, high, four);  // with a sign; what it takes away the upper bytes are more
            const __m512i half = _mm512_set1_epi32(128);
            low = _mm512_srai_epi32(_mm512_add_epi32(low, half), 8);
            high = _mm512_srai_epi32(_mm512_add_epi32(high, half), 8);
        }
        put_bytes(to.bytes + at, low, high, four);
        to.scales[b] = scale;
        to.offsets[b] = -offset * sum;
        to.sums[b] = scale * sum;
    }
    for (; b < blocks.padded(); b++) to.scales[b] = to.offsets[b] = to.sums[b] = 0;
}

// -- few rows of x ---------------------------------------------------------------------------------------------------

// Products of a row of w, which begins at `at`, with x; to be added across lanes.
template <bool FOUR, bool LOWS>
inline F one_line(const char* at, const Blocks& blocks, const uint16_t* scales, const uint16_t* lows, const Rounded& x) {
    const __m512i flip = _mm512_set1_epi8(FOUR ? 8 : -128), half = _mm512_set1_epi8(15);
    const __m512i shifts = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
    // Which block of two a lane belongs to.
    const __m512i pair = FOUR ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1)
                              : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const int8_t *bytes = x.bytes, *lower = x.lower;
    F sum = {}, more = {};
    for (long block = 0; block < blocks.of_row; block += W) {
        const F scale = blocks.factors(scales, block) * load(x.scales + block);
        if (LOWS) more = fma(blocks.factors(lows, block), load(x.sums + block), more);
        else more = fma(scale, load(x.offsets + block), more);
        const auto two = [&](int v) __attribute__((always_inline)) {
            __m512i q;
            if (!FOUR || v % 2 == 0) __builtin_prefetch(at + (FOUR ? 32 : 64) * v + FAR_AHEAD, 0, 2);
            if (FOUR) {
                q = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(at + 32 * v)));
                q = _mm512_and_si512(_mm512_srlv_epi64(q, shifts), half);
            } else {
                q = _mm512_loadu_si512(at + 64 * v);
            }
            if (!LOWS) q = _mm512_xor_si512(q, flip);
            __m512i found = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, _mm512_loadu_si512(bytes + 64 * v));
            found = _mm512_dpbusd_epi32(_mm512_slli_epi32(found, 8), q, _mm512_loadu_si512(lower + 64 * v));
            const F by = _mm512_permutexvar_ps(_mm512_add_epi32(pair, _mm512_set1_epi32(2 * v)), scale);
            sum = fma(_mm512_cvtepi32_ps(found), by, sum);
        };
        if (block + W <= blocks.of_row) two(0), two(1), two(2), two(3), two(4), two(5), two(6), two(7);
        else
            for (int v = 0; v < (blocks.of_row - block) / 2; v++) two(v);
        at += FOUR ? W * X_BLOCK / 2 : W * X_BLOCK;
        bytes += W * X_BLOCK;
        lower += W * X_BLOCK;
    }
    return sum + more;
}

// For each J rows of weights all rows of x in turn.
template <bool FOUR, bool LOWS>
inline void few_in_integers(
    const Weight& w, const Blocks& blocks, long from, long to, const Rounded* x, long count, float* const* y) {
    const long size = FOUR ? w.in / 2 : w.in;
    for (long j = from; j < to; j += J) {
        for (long r = 0; r < count; r++) {
            F sums[J];
            for (int k = 0; k < J; k++) {
                const long place = least(j + k, to - 1), first = place * blocks.groups;
                const uint16_t* lows = LOWS ? w.lows + first : nullptr;
                sums[k] = one_line<FOUR, LOWS>(w.data + place * size, blocks, w.scales + first, lows, x[r]);
            }
            const F4 all = totals(sums[0], sums[1], sums[2], sums[3]);
            memcpy(y[r] + (j - from), &all, (size_t)least(J, to - j) * 4);
        }
    }
}

// -- several rows of x -------------------------------------------------------------------------------------------------

// Lane k of row i becomes lane i of row k.
inline void transpose(__m512i (&rows)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// 16 rows of weights: for each four bytes of a row a vector of those of all rows; scales and lows by block.
struct Sixteen {
    __m512i* q;
    F *scales, *lows;

    Sixteen(float* room, const Weight& w) {
        q = (__m512i*)(((uintptr_t)room + 63) / 64 * 64);
        scales = (F*)(q + w.in / (w.form == INT4 ? 8 : 4));
        lows = scales + w.in / X_BLOCK;
    }
};

inline void factors_of_rows(const Blocks& blocks, const uint16_t* from, const long (&places)[16], F* to) {
    for (long block = 0; block < blocks.of_row; block += W) {
        __m512i rows[16];
        for (int k = 0; k < 16; k++) rows[k] = (__m512i)blocks.factors(from + places[k] * blocks.groups, block);
        transpose(rows);
        for (long b = 0; b < least(W, blocks.of_row - block); b++) to[block + b] = (F)rows[b];
    }
}

// Rows from j on of w; in the place of those from `end` on the last one again.
inline void collect(const Weight& w, const Blocks& blocks, long j, long end, const Sixteen& to) {
    long places[16];
    for (int k = 0; k < 16; k++) places[k] = least(j + k, end - 1);
    factors_of_rows(blocks, w.scales, places, to.scales);
    if (w.lows) factors_of_rows(blocks, w.lows, places, to.lows);
    const bool four = w.form == INT4;
    const long size = four ? w.in / 2 : w.in;
    const __m512i flip = _mm512_set1_epi8(w.lows ? 0 : four ? (char)0x88 : -128);
    __m512i rows[16];
    long i = 0;
    for (; i + 64 <= size; i += 64) {
        for (int k = 0; k < 16; k++) rows[k] = _mm512_loadu_si512(w.data + places[k] * size + i);
        transpose(rows);
        for (int v = 0; v < 16; v++) to.q[i / 4 + v] = _mm512_xor_si512(rows[v], flip);
    }
    if (i == size) return;
    for (int k = 0; k < 16; k++) rows[k] = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(w.data + places[k] * size + i)));
    transpose(rows);
    for (int v = 0; v < 8; v++) to.q[i / 4 + v] = _mm512_xor_si512(rows[v], flip);
}

// Products of 16 rows of weights with R rows of x. soon: the rows that are collected next, or null.
template <bool FOUR, bool LOWS, int R>
inline void sixteen(long blocks, const Sixteen& from, const Rounded* x, F* sums, const char* soon) {
    F s[R] = {};
    const __m512i half = _mm512_set1_epi8(15);
    for (long b = 0; b < blocks; b++) {
        __m512i q[8];
        for (int v = 0; v < (FOUR ? 4 : 8); v++) {
            q[v] = from.q[(FOUR ? 4 : 8) * b + v];
            if (!FOUR) continue;
            q[v + 4] = _mm512_and_si512(_mm512_srli_epi16(q[v], 4), half);
            q[v] = _mm512_and_si512(q[v], half);
        }
        if (soon) prefetch(soon + b * (FOUR ? 256 : 512), FOUR ? 256 : 512);
        const F scale = from.scales[b];
        const long at = FOUR ? b / 2 * 2 * X_BLOCK + b % 2 * W : b * X_BLOCK;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const int8_t* bytes = x[r].bytes + at;
            __m512i sum = _mm512_setzero_si512();
            for (int v = 0; v < 8; v++) {
                int four;
                memcpy(&four, bytes + (FOUR && v > 3 ? X_BLOCK + 4 * (v - 4) : 4 * v), 4);
                sum = _mm512_dpbusd_epi32(sum, q[v], _mm512_set1_epi32(four));
            }
            F found = _mm512_cvtepi32_ps(sum);
            if (!LOWS) found += set(x[r].offsets[b]);
            s[r] = fma(found, scale * set(x[r].scales[b]), s[r]);
            if (LOWS) s[r] = fma(from.lows[b], set(x[r].sums[b]), s[r]);
        }
    }
    for (int r = 0; r < R; r++) sums[r] = s[r];
}

template <bool FOUR, bool LOWS>
inline void several_in_integers(
    const Weight& w, const Blocks& blocks, long from, long to, const Rounded* x, long count, float* const* y, float* room) {
    const Sixteen block(room, w);
    for (long j = from; j < to; j += W) {
        collect(w, blocks, j, to, block);
        const long real = least(W, to - j);
        long r = 0;
        const char* soon = line(w, j + W);
        const auto some = [&](auto fn, int n) {
            F sums[16];
            fn(blocks.of_row, block, x + r, sums, r ? nullptr : soon);
            for (int i = 0; i < n; i++) put(y[r + i] + (j - from), sums[i], real);
            r += n;
        };
        while (r + 12 <= count) some(sixteen<FOUR, LOWS, 12>, 12);
        if (r + 8 <= count) some(sixteen<FOUR, LOWS, 8>, 8);
        if (r + 4 <= count) some(sixteen<FOUR, LOWS, 4>, 4);
        if (r + 2 <= count) some(sixteen<FOUR, LOWS, 2>, 2);
        if (r < count) some(sixteen<FOUR, LOWS, 1>, 1);
    }
}

template <bool FOUR, bool LOWS>
inline void products_in_integers(
    const Weight& w, const Blocks& blocks, long from, long to, const Rounded* x, long count, float* const* y, float* room) {
    if (are_few(w, count)) few_in_integers<FOUR, LOWS>(w, blocks, from, to, x, count, y);
    else several_in_integers<FOUR, LOWS>(w, blocks, from, to, x, count, y, room);
}

// y[r][0 .. to - from) = x[r] . rows from .. to of w; rounded: each x[r], by `round_row`.
inline void in_integers(
    const Weight& w, long from, long to, const float* rounded, long count, float* const* y, float* room) {
    const Blocks blocks(w);
    alignas(Rounded) char places[MOST_ROWS * sizeof(Rounded)];
    Rounded* x = (Rounded*)places;
    for (long r = 0; r < count; r++) x[r] = Rounded(rounded + r * rounded_size(w, count), w, blocks, are_few(w, count));
    const bool lows = w.lows;
    const auto fn = w.form == INT8 ? lows ? products_in_integers<false, true> : products_in_integers<false, false>
                                   : lows ? products_in_integers<true, true> : products_in_integers<true, false>;
    fn(w, blocks, from, to, x, count, y, room);
}

}  // namespace
}  // namespace inference
}  // namespace ds

#endif
