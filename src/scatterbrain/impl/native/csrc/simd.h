// Vectors as wide as the build's instruction set, their exponential, and the one matrix product everything is made of.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sb {

#if defined(__AVX512F__)
constexpr int W = 16, NV_MAX = 4;
constexpr const char* ISA = "avx512";
#elif defined(__AVX2__)
constexpr int W = 8, NV_MAX = 2;
constexpr const char* ISA = "avx2";
#else
constexpr int W = 4, NV_MAX = 2;
constexpr const char* ISA = "portable";
#endif
constexpr int MR = 6;  // rows a micro-kernel holds: MR x NV_MAX accumulators fill the registers
#if defined(__AVX512F__)
constexpr int GROUP = 12;  // rows done together: narrow products take more of them at once
#else
constexpr int GROUP = MR;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int vi __attribute__((vector_size(W * 4)));
typedef float vfu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int viu __attribute__((vector_size(W * 4), aligned(4), may_alias));

static inline vf load(const float* p) { return *reinterpret_cast<const vfu*>(p); }
static inline vi loadi(const int* p) { return *reinterpret_cast<const viu*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vfu*>(p) = x; }
static inline vf all(float x) { return x - vf{}; }
static inline vi alli(int x) { return x - vi{}; }
static inline vf zero() { return vf{}; }
static inline vf larger(vf a, vf b) { return a > b ? a : b; }
static inline int round_up(int64_t n, int to) { return static_cast<int>((n + to - 1) / to * to); }

static inline vi lanes() {
    vi x;
    for (int l = 0; l < W; ++l) x[l] = l;
    return x;
}

static inline float max_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int l = 1; l < W; ++l) m = x[l] > m ? x[l] : m;
    return m;
#endif
}

static inline float sum_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float s = x[0];
    for (int l = 1; l < W; ++l) s += x[l];
    return s;
#endif
}

static inline float squares(const float* x, int n) {
    vf sum = zero();
    int t = 0;
    for (; t + W <= n; t += W) sum += load(x + t) * load(x + t);
    float s = sum_of(sum);
    for (; t < n; ++t) s += x[t] * x[t];
    return s;
}

static inline vf gather(const float* table, vi at) {
#if defined(__AVX512F__)
    return (vf)_mm512_i32gather_ps((__m512i)at, table, 4);
#elif defined(__AVX2__)
    return (vf)_mm256_i32gather_ps(table, (__m256i)at, 4);
#else
    vf x;
    for (int l = 0; l < W; ++l) x[l] = table[at[l]];
    return x;
#endif
}

static inline bool any(vi x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
    int s = 0;
    for (int l = 0; l < W; ++l) s |= x[l];
    return s != 0;
#endif
}

// How many lanes of a comparison hold.
static inline int count_of(vi x) {
#if defined(__AVX512F__)
    return __builtin_popcount(_mm512_test_epi32_mask((__m512i)x, (__m512i)x));
#elif defined(__AVX2__)
    return __builtin_popcount(_mm256_movemask_ps((__m256)x));
#else
    int s = 0;
    for (int l = 0; l < W; ++l) s -= x[l];
    return s;
#endif
}

// exp(x) for x <= 88, to about one unit in the last place; 0 far below -87 (and for -inf).
static inline vf exp_of(vf x) {
#if defined(__AVX512F__)
    const __m512 y = (__m512)x;
    const __mmask16 normal = _mm512_cmp_ps_mask(y, _mm512_set1_ps(-87.0f), _CMP_GT_OQ);  // a result below costs hundreds of cycles
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), y);
    // the polynomial of fifth degree with the least relative error, 9e-8
    __m512 p = _mm512_set1_ps(8.290272e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.189816e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6667639e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.9999148e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.999997e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return (vf)_mm512_maskz_scalef_ps(normal, p, n);
#else
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf c = x < all(-87.0f) ? all(-87.0f) : x;
    vf t = c * all(1.44269504088896341f) + magic;
    vf n = t - magic;
    vf r = c - n * all(0.693359375f);
    r = r - n * all(-2.12194440e-4f);
    vf p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1.0f);
    vi bits = (vi)t - (vi)magic;
    vf two = (vf)((bits + 127) << 23);
    vf e = p * two;
    return x < all(-87.0f) ? zero() : e;
#endif
}

static inline float exp_of(float x) { return exp_of(all(x))[0]; }

// Pairs of bfloat16 in the lanes of a vector, where the processor multiplies such: the rest of the code carries them as
// floats that are never computed with.
static inline bool pairs_here() {
#if defined(__AVX512BF16__)
    static const bool here = __builtin_cpu_supports("avx512bf16");
    return here;
#else
    return false;
#endif
}

static inline vf dot_pairs(vf acc, float s, vf x) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_ps(s), (__m512bh)(__m512)x);
#else
    return acc + s * x;  // never called
#endif
}

// n floats, a multiple of 2 W, rounded to bfloat16: n / 2 pairs.
static inline void round_pairs(const float* from, int n, float* to) {
#if defined(__AVX512BF16__)
    for (int x = 0; x < n; x += 2 * W)
        _mm512_storeu_si512(to + x / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + x + W), (__m512)load(from + x)));
#else
    for (int x = 0; x < n / 2; ++x) to[x] = from[x];  // never called
#endif
}

// What a product does with what stands in C. SET with an alpha multiplies the result by it.
enum Into { SET, ADD, SCALE_ADD };

// C[r][v] (+)= sum_k a[r][k * as] * B[k][v], B[k] at b + k * bs or, with rows given, at rows[k]; vector v of a row of B
// lies bv floats further. One kernel serves q k', P v, and their transposes in the backward pass.
struct Operand {
    const float* base;
    int64_t step;              // floats from one k to the next
    int64_t vec;               // floats from one vector of a row to the next
    const float* const* rows;  // or a pointer a k
    bool pairs = false;        // of bfloat16: K counts pairs
};

template <int R, int NV, bool ROWS, bool PAIRS>
static inline void micro(const float* const* a, int64_t as, const Operand& b, int64_t b_at, int K, float* const* c, int64_t c_at, Into into,
                         const float* alpha) {
    vf acc[R][NV];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
            acc[r][v] = into == SET ? zero() : into == ADD ? load(c[r] + c_at + v * W) : load(c[r] + c_at + v * W) * alpha[r];
    const float* ar[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) ar[r] = a[r];
    const float* bk = ROWS ? nullptr : b.base + b_at;
    const int64_t vec = ROWS ? W : b.vec;
    for (int k = 0; k < K; ++k) {
        if (ROWS) bk = b.rows[k] + b_at;
        vf x[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) x[v] = load(bk + v * vec);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const float s = ar[r][k * as];
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[r][v] = PAIRS ? dot_pairs(acc[r][v], s, x[v]) : acc[r][v] + s * x[v];
        }
        if (!ROWS) bk += b.step;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(c[r] + c_at + v * W, into == SET && alpha ? acc[r][v] * alpha[r] : acc[r][v]);
}

// The rows a kernel of NV vectors holds.
constexpr int rows_held(int nv) { return W < 16 || nv >= 4 ? MR : nv == 3 ? 8 : 12; }

template <int R, int NV, bool ROWS, bool PAIRS>
static inline void rows_left(int n, const float* const* a, int64_t as, const Operand& b, int64_t b_at, int K, float* const* c, int64_t c_at,
                             Into into, const float* alpha) {
    if (n == R) return micro<R, NV, ROWS, PAIRS>(a, as, b, b_at, K, c, c_at, into, alpha);
    if constexpr (R > 1) rows_left<R - 1, NV, ROWS, PAIRS>(n, a, as, b, b_at, K, c, c_at, into, alpha);
}

template <int NV, bool ROWS, bool PAIRS>
static inline void columns_of(int n, const float* const* a, int64_t as, const Operand& b, int64_t b_at, int K, float* const* c, int64_t c_at,
                              Into into, const float* alpha) {
    constexpr int R = rows_held(NV);
    int r = 0;
    for (; r + R <= n; r += R) micro<R, NV, ROWS, PAIRS>(a + r, as, b, b_at, K, c + r, c_at, into, alpha ? alpha + r : nullptr);
    if (r < n) rows_left<R, NV, ROWS, PAIRS>(n - r, a + r, as, b, b_at, K, c + r, c_at, into, alpha ? alpha + r : nullptr);
}

template <bool ROWS, bool PAIRS>
static inline void all_columns(int n, const float* const* a, int64_t as, const Operand& b, int nv, int K, float* const* c, Into into,
                               const float* alpha) {
    const int64_t vec = ROWS ? W : b.vec;
    int v = 0;
#if defined(__AVX512F__)
    for (; nv - v >= 4 && nv - v != 5; v += 4) columns_of<4, ROWS, PAIRS>(n, a, as, b, v * vec, K, c, v * W, into, alpha);
    if (nv - v == 5) columns_of<3, ROWS, PAIRS>(n, a, as, b, v * vec, K, c, v * W, into, alpha), v += 3;
    if (nv - v == 3) columns_of<3, ROWS, PAIRS>(n, a, as, b, v * vec, K, c, v * W, into, alpha);
    if (nv - v == 2) columns_of<2, ROWS, PAIRS>(n, a, as, b, v * vec, K, c, v * W, into, alpha);
#else
    for (; nv - v >= NV_MAX; v += NV_MAX) columns_of<NV_MAX, ROWS, PAIRS>(n, a, as, b, v * vec, K, c, v * W, into, alpha);
#endif
    if (nv - v == 1) columns_of<1, ROWS, PAIRS>(n, a, as, b, v * vec, K, c, v * W, into, alpha);
}

// n <= GROUP rows of C, nv vectors wide.
static inline void product(int n, const float* const* a, int64_t as, const Operand& b, int nv, int K, float* const* c, Into into = SET,
                           const float* alpha = nullptr) {
    if (b.rows)
        all_columns<true, false>(n, a, as, b, nv, K, c, into, alpha);
    else if (b.pairs)
        all_columns<false, true>(n, a, as, b, nv, K, c, into, alpha);
    else
        all_columns<false, false>(n, a, as, b, nv, K, c, into, alpha);
}

// Any number of rows: row r of A at a0 + r * ar, row r of C at c0 + r * cr.
static inline void product_rows(int n, const float* a0, int64_t ar, int64_t as, const Operand& b, int nv, int K, float* c0, int64_t cr,
                                Into into = SET) {
    for (int r = 0; r < n; r += GROUP) {
        const int some = n - r < GROUP ? n - r : GROUP;
        const float* a[GROUP];
        float* c[GROUP];
        for (int x = 0; x < some; ++x) a[x] = a0 + (r + x) * ar, c[x] = c0 + (r + x) * cr;
        product(some, a, as, b, nv, K, c, into);
    }
}

#if defined(__AVX512F__)
// Sixteen rows of sixteen turned on their side; BITS: moved, not multiplied.
template <bool BITS>
static inline void turn(const float* const* row, int64_t at, float by, float* out) {
    __m512 r[16], t[16];
#pragma GCC unroll 16
    for (int x = 0; x < 16; ++x) r[x] = BITS ? _mm512_loadu_ps(row[x] + at) : _mm512_mul_ps(_mm512_loadu_ps(row[x] + at), _mm512_set1_ps(by));
#pragma GCC unroll 12
    for (int x = 0; x < 16; x += 2) {
        t[x] = _mm512_unpacklo_ps(r[x], r[x + 1]);
        t[x + 1] = _mm512_unpackhi_ps(r[x], r[x + 1]);
    }
#pragma GCC unroll 4
    for (int x = 0; x < 16; x += 4) {
        r[x] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[x]), _mm512_castps_pd(t[x + 2])));
        r[x + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[x]), _mm512_castps_pd(t[x + 2])));
        r[x + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[x + 1]), _mm512_castps_pd(t[x + 3])));
        r[x + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[x + 1]), _mm512_castps_pd(t[x + 3])));
    }
    // r[4 g + c] holds, in quarter q, column 4 q + c of rows 4 g .. 4 g + 3
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xee);
        const __m512 e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44), f = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xee);
        _mm512_storeu_ps(out + c * 16, _mm512_shuffle_f32x4(a, e, 0x88));
        _mm512_storeu_ps(out + (4 + c) * 16, _mm512_shuffle_f32x4(a, e, 0xdd));
        _mm512_storeu_ps(out + (8 + c) * 16, _mm512_shuffle_f32x4(b, f, 0x88));
        _mm512_storeu_ps(out + (12 + c) * 16, _mm512_shuffle_f32x4(b, f, 0xdd));
    }
}
#endif

// Rows side by side for a product: [n / W][d][W], times `by`, zeros beyond n.
template <bool BITS = false, class Row>
static inline void pack(Row row, int n, int d, float by, float* out) {
    static const float nothing[4096] = {};
    for (int p = 0; p < n; p += W, out += static_cast<int64_t>(d) * W) {
        const int some = n - p < W ? n - p : W;
        for (int l = p + W; l < n && l < p + 2 * W; ++l)  // the next rows on their way: they may lie anywhere
            for (int t = 0; t < d; t += 16) __builtin_prefetch(row(l) + t);
        int first = 0;
#if defined(__AVX512F__)
        const float* rows[16];
        for (int l = 0; l < 16; ++l) rows[l] = l < some ? row(p + l) : nothing;
        for (; first + 16 <= d && first + 16 <= 4096; first += 16) turn<BITS>(rows, first, by, out + first * W);
#endif
        for (int l = 0; l < W; ++l) {
            const float* x = l < some ? row(p + l) : nullptr;
            for (int t = first; t < d; ++t) out[t * W + l] = !x ? 0.0f : BITS ? x[t] : x[t] * by;
        }
    }
}

static inline Operand panels(const float* packed, int d, int first = 0) {
    return {packed + static_cast<int64_t>(first) * d * W, W, static_cast<int64_t>(d) * W, nullptr};
}
static inline Operand paired(Operand x) {
    x.pairs = true;
    return x;
}
static inline Operand plain(const float* base, int64_t step) { return {base, step, W, nullptr}; }
static inline Operand by_row(const float* const* rows) { return {nullptr, 0, W, rows}; }

}  // namespace sb
