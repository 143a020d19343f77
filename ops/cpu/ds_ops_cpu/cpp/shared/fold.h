// The reduction of the ranks' buffers, in rank order: ((r0 + r1) + r2) + ... 16-bit floats are added and multiplied in
// fp32 and rounded once. Included after isa.h, whose vectors it uses. The result may overwrite one of the parts.
#include "fold_table.h"

namespace ds {
namespace {

template <int OP>
inline F apply(F a, F b) {
    if (OP == FOLD_SUM) return a + b;
    if (OP == FOLD_PRODUCT) return a * b;
    if (OP == FOLD_MAX) return ((a > b) | (a != a)) ? a : b;  // a NaN on either side stays, as in torch
    return ((a < b) | (a != a)) ? a : b;
}

template <int T, int OP>
void fold_floats(void* out, const void* const* parts, int count, long n, bool average) {
    typedef typename Of<T>::element E;
    const F by = set((float)count);
    long i = 0;
    for (; i + W <= n; i += W) {
        F total = Of<T>::get((const E*)parts[0] + i);
        for (int p = 1; p < count; p++) total = apply<OP>(total, Of<T>::get((const E*)parts[p] + i));
        Of<T>::put((E*)out + i, average ? total / by : total);
    }
    if (i < n) {
        F total = get_some<T>((const E*)parts[0] + i, n - i);
        for (int p = 1; p < count; p++) total = apply<OP>(total, get_some<T>((const E*)parts[p] + i, n - i));
        put_some<T>((E*)out + i, average ? total / by : total, n - i);
    }
}

// E: the element; A: what it is added and multiplied as (unsigned, since sums of whole numbers wrap around).
template <class E, class A, int OP>
void fold_plain(void* out_, const void* const* parts, int count, long n, bool average) {
    E* out = (E*)out_;
    constexpr long PIECE = 512;
    E room[PIECE];
    for (long start = 0; start < n; start += PIECE) {
        const long m = n - start < PIECE ? n - start : PIECE;
        memcpy(room, (const E*)parts[0] + start, (size_t)m * sizeof(E));
        for (int p = 1; p < count; p++) {
            const E* part = (const E*)parts[p] + start;
            for (long i = 0; i < m; i++) {
                const E a = room[i], b = part[i];
                if (OP == FOLD_SUM) room[i] = (E)((A)a + (A)b);
                else if (OP == FOLD_PRODUCT) room[i] = (E)((A)a * (A)b);
                else if (OP == FOLD_MAX) room[i] = (a > b || a != a) ? a : b;
                else room[i] = (a < b || a != a) ? a : b;
            }
        }
        if (average)
            for (long i = 0; i < m; i++) room[i] = (E)(room[i] / (E)count);
        memcpy(out + start, room, (size_t)m * sizeof(E));
    }
}

template <class E>
void fold_bits(void* out_, const void* const* parts, int count, long n, int op) {
    E* out = (E*)out_;
    for (long i = 0; i < n; i++) {
        E total = ((const E*)parts[0])[i];
        for (int p = 1; p < count; p++) {
            const E next = ((const E*)parts[p])[i];
            total = op == FOLD_AND ? (E)(total & next) : op == FOLD_OR ? (E)(total | next) : (E)(total ^ next);
        }
        out[i] = total;
    }
}

template <int T>
void fold_float_op(void* out, const void* const* parts, int count, long n, int op, bool average) {
    if (op == FOLD_SUM) fold_floats<T, FOLD_SUM>(out, parts, count, n, average);
    else if (op == FOLD_PRODUCT) fold_floats<T, FOLD_PRODUCT>(out, parts, count, n, false);
    else if (op == FOLD_MAX) fold_floats<T, FOLD_MAX>(out, parts, count, n, false);
    else fold_floats<T, FOLD_MIN>(out, parts, count, n, false);
}

template <class E, class A>
void fold_plain_op(void* out, const void* const* parts, int count, long n, int op, bool average) {
    if (op == FOLD_SUM) fold_plain<E, A, FOLD_SUM>(out, parts, count, n, average);
    else if (op == FOLD_PRODUCT) fold_plain<E, A, FOLD_PRODUCT>(out, parts, count, n, false);
    else if (op == FOLD_MAX) fold_plain<E, A, FOLD_MAX>(out, parts, count, n, false);
    else fold_plain<E, A, FOLD_MIN>(out, parts, count, n, false);
}

template <class E, class A>
void fold_whole(void* out, const void* const* parts, int count, long n, int op, bool average) {
    if (op >= FOLD_AND) fold_bits<A>(out, parts, count, n, op);
    else fold_plain_op<E, A>(out, parts, count, n, op, average);
}

void fold(void* out, const void* const* parts, int count, long n, int type, int op, bool average) {
    switch (type) {
        case FOLD_F32: return fold_float_op<F32>(out, parts, count, n, op, average);
        case FOLD_BF16: return fold_float_op<BF16>(out, parts, count, n, op, average);
        case FOLD_F16: return fold_float_op<F16>(out, parts, count, n, op, average);
        case FOLD_F64: return fold_plain_op<double, double>(out, parts, count, n, op, average);
        case FOLD_I64: return fold_whole<int64_t, uint64_t>(out, parts, count, n, op, average);
        case FOLD_I32: return fold_whole<int32_t, uint32_t>(out, parts, count, n, op, average);
        case FOLD_I16: return fold_whole<int16_t, uint16_t>(out, parts, count, n, op, average);
        case FOLD_I8: return fold_whole<int8_t, uint8_t>(out, parts, count, n, op, average);
        case FOLD_U8: return fold_whole<uint8_t, uint8_t>(out, parts, count, n, op, average);
    }
}

}  // namespace

#define DS_PASTE(a, b) a##b
#define DS_NAMED(isa) DS_PASTE(fold_, isa)
extern const Fold DS_NAMED(DS_ISA);
const Fold DS_NAMED(DS_ISA) = fold;

}  // namespace ds
