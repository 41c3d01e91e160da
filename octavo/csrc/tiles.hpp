// Rows of keys and values, wherever they lie, to the float32 tiles that the products read.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

// size elements, widened; the rest of the last vector is zero.
template <class T>
static void widen_row(const T* from, int size, float* out) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(from + i));
    if (i == size) return;
    store(out + i, Floats{});
    for (; i < size; i++) out[i] = widen(from[i]);
}

template <class From, class To>
static void convert_row(const From* from, int size, To* out) {
    if constexpr (sizeof(From) == sizeof(To)) {
        memcpy(out, from, size * sizeof(From));
    } else {
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, load(from + i));
        for (; i < size; i++) narrow(widen(from[i]), out[i]);
    }
}

#ifdef __AVX512F__

// 16 rows of 16 words, in place.
OCTAVO_INLINE void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// LANES rows of `size` elements -> columns of out [size, TILE]. A word holds one float, or two neighbouring bfloat16.
template <class T>
static void transpose_rows(const T* const* rows, int size, float* out) {
    constexpr int PER_WORD = 4 / sizeof(T);
    for (int at = 0; at < size; at += 16 * PER_WORD) {
        int left = (size - at) / PER_WORD, words = left < 16 ? left : 16;
        __mmask16 mask = __mmask16((1u << words) - 1);
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + at);
        transpose(r);
        float* to = out + int64_t(at) * TILE;
        for (int i = 0; i < words; i++) {
            if constexpr (PER_WORD == 1) {
                _mm512_storeu_ps(to + i * TILE, _mm512_castsi512_ps(r[i]));
            } else {
                _mm512_storeu_ps(to + 2 * i * TILE, _mm512_castsi512_ps(_mm512_slli_epi32(r[i], 16)));
                __m512i odd = _mm512_and_si512(r[i], _mm512_set1_epi32(int(0xffff0000)));
                _mm512_storeu_ps(to + (2 * i + 1) * TILE, _mm512_castsi512_ps(odd));
            }
        }
    }
}

#else

template <class T>
static void transpose_rows(const T* const* rows, int size, float* out) {
    for (int i = 0; i < size; i++)
        for (int lane = 0; lane < LANES; lane++) out[i * TILE + lane] = widen(rows[lane][i]);
}

#endif

}  // namespace octavo::OCTAVO_ISA
