// y = x @ w.T for a few rows x, reading each weight once from memory.
//
// [Note: one row and several] One row is multiplied as weights are unpacked, in registers. For several, four rows of
// weights are unpacked into the first-level cache, and each vector of them is multiplied with up to TILE rows of x.

#if defined(DS_AVX512)
constexpr int TILE = 6;  // 24 sums, 4 weights and an x in 32 registers
#else
constexpr int TILE = 2;
#endif
constexpr int J = 4;  // rows of weights side by side

inline long whole(long n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }

// Floats of room: x rearranged and summed by group, scales and lows of J rows, J rows.
inline long room_of_product(const Weight& w) {
    const long groups = w.group ? whole(w.in / w.group) : 0;
    return (J + 1) * whole(w.in) + (1 + 2 * J) * groups;
}

inline I bytes(const uint8_t* from) {
#if defined(DS_AVX512)
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(DS_AVX2)
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    I x;
    for (int i = 0; i < W; i++) x[i] = from[i];
    return x;
#endif
}

inline F signed_bytes(const char* from) {
#if defined(DS_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(DS_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    F x;
    for (int i = 0; i < W; i++) x[i] = (float)(int8_t)from[i];
    return x;
#endif
}

// The 2 W numbers in W bytes: those in low halves, those in high halves. `lines`: what 0 .. 15 stand for.
struct Nibbles {
    F lines;
    bool is_signed;

    explicit Nibbles(bool is_signed_) : is_signed(is_signed_) {
        for (int i = 0; i < W; i++) lines[i] = (float)(is_signed && i > 7 ? i - 16 : i);
    }

    inline void get(const char* from, F& low, F& high) const {
        const I x = bytes((const uint8_t*)from);
#if defined(DS_AVX512)
        low = _mm512_permutexvar_ps((__m512i)x, lines);  // looks at the lowest four bits only
        high = _mm512_permutexvar_ps((__m512i)(x >> 4), lines);
#else
        const I bias = I{} + (is_signed ? 8 : 0);
        low = __builtin_convertvector(((x & 15) ^ bias) - bias, F);
        high = __builtin_convertvector(((x >> 4) ^ bias) - bias, F);
#endif
    }
};

inline void apart(F even, F odd, float* to) {  // interleaved
    float a[W], b[W];
    store(a, even);
    store(b, odd);
    for (int i = 0; i < W; i++) {
        to[2 * i] = a[i];
        to[2 * i + 1] = b[i];
    }
}

inline float half(uint16_t h) {
    uint16_t all[W] = {h};
    return Of<F16>::get(all)[0];
}

inline long size_of(int form) { return form == F32 ? 4 : 2; }

inline const char* line(const Weight& w, long j) {
    if (w.form == INT8) return w.data + j * w.in;
    if (w.form == INT4) return w.data + j * (w.in / 2);
    return w.data + j * w.stride * size_of(w.form);
}

// Row j of `w` in fp32.
inline void widen_row(const Weight& w, long j, float* to) {
    const char* from = line(w, j);
    if (w.form == F32) {
        memcpy(to, from, (size_t)w.in * 4);
    } else if (w.form == BF16 || w.form == F16) {
        widen(to, from, w.form, w.in);
    } else {
        const long groups = w.in / w.group;
        const Nibbles nibbles(!w.lows);
        for (long g = 0; g < groups; g++, to += w.group) {
            const float scale = half(w.scales[j * groups + g]), low = w.lows ? half(w.lows[j * groups + g]) : 0;
            const long n = w.group;
            long i = 0;
            if (w.form == INT8) {
                for (; i + W <= n; i += W) store(to + i, fma(signed_bytes(from + i), set(scale), set(low)));
                for (; i < n; i++) to[i] = (float)(int8_t)from[i] * scale + low;
                from += n;
            } else {
                for (; i + 2 * W <= n; i += 2 * W) {
                    F even, odd;
                    nibbles.get(from + i / 2, even, odd);
                    apart(fma(even, set(scale), set(low)), fma(odd, set(scale), set(low)), to + i);
                }
                for (; i < n; i++) {
                    const int q = i & 1 ? (uint8_t)from[i / 2] >> 4 : from[i / 2] & 15;
                    to[i] = (float)(w.lows || q < 8 ? q : q - 16) * scale + low;
                }
                from += n / 2;
            }
        }
    }
}

// -- one row --------------------------------------------------------------------------------------------------------

inline bool is_direct(const Weight& w) {
    return w.form == INT8 ? w.group % W == 0 : w.form != INT4 || w.group % (2 * W) == 0;
}

// What `one_row` reads in the place of x: for 4 bits even places of each 2 W before odd ones; then sums of groups.
inline const float* rearranged(const Weight& w, const float* x, float* to) {
    const bool four = w.form == INT4, sums = w.lows;
    if (!four && !sums) return x;
    for (long i = 0; i < w.in; i += 2 * W) {
        if (!four) {
            memcpy(to + i, x + i, (size_t)least(2 * W, w.in - i) * 4);
            continue;
        }
        float even[W], odd[W];
        for (int k = 0; k < W; k++) {
            even[k] = x[i + 2 * k];
            odd[k] = x[i + 2 * k + 1];
        }
        memcpy(to + i, even, sizeof even);
        memcpy(to + i + W, odd, sizeof odd);
    }
    for (long g = 0; sums && g < w.in / w.group; g++) {
        F sum = {};
        for (long i = 0; i < w.group; i += W) sum += load(x + g * w.group + i);
        to[whole(w.in) + g] = total(sum);
    }
    return to;
}

template <int T>
inline F4 one_plain(const char* const* rows, const float* x, long n) {
    typedef const typename Of<T>::element* E;
    const E a = (E)rows[0], b = (E)rows[1], c = (E)rows[2], d = (E)rows[3];
    F s[J] = {};
    each(n, [&](long i, long m) {
        const F v = part(x + i, m);
        if (m == W) {
            s[0] = fma(Of<T>::get(a + i), v, s[0]);
            s[1] = fma(Of<T>::get(b + i), v, s[1]);
            s[2] = fma(Of<T>::get(c + i), v, s[2]);
            s[3] = fma(Of<T>::get(d + i), v, s[3]);
        } else {
            s[0] = fma(get_some<T>(a + i, m), v, s[0]);
            s[1] = fma(get_some<T>(b + i, m), v, s[1]);
            s[2] = fma(get_some<T>(c + i, m), v, s[2]);
            s[3] = fma(get_some<T>(d + i, m), v, s[3]);
        }
    });
    return totals(s[0], s[1], s[2], s[3]);
}

template <bool FOUR>
inline F4 one_quantized(const Weight& w, const long* places, const float* x, float* room) {
    const long groups = w.in / w.group, wide = whole(groups);
    const char* rows[J];
    F s[J] = {};
    for (int k = 0; k < J; k++) {
        rows[k] = line(w, places[k]);
        widen_as<F16>(room + k * wide, w.scales + places[k] * groups, groups);
        if (w.lows) {
            const float* sums = x + whole(w.in);
            each(groups, [&](long g, long m) {
                s[k] = fma(get_some<F16>(w.lows + places[k] * groups + g, m), part(sums + g, m), s[k]);
            });
        }
    }
    const Nibbles nibbles(!w.lows);
    for (long g = 0; g < groups; g++, x += w.group) {
        F sums[J] = {};
        if (FOUR) {
            for (long i = 0; i < w.group; i += 2 * W) {
                const F v = load(x + i), u = load(x + i + W);
                for (int k = 0; k < J; k++) {
                    F even, odd;
                    nibbles.get(rows[k] + i / 2, even, odd);
                    sums[k] = fma(even, v, fma(odd, u, sums[k]));
                }
            }
        } else {
            for (long i = 0; i < w.group; i += W) {
                const F v = load(x + i);
                for (int k = 0; k < J; k++) sums[k] = fma(signed_bytes(rows[k] + i), v, sums[k]);
            }
        }
        for (int k = 0; k < J; k++) {
            s[k] = fma(sums[k], set(room[k * wide + g]), s[k]);
            rows[k] += FOUR ? w.group / 2 : w.group;
        }
    }
    return totals(s[0], s[1], s[2], s[3]);
}

inline F4 one_row(const Weight& w, const long* places, const float* x, float* room) {
    if (w.form == INT8) return one_quantized<false>(w, places, x, room);
    if (w.form == INT4) return one_quantized<true>(w, places, x, room);
    const char* rows[J];
    for (int k = 0; k < J; k++) rows[k] = line(w, places[k]);
    if (w.form == F32) return one_plain<F32>(rows, x, w.in);
    return w.form == BF16 ? one_plain<BF16>(rows, x, w.in) : one_plain<F16>(rows, x, w.in);
}

// -- several rows ---------------------------------------------------------------------------------------------------

template <int R>
inline void tile(const float* const* rows, const float* const* x, long n, F4* sums) {
    F s[R][J] = {};
    each(n, [&](long i, long m) {
        F v[J];
        for (int k = 0; k < J; k++) v[k] = part(rows[k] + i, m);
        for (int r = 0; r < R; r++) {
            const F u = part(x[r] + i, m);
            for (int k = 0; k < J; k++) s[r][k] = fma(v[k], u, s[r][k]);
        }
    });
    for (int r = 0; r < R; r++) sums[r] = totals(s[r][0], s[r][1], s[r][2], s[r][3]);
}

inline void tiles(const float* const* rows, const float* const* x, long count, long n, F4* sums) {
    long r = 0;
    for (; r + TILE <= count; r += TILE) tile<TILE>(rows, x + r, n, sums + r);
    switch (count - r) {
#if defined(DS_AVX512)
        case 5: return tile<5>(rows, x + r, n, sums + r);
        case 4: return tile<4>(rows, x + r, n, sums + r);
        case 3: return tile<3>(rows, x + r, n, sums + r);
        case 2: return tile<2>(rows, x + r, n, sums + r);
#endif
        case 1: return tile<1>(rows, x + r, n, sums + r);
    }
}

// -- weights with contiguous columns ----------------------------------------------------------------------------------

template <int T>
inline void by_columns(const Weight& w, long from, long to, const float* const* x, long count, float* const* y) {
    typedef const typename Of<T>::element* E;
    for (long r = 0; r < count; r++) memset(y[r], 0, (size_t)(to - from) * 4);
    for (long i = 0; i < w.in; i += J) {
        E columns[J];
        long places[J];
        for (int k = 0; k < J; k++) {
            places[k] = least(i + k, w.in - 1);
            columns[k] = (E)w.data + places[k] * w.stride + from;
        }
        const long real = least(J, w.in - i);
        each(to - from, [&](long j, long m) {
            F v[J];
            for (int k = 0; k < J; k++) v[k] = m == W ? Of<T>::get(columns[k] + j) : get_some<T>(columns[k] + j, m);
            for (long r = 0; r < count; r++) {
                F sum = part(y[r] + j, m);
                for (int k = 0; k < real; k++) sum = fma(v[k], set(x[r][places[k]]), sum);
                put(y[r] + j, sum, m);
            }
        });
    }
}

// -- all ------------------------------------------------------------------------------------------------------------

// x of an op as `one_row` wants it, made once for each thread; null where it is x itself or there are several rows.
inline const float* prepare(const Op& op, const Weight& w, const float* const* x, long count, Thread& t) {
    if (count != 1 || w.columns || !is_direct(w)) return nullptr;
    if (t.prepared != &op) rearranged(op.a, x[0], t.room);
    t.prepared = &op;
    const bool alike = op.a.form == w.form && op.a.group == w.group && !op.a.lows == !w.lows;
    if (!alike) {
        t.prepared = nullptr;
        return nullptr;
    }
    return w.form == INT4 || w.lows ? t.room : x[0];
}

// y[r][0 .. to - from) = x[r] . rows from .. to of w.
inline void product(
    const Weight& w, long from, long to, const float* const* x, long count, float* const* y, float* room,
    const float* prepared) {
    if (w.columns) {
        if (w.form == F32) return by_columns<F32>(w, from, to, x, count, y);
        if (w.form == BF16) return by_columns<BF16>(w, from, to, x, count, y);
        return by_columns<F16>(w, from, to, x, count, y);
    }
    const bool one = count == 1 && is_direct(w);
    if (one && !prepared) prepared = rearranged(w, x[0], room);
    const long groups = w.group ? whole(w.in / w.group) : 0, wide = whole(w.in);
    room += wide + groups;
    float* widened = room + 2 * J * groups;
    F4 sums[MOST_ROWS];
    for (long j = from; j < to; j += J) {
        long places[J];
        for (int k = 0; k < J; k++) places[k] = least(j + k, to - 1);
        if (one) {
            sums[0] = one_row(w, places, prepared, room);
        } else {
            const float* rows[J];
            for (int k = 0; k < J; k++) {
                if (w.form == F32) {
                    rows[k] = (const float*)line(w, places[k]);
                    continue;
                }
                rows[k] = k && places[k] == places[k - 1] ? rows[k - 1] : widened + k * wide;
                if (rows[k] == widened + k * wide) widen_row(w, places[k], widened + k * wide);
            }
            tiles(rows, x, count, w.in, sums);
        }
        const size_t real = (size_t)least(J, to - j) * 4;
        for (long r = 0; r < count; r++) memcpy(y[r] + (j - from), &sums[r], real);
    }
}
