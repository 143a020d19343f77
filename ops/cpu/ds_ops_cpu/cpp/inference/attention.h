// Attention of the queries of a task to the keys of one key head, block by block of the cache.

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

// B keys or values from `token` on, in fp32: where they are, or copied to `room` in rows of `padded(dim)`. stride: of rows.
inline const float* some_tokens(
    char* arena, int reg, const Op& op, const Run& run, int sequence, long token, long count, long kv, float* room,
    long& stride) {
    const long dim = op.head_dim, wide = padded(dim);
    const float* from = room;
    if (arena) {
        char* at = in_cache(arena, op, run, sequence, token, kv);
        stride = dim;
        if (run.cache_type == F32) {
            from = (const float*)at;
        } else if (dim == wide) {
            widen(room, at, run.cache_type, count * dim);
            return room;
        } else {
            for (long t = 0; t < count; t++) widen(room + t * wide, at + t * dim * 2, run.cache_type, dim);
            stride = wide;
            return room;
        }
    } else {
        stride = op.kv_heads * dim;
        from = run.registers[reg] + (run.starts[sequence] + token) * stride + kv * dim;
    }
    if (dim == wide) return from;
    for (long t = 0; t < count; t++) memcpy(room + t * wide, from + t * stride, (size_t)dim * 4);
    stride = wide;
    return room;
}

// Scores of a query with `count` keys.
inline void scores_of(const float* q, const float* keys, long stride, long count, long wide, float* scores) {
    for (long t = 0; t < count; t += 4) {
        const float* k[4];
        for (int j = 0; j < 4; j++) k[j] = keys + least(t + j, count - 1) * stride;
        F s[4] = {};
        for (long i = 0; i < wide; i += W) {
            const F u = load(q + i);
            for (int j = 0; j < 4; j++) s[j] = fma(load(k[j] + i), u, s[j]);
        }
        const F4 sums = totals(s[0], s[1], s[2], s[3]);
        memcpy(scores + t, &sums, sizeof sums);
    }
}

template <int N>
inline void weigh(const float* p, const float* values, long stride, long count, float scale, float* sum) {
    F s[N];
    for (int i = 0; i < N; i++) s[i] = load(sum + i * W) * set(scale);
    for (long t = 0; t < count; t++) {
        const F share = set(p[t]);
        for (int i = 0; i < N; i++) s[i] = fma(share, load(values + t * stride + i * W), s[i]);
    }
    for (int i = 0; i < N; i++) store(sum + i * W, s[i]);
}

// sum = sum * scale + the values, each by its share.
inline void weighted(const float* p, const float* values, long stride, long count, float scale, float* sum, long wide) {
    long i = 0;
    for (; i + 4 * W <= wide; i += 4 * W) weigh<4>(p, values + i, stride, count, scale, sum + i);
    for (; i < wide; i += W) weigh<1>(p, values + i, stride, count, scale, sum + i);
}

// What is summed up of a query: the largest score, the sum of shares, the weighted values.
struct Sums {
    float *most, *shares, *values;
};

inline void attend_block(
    const Op& op, const float* q, float slope, long at, long first, long count, const float* keys, long key_stride,
    const float* values, long value_stride, long wide, const Sums& s) {
    const long last = op.causal ? least(first + count, at + 1) : first + count;
    long begin = op.window > 0 && at - op.window + 1 > first ? at - op.window + 1 : first;
    if (begin >= last) return;
    begin -= first;
    const long n = last - first - begin;
    alignas(64) float p[B];
    scores_of(q, keys + begin * key_stride, key_stride, n, wide, p);
    F top = set(*s.most), sum = {};
    const F places = counting();
    for (long t = 0; t < n; t += W) {
        F x = load(p + t) * set(op.scale);
        if (op.slopes) x = fma(set(slope), places + set((float)(first + begin + t - at)), x);
        x = places < set((float)(n - t)) ? x : set(-__builtin_inff());
        top = larger(top, x);
        store(p + t, x);
    }
    const float most = largest(top);
    for (long t = 0; t < n; t += W) {
        const F e = exponential(load(p + t) - set(most));
        store(p + t, e);
        sum += e;
    }
    const float scale = exponential(set(*s.most - most))[0];
    *s.shares = *s.shares * scale + total(sum);
    *s.most = most;
    weighted(p, values + begin * value_stride, value_stride, n, scale, s.values, wide);
}

// Adds what the parts of a context gave for one query, in their order.
inline void merge(const float* parts, long step, int count, long dim, float* to) {
    const long wide = padded(dim);
    float most = parts[0], shares = 0;
    for (int p = 1; p < count; p++) most = parts[p * step] > most ? parts[p * step] : most;
    for (int p = 0; p < count; p++) shares += parts[p * step + 1] * exponential(set(parts[p * step] - most))[0];
    for (long i = 0; i < wide; i += W) {
        F sum = {};
        for (int p = 0; p < count; p++) {
            const float* at = parts + p * step;
            sum = fma(exponential(set(at[0] - most)), load(at + 2 + i), sum);
        }
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
    for (long first = task.from; first < task.to; first += B) {
        const long tokens = least(B, task.to - first);
        long key_stride, value_stride;
        char *keys_of = cached ? run.keys : nullptr, *values_of = cached ? run.values : nullptr;
        const float* keys = some_tokens(keys_of, op.y, op, run, task.sequence, first, tokens, kv, k_room, key_stride);
        const float* values = some_tokens(values_of, op.v, op, run, task.sequence, first, tokens, kv, v_room, value_stride);
        for (long n = 0; n < queries; n++) {
            const long at = length - rows + (task.first + n / count - start);
            const float slope = op.slopes ? op.slopes[heads[n % count]] : 0;
            float* s = sums + n * wanted;
            attend_block(op, q_room + n * wide, slope, at, first, tokens, keys, key_stride, values, value_stride, wide,
                         Sums{s, s + 1, s + 2});
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
