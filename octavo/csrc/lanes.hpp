// A vector of floats of the width at hand, and the few operations that the kernels are written in.
// Compiled once for each instruction set, inside that set's namespace: no code of one may be linked into another.
#pragma once

#include <cstring>
#include <limits>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.hpp"

namespace octavo::OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Words = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));
using Bytes = uint8_t __attribute__((vector_size(LANES)));

#define OCTAVO_INLINE static inline __attribute__((always_inline))

constexpr float NONE = -std::numeric_limits<float>::infinity();

OCTAVO_INLINE int round_up(int size) { return (size + LANES - 1) / LANES * LANES; }

OCTAVO_INLINE Floats broadcast(float x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (Floats)_mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

OCTAVO_INLINE Ints broadcast(int32_t x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
    return (Ints)_mm256_set1_epi32(x);
#else
    return Ints{x, x, x, x};
#endif
}

// The 32-bit word at any address, in every lane.
OCTAVO_INLINE Words broadcast_word(const void* from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return (Words)broadcast(word);
}

OCTAVO_INLINE Words load_words(const void* from) {
    Words out;
    memcpy(&out, from, sizeof out);
    return out;
}

OCTAVO_INLINE void store_words(void* to, Words x) { memcpy(to, &x, sizeof x); }

OCTAVO_INLINE Floats load(const float* from) {
    Floats out;
    memcpy(&out, from, sizeof out);
    return out;
}

OCTAVO_INLINE void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }

OCTAVO_INLINE Floats load(const Bfloat16* from) {
#ifdef __AVX512F__
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    Halves bits;
    memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

OCTAVO_INLINE Floats load(const Float16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Halves bits;
    memcpy(&bits, from, sizeof bits);
    Words wide = __builtin_convertvector(bits, Words), magnitude = wide & 0x7fff;
    // Multiplied, a subnormal becomes normal; infinity and NaN need their exponent set.
    Words finite = (Words)((Floats)(magnitude << 13) * 0x1p112f);
    return (Floats)((magnitude < 0x7c00 ? finite : finite | 0x7f800000) | (wide & 0x8000) << 16);
#endif
}

// The upper half of the word is the bfloat16 nearest to x, even where two are; any NaN becomes the quiet one.
OCTAVO_INLINE Words nearest_bfloat16(Floats x) {
    Words bits = (Words)x;
    return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : Words{} + 0x7fc00000;
}

OCTAVO_INLINE void store(Bfloat16* to, Floats x) {
    Halves out = __builtin_convertvector(nearest_bfloat16(x) >> 16, Halves);
    memcpy(to, &out, sizeof out);
}

OCTAVO_INLINE float widen(float x) { return x; }

OCTAVO_INLINE float widen(Bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

OCTAVO_INLINE void narrow(float x, float& out) { out = x; }

OCTAVO_INLINE void narrow(float x, Bfloat16& out) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    out.bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

// x as it would be read back from memory.
template <class T>
OCTAVO_INLINE Floats rounded(Floats x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    return (Floats)(nearest_bfloat16(x) & 0xffff0000);
}

OCTAVO_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

OCTAVO_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// The nearest integers, even where two are; for magnitudes below 2^22.
OCTAVO_INLINE Ints nearest(Floats x) {
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the integer in the low bits
    return (Ints)(x + magic) - (Ints)magic;
}

// sum + the products of a word's two bfloat16, of which the first is in the lower half.
OCTAVO_INLINE Floats dot(Words a, Words b, Floats sum) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fused((Floats)(a << 16), (Floats)(b << 16), sum);
    return fused((Floats)(a & 0xffff0000), (Floats)(b & 0xffff0000), sum);
#endif
}

// sum + the products of a word's four bytes, unsigned in `a` and signed in `b`; exact.
OCTAVO_INLINE Ints dot_bytes(Words a, Words b, Ints sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i u = (__m256i)a, s = (__m256i)b;
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return sum + (Ints)_mm256_add_epi32(even, odd);
#else
    for (int byte = 0; byte < 4; byte++) sum += (Ints)(a >> 8 * byte & 255) * ((Ints)(b << (24 - 8 * byte)) >> 24);
    return sum;
#endif
}

// The larger; where one is NaN, the second.
OCTAVO_INLINE Floats larger(Floats x, Floats than) { return x > than ? x : than; }

OCTAVO_INLINE float largest(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float out = x[0];
    for (int i = 1; i < LANES; i++) out = x[i] > out ? x[i] : out;
    return out;
#endif
}

OCTAVO_INLINE int32_t largest(Ints x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t out = x[0];
    for (int i = 1; i < LANES; i++) out = x[i] > out ? x[i] : out;
    return out;
#endif
}

// Whether any lane of a comparison holds.
OCTAVO_INLINE bool any(Ints x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    int32_t out = 0;
    for (int i = 0; i < LANES; i++) out |= x[i];
    return out != 0;
#endif
}

OCTAVO_INLINE float total(Floats x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

OCTAVO_INLINE int32_t total(Ints x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t out = x[0];
    for (int i = 1; i < LANES; i++) out += x[i];
    return out;
#endif
}

// 0, 1, 2, ...
OCTAVO_INLINE Ints first_lanes() {
#if defined(__AVX512F__)
    return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
    return Ints{0, 1, 2, 3, 4, 5, 6, 7};
#else
    return Ints{0, 1, 2, 3};
#endif
}

// x in lanes whose column is in [from, to), `other` elsewhere; the first lane is `column`.
OCTAVO_INLINE Floats within(Floats x, int column, int from, int to, float other) {
    Ints at = first_lanes() + column;
    return ((at >= from) & (at < to)) ? x : broadcast(other);
}

// e^x for x <= 0 within 2 units in the last place, 0 where that would be subnormal, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its series.
OCTAVO_INLINE Floats exponential(Floats x) {
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    Floats shifted = fused(x, broadcast(1.44269504f), magic);
    Floats n = shifted - magic;
    Floats r = fused(n, broadcast(-0.693359375f), x);
    r = fused(n, broadcast(2.12194440e-4f), r);
    Floats p = broadcast(1.0f / 5040.0f);
    p = fused(p, r, broadcast(1.0f / 720.0f));
    p = fused(p, r, broadcast(1.0f / 120.0f));
    p = fused(p, r, broadcast(1.0f / 24.0f));
    p = fused(p, r, broadcast(1.0f / 6.0f));
    p = fused(p, r, broadcast(0.5f));
    p = fused(p, r, broadcast(1.0f));
    p = fused(p, r, broadcast(1.0f));
    Floats power = (Floats)((((Ints)shifted - (Ints)magic) + 127) << 23);
    return x < broadcast(-87.0f) ? Floats{} : p * power;
}

// tanh x within some 3 units in the last place, NaN for NaN: by its series near 0, where 1 - e^-2x would lose digits.
OCTAVO_INLINE Floats tangent(Floats x) {
    const Floats one = broadcast(1.0f), size = x < Floats{} ? -x : x, square = x * x;
    const Floats small = exponential(size * broadcast(-2.0f));
    Floats p = broadcast(62.0f / 2835.0f);
    p = fused(p, square, broadcast(-17.0f / 315.0f));
    p = fused(p, square, broadcast(2.0f / 15.0f));
    p = fused(p, square, broadcast(-1.0f / 3.0f));
    const Floats out = size < broadcast(0.3f) ? fused(p * square, size, size) : (one - small) / (one + small);
    return x < Floats{} ? -out : out;
}

// e^x for x <= 0 within 0.005%, 0 where that would be subnormal, NaN for NaN. x log2 e = n + f with |f| <= 1 / 2, and 2^f by its series.
OCTAVO_INLINE Floats exponential_to_4_digits(Floats x) {
    const Floats to_base_2 = broadcast(1.44269504f);
#ifdef __AVX512F__
    Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * to_base_2), 0);
#else
    const Floats magic = broadcast(12582912.0f);  // as above
    Floats shifted = fused(x, to_base_2, magic);
    Floats n = shifted - magic;
#endif
    Floats f = fused(x, to_base_2, -n);
    Floats p = broadcast(9.618129e-3f);
    p = fused(p, f, broadcast(5.5504109e-2f));
    p = fused(p, f, broadcast(2.4022651e-1f));
    p = fused(p, f, broadcast(6.9314718e-1f));
    p = fused(p, f, broadcast(1.0f));
#ifdef __AVX512F__
    Floats y = (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    Floats y = p * (Floats)((((Ints)shifted - (Ints)magic) + 127) << 23);
#endif
    return x < broadcast(-87.0f) ? Floats{} : y;
}

// Calls apply(offset, count) for each vector of `size` elements, the last perhaps shorter.
template <class Apply>
OCTAVO_INLINE void in_vectors(int size, Apply apply) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) apply(i, LANES);
    if (i < size) apply(i, size - i);
}

template <class T>
OCTAVO_INLINE Floats load_some(const T* from, int count) {
    if (count == LANES) return load(from);
    alignas(64) T held[LANES] = {};
    memcpy(held, from, count * sizeof(T));
    return load(held);
}

template <class T>
OCTAVO_INLINE void store_some(T* to, Floats x, int count) {
    if (count == LANES) return store(to, x);
    alignas(64) T held[LANES];
    store(held, x);
    memcpy(to, held, count * sizeof(T));
}

}  // namespace octavo::OCTAVO_ISA
