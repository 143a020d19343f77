// What the instruction-set files (kernels.h compiled three times) and the driver (module.cpp) agree on.
//
// An instruction is one `Op`: numbers and addresses. It is worked on in units, any of which any thread may take; two
// units of an op never write the same memory, and no unit's result depends on which thread takes it, or on how many
// there are. As in ops.h, nothing here is of the standard library.
#pragma once

#include <stdint.h>

#include "../ops.h"

namespace ds {
namespace inference {

constexpr long BLOCK_TOKENS = 32;  // ds_inference_kit.step.BLOCK

constexpr long MOST_ROWS = 64;  // that a product takes at a time; with more, torch multiplies

enum Form : int { INT8 = 8, INT4 = 9 };  // beside F32, BF16, F16

enum Kind : int {
    EMBED, NORMALIZE, LINEAR, GATED, ROTATE, STORE, ATTEND, ROUTE, EXPERTS_IN, EXPERTS_OUT, ADD, COLUMNS, KEEP, STOP
};

enum Activation : int { NOTHING, RELU, GELU, GELU_TANH, SILU, QUICK_GELU, TANH };

// A matrix [out, in]. stride: elements from one row to the next, or with `columns` from one column to the next.
struct Weight {
    const char* data;
    const uint16_t *scales, *lows;
    int form;
    bool columns;
    long out, in, stride, group;
};

struct Vector {
    const void* data;  // null: none
    int type;
};

// Registers: x, y (second input), v, added (-1: none), out. Which fields are used depends on the kind.
struct Op {
    int kind, x, y, v, added, out, activation;
    Weight a, b;
    Vector bias, second;
    float scale, eps;
    bool accumulate, layer_norm, pairs, causal, normalize, barrier;
    int by;
    long offset, groups;              // EMBED; NORMALIZE and COLUMNS: parts of a row
    long head_dim, dims, positions;   // ROTATE: tables of [positions, dims / 2]
    const float *cos, *sin, *slopes;
    long heads, kv_heads, layer, window;
    const int *order, *first_of;      // query heads by key head: order[first_of[kv] .. first_of[kv + 1]]
    const Weight *gates, *ups, *downs;
    long experts, first, top_k;       // experts held here, the number of the first
    long unit;                        // outputs of a product per unit
    long number;                      // among the ops
    long phase;                       // how many barriers come before it
    const Op* queries;                // STORE: the ATTEND that it belongs to
};

// Queries of one sequence, for every key head: rows [first, last) of the step against tokens [from, to) of the
// sequence. `parts` > 1: the context is divided, this is number `part`, and what is summed up is kept in `partial`.
struct Task {
    int sequence;
    long first, last, from, to;
    int part, parts;
    long partial;
    int group;  // of parts that belong together
};

// One run: the step, the cache and where registers are.
struct Run {
    float* const* registers;
    const long* widths;
    const bool* kept;  // registers that have only the wanted rows
    bool bf16;  // where several rows are multiplied, in bf16
    long rows, wanted;
    const int *tokens, *positions, *types, *starts, *lengths, *blocks;
    const int64_t* wants;
    const float* embeds;
    long sequences, blocks_stride;
    char *keys, *values;  // null: no cache
    int cache_type;
    long cache_blocks;
    const Task* const* tasks;  // by number of the op
    const long* task_counts;
    const int* store_rows;  // rows of sequences that have several, and where they go
    long store_count;
    float* partials;
    int* const* finished;  // by number of the op: for each group and key head, parts that are done
};

// A thread's own memory; prepared: what x was rearranged for, or null.
struct Thread {
    float* room;
    const Op* prepared;
};

struct Table {
    const char* name;
    int width;  // floats of a vector
    void (*unit)(const Op&, const Run&, long unit, Thread&);
    // Rows first .. last of `w` as `type`, side by side.
    void (*widen)(const Weight& w, long first, long last, void* to, int type, float* room);
    // to[0 .. n) = activation(y + bias) (* (second + bias)) + added, of what torch has multiplied.
    void (*finish)(const Op&, const void* y, const void* second, int type, const float* added, float* to, long n);
    void (*narrow)(void* to, const float* from, int type, long n);
};

extern const Table generic;
#ifdef DS_X86
extern const Table avx2;
extern const Table avx512;
extern const Table avx512bf16;
#endif


}  // namespace inference
}  // namespace ds
