// Tensors of any dtype and stride read as rows of floats.
#pragma once
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "api.h"
#include "simd.h"

namespace sb {

constexpr float NONE = -std::numeric_limits<float>::infinity();

static inline float bits_to_float(uint32_t x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
static inline uint32_t float_to_bits(float f) {
    uint32_t x;
    std::memcpy(&x, &f, 4);
    return x;
}
static inline float from_bf16(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
static inline uint16_t to_bf16(float f) {
    uint32_t x = float_to_bits(f);
    if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((x + 0x7fffu + ((x >> 16) & 1)) >> 16);
}
static inline float from_f16(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023u;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}
static inline uint16_t to_f16(float f) {
    const uint32_t x = float_to_bits(f), sign = (x >> 16) & 0x8000u, rest = x & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (rest < 0x38800000u) {  // subnormal: adding 2^-1 leaves the rounded units of 2^-24 in the low bits
        const float y = bits_to_float(rest) + 0.5f;
        return static_cast<uint16_t>(sign | (float_to_bits(y) - 0x3f000000u));
    }
    const uint32_t odd = (rest >> 13) & 1;
    return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

static inline void read_row(const SbArray& a, int64_t at, int64_t width, float* to) {
    if (a.dtype == SB_F32) {
        const float* p = static_cast<const float*>(a.data) + at;
        if (a.sd == 1)
            std::memcpy(to, p, width * sizeof(float));
        else
            for (int64_t t = 0; t < width; ++t) to[t] = p[t * a.sd];
    } else if (a.dtype == SB_BF16) {
        const uint16_t* p = static_cast<const uint16_t*>(a.data) + at;
        if (a.sd == 1)
            for (int64_t t = 0; t < width; ++t) to[t] = from_bf16(p[t]);
        else
            for (int64_t t = 0; t < width; ++t) to[t] = from_bf16(p[t * a.sd]);
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(a.data) + at;
        for (int64_t t = 0; t < width; ++t) to[t] = from_f16(p[t * a.sd]);
    }
}

static inline void write_row(const SbArray& a, int64_t at, int64_t width, const float* from, float by) {
    if (a.dtype == SB_F32) {
        float* p = static_cast<float*>(a.data) + at;
        if (a.sd == 1)
            for (int64_t t = 0; t < width; ++t) p[t] = from[t] * by;
        else
            for (int64_t t = 0; t < width; ++t) p[t * a.sd] = from[t] * by;
    } else {
        uint16_t* p = static_cast<uint16_t*>(a.data) + at;
        for (int64_t t = 0; t < width; ++t) p[t * a.sd] = a.dtype == SB_BF16 ? to_bf16(from[t] * by) : to_f16(from[t] * by);
    }
}

// Floats that are not set to zero first; kept and reused by whoever holds them.
class Buffer {
public:
    float* get(int64_t n) {
        if (n > size_) {
            data_.reset();
            size_ = 0;
            data_.reset(allocate(static_cast<size_t>(n + 2 * W) * sizeof(float)));
            size_ = n;
        }
        return data_.get();
    }
    float* cleared(int64_t n) {
        float* p = get(n);
        if (n > 0) std::memset(p, 0, n * sizeof(float));
        return p;
    }
    float* data() const { return data_.get(); }

private:
    // Large ones in huge pages where the system gives them: rows of a bucket lie anywhere, a page each.
    static float* allocate(size_t bytes) {
        constexpr size_t HUGE_PAGE = 2 << 20;
        void* p = nullptr;
        if (bytes < HUGE_PAGE) {
            p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        } else {
            const size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
            p = std::aligned_alloc(HUGE_PAGE, whole);
#if defined(__linux__)
            if (p) madvise(p, whole, MADV_HUGEPAGE);
#endif
        }
        if (!p) throw std::bad_alloc();
        return static_cast<float*>(p);
    }
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> data_;
    int64_t size_ = 0;
};

// Rows of one head as floats, a whole number of vectors wide: the tensor itself where it is that already, else a copy.
// Masked rows are zero, whatever the tensor holds there.
struct View {
    const float* base = nullptr;
    int64_t step = 0;
    Buffer copy;

    const float* row(int64_t i) const { return base + i * step; }

    // `whole`: rows are read a vector at a time, so that a width that is no multiple of W must be padded.
    void read(const SbArray& a, int64_t b, int64_t h, int64_t n, int64_t width, const uint8_t* mask, bool whole) {
        const int64_t start = b * a.sb + h * a.sh;
        const bool padded = whole && width % W != 0;
        if (a.dtype == SB_F32 && a.sd == 1 && !mask && !padded) {
            base = static_cast<const float*>(a.data) + start;
            step = a.sn;
            return;
        }
        step = whole ? round_up(width, W) : width;
        float* to = copy.get(n * step);
        for (int64_t i = 0; i < n; ++i) {
            float* x = to + i * step;
            if (mask && !mask[i]) {
                std::memset(x, 0, step * sizeof(float));
                continue;
            }
            read_row(a, start + i * a.sn, width, x);
            for (int64_t t = width; t < step; ++t) x[t] = 0.0f;
        }
        base = to;
    }
};

// Rows of one head of bfloat16 as they are, an even number wide, to be read as pairs (see simd.h). Masked rows are zero.
struct HalfView {
    const float* base = nullptr;
    int64_t step = 0;  // pairs
    Buffer copy;

    const float* row(int64_t i) const { return base + i * step; }

    void read(const SbArray& a, int64_t b, int64_t h, int64_t n, int64_t width, const uint8_t* mask) {
        const uint16_t* from = static_cast<const uint16_t*>(a.data) + b * a.sb + h * a.sh;
        if (!mask && a.sd == 1 && width % 2 == 0 && a.sn % 2 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
            base = reinterpret_cast<const float*>(from);
            step = a.sn / 2;
            return;
        }
        step = (width + 1) / 2;
        float* to = copy.cleared(n * step);
        std::vector<uint16_t> some(width);
        for (int64_t i = 0; i < n; ++i) {
            if (mask && !mask[i]) continue;
            for (int64_t t = 0; t < width; ++t) some[t] = from[i * a.sn + t * a.sd];
            std::memcpy(to + i * step, some.data(), width * sizeof(uint16_t));
        }
        base = to;
    }
};

// Two rows of pairs (null: zeros) side by side: lane c holds what stands at c in both, for a product over rows.
static inline void interleave(const float* first, const float* second, int64_t width, float* to) {
    static const uint16_t nothing[512] = {};
    const char *a = first ? reinterpret_cast<const char*>(first) : reinterpret_cast<const char*>(nothing);
    const char *b = second ? reinterpret_cast<const char*>(second) : reinterpret_cast<const char*>(nothing);
    int64_t c = 0;
#if defined(__AVX512F__)
    for (; c + W <= width; c += W) {
        const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 2 * c)));
        const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 2 * c)));
        _mm512_storeu_si512(to + c, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
    }
#endif
    for (; c < width; ++c) {
        uint16_t x, y;
        std::memcpy(&x, a + 2 * c, 2);
        std::memcpy(&y, b + 2 * c, 2);
        const uint32_t pair = x | static_cast<uint32_t>(y) << 16;
        std::memcpy(to + c, &pair, 4);
    }
}

}  // namespace sb
