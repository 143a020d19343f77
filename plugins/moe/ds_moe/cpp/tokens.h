// What is done to tokens on their way to experts and back, each in one pass over memory: who goes where, and weighted sums
// of what experts gave with their gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr long WORTH = 32768;  // elements from which on a second thread pays

// -- the plan: choices sorted by expert, by counting ----------------------------------------------------------------------

// How often each expert is chosen; counts: [num + 1], choices that were dropped first. False for one that there is not.
bool count(const int64_t* experts, long choices, long num, int64_t* counts) {
    std::fill_n(counts, num + 1, 0);
    for (long i = 0; i < choices; i++) {
        if (experts[i] < -1 || experts[i] >= num) return false;
        counts[experts[i] + 1]++;
    }
    return true;
}

// experts[tokens * k], in 0 .. num - 1, or -1 for a choice that was dropped. counts: what `count` gave. order, rows,
// choices, places: as many as are not dropped, see ds_moe.dispatch.Plan. begins: [tokens]. choices and begins may be null
// where they are not wanted.
void plan(const int64_t* experts, long tokens, long k, long num, const int64_t* counts, int64_t* order, int64_t* rows,
          int64_t* choices, int64_t* places, int64_t* begins) {
    std::vector<int64_t> next((size_t)num);
    for (long e = 1; e < num; e++) next[(size_t)e] = next[(size_t)e - 1] + counts[e];
    int64_t kept = 0;
    for (long t = 0; t < tokens; t++) {
        if (begins) begins[t] = kept;
        for (long i = t * k; i < (t + 1) * k; i++) {
            if (experts[i] < 0) continue;
            const int64_t place = next[(size_t)experts[i]]++;
            order[place] = i;
            rows[place] = t;
            if (choices) choices[kept] = i;
            places[kept++] = place;
        }
    }
}

// -- weighted sums ---------------------------------------------------------------------------------------------------------

// out[i] (+)= weight * y.
CLONES void sum_row(const float* y, float weight, float* out, long n, bool first) {
    if (first) {
#pragma omp simd
        for (long i = 0; i < n; i++) out[i] = weight * y[i];
    } else {
#pragma omp simd
        for (long i = 0; i < n; i++) out[i] += weight * y[i];
    }
}

// Of each token, the sum of rows places[j] of y, times weights[j] (null: 1), over its choices j: from begins[token] to
// where the next token's begin; `count` in all. begins null: each token has one.
void sums(const float* y, const int64_t* places, const int64_t* begins, const float* weights, float* out, long tokens,
          long count, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * width > WORTH)
    for (long t = 0; t < tokens; t++) {
        const long low = begins ? begins[t] : t, high = !begins ? t + 1 : t + 1 < tokens ? begins[t + 1] : count;
        if (low == high) std::fill_n(out + t * width, width, 0.0f);
        for (long j = low; j < high; j++)
            sum_row(y + places[j] * width, weights ? weights[j] : 1.0f, out + t * width, width, j == low);
    }
}

// out = weight * grad; returns the weight's own gradient, grad . y.
CLONES float weigh_row(const float* grad, const float* y, float weight, float* out, long n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) {
        out[i] = weight * grad[i];
        sum += grad[i] * y[i];
    }
    return sum;
}

// Row i of `y` went to token rows[i], with the weight at order[i]. One pass over memory where separate steps take four.
void weigh_back(const float* grad, const float* y, const float* weights, const int64_t* rows, const int64_t* order,
                float* of_y, float* of_weights, long count, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count * width > WORTH)
    for (long i = 0; i < count; i++)
        of_weights[order[i]] =
            weigh_row(grad + rows[i] * width, y + i * width, weights[order[i]], of_y + i * width, width);
}

}  // namespace
