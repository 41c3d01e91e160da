// The matrix products of attention: scores are queries by keys, results are weights by values.
#pragma once

#include <type_traits>

#include "cache.hpp"

namespace octavo::OCTAVO_ISA {

// The largest product that keeps its sums in registers, in vectors.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 6, MAX_WIDTH = 4;
#else
constexpr int MAX_ROWS = 2, MAX_WIDTH = 4;
#endif

template <class T>
struct Arithmetic {
    using Sum = Floats;
    OCTAVO_INLINE Floats score(Words query, Words key, Floats sum) { return weigh(query, key, sum); }
    OCTAVO_INLINE Floats weigh(Words weight, Words value, Floats sum) {
        if constexpr (sizeof(T) == sizeof(float))
            return fused((Floats)weight, (Floats)value, sum);
        else
            return dot(weight, value, sum);
    }
};

template <>
struct Arithmetic<int8_t> {
    using Sum = Ints;
    OCTAVO_INLINE Ints score(Words query, Words key, Ints sum) { return dot_bytes(key, query, sum); }
    OCTAVO_INLINE Ints weigh(Words weight, Words value, Ints sum) { return dot_bytes(weight, value, sum); }
};

// While a product runs, each line that it reads has its counterpart `ahead` fetched to the cache: a burst of fetches would stall.

// Each element of a product is one chain of additions, so that its value is the same whichever rows and columns are computed beside it.

// queries [rows][words]. out [rows][TILE]: sums, still integers where T is int8.
struct ScoreProduct {
    const uint32_t* queries;
    int words;
    const uint32_t* const* panels;
    const uint32_t* const* ahead;
    float* out;
};

template <class T, int ROWS, int WIDTH, bool FETCHES>
static void multiply(const ScoreProduct& p, int row, int column) {
    using Sum = typename Arithmetic<T>::Sum;
    const uint32_t* queries = p.queries + int64_t(row) * p.words;
    const uint32_t* keys[WIDTH];
    ptrdiff_t ahead[WIDTH];
    for (int w = 0; w < WIDTH; w++) {
        const int panel = (column + w * LANES) / PANEL;
        keys[w] = p.panels[panel] + (column + w * LANES) % PANEL;
        ahead[w] = p.ahead[panel] - p.panels[panel];
    }
    Sum sum[ROWS][WIDTH] = {};
    for (int k = 0; k < p.words; k++) {
        Words right[WIDTH];
        for (int w = 0; w < WIDTH; w++) {
            right[w] = load_words(keys[w] + k * PANEL);
            if constexpr (FETCHES) __builtin_prefetch(keys[w] + k * PANEL + ahead[w], 0, 2);
        }
        for (int r = 0; r < ROWS; r++) {
            Words left = broadcast_word(queries + r * p.words + k);
            for (int w = 0; w < WIDTH; w++) sum[r][w] = Arithmetic<T>::score(left, right[w], sum[r][w]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) store_words(p.out + int64_t(row + r) * TILE + column + w * LANES, (Words)sum[r][w]);
}

// weights [rows][TILE / PACK] words, of which panels [first, end) count; added to out [rows], `out_stride` apart, [padded] each.
// scales [rows]: what an integer sum is worth.
struct ValueProduct {
    const uint32_t* weights;
    const uint32_t* const* panels;
    const uint32_t* const* ahead;
    int first, end, padded;
    float* out;
    int64_t out_stride;
    const float* scales;
};

template <class T, int ROWS, int WIDTH, bool FETCHES>
static void multiply(const ValueProduct& p, int row, int column) {
    using Sum = typename Arithmetic<T>::Sum;
    constexpr int WORDS = PANEL / PACK<T>, STRIDE = TILE / PACK<T>;
    float* out = p.out + row * p.out_stride + column;
    Sum sum[ROWS][WIDTH] = {};
    if constexpr (!IS_INT8<T>)
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < WIDTH; w++) sum[r][w] = load(out + r * p.out_stride + w * LANES);
    for (int panel = p.first; panel < p.end; panel++) {
        const uint32_t* weights = p.weights + int64_t(row) * STRIDE + panel * WORDS;
        const uint32_t* values = p.panels[panel] + column;
        const ptrdiff_t ahead = p.ahead[panel] - p.panels[panel];
        for (int k = 0; k < WORDS; k++) {
            Words right[WIDTH];
            for (int w = 0; w < WIDTH; w++) {
                const uint32_t* at = values + int64_t(k) * p.padded + w * LANES;
                right[w] = load_words(at);
                if constexpr (FETCHES) __builtin_prefetch(at + ahead, 0, 2);
            }
            for (int r = 0; r < ROWS; r++) {
                Words left = broadcast_word(weights + r * STRIDE + k);
                for (int w = 0; w < WIDTH; w++) sum[r][w] = Arithmetic<T>::weigh(left, right[w], sum[r][w]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) {
            float* to = out + r * p.out_stride + w * LANES;
            if constexpr (IS_INT8<T>)
                store(to, fused(to_floats(sum[r][w]), broadcast(p.scales[row + r]), load(to)));
            else
                store(to, sum[r][w]);
        }
}

template <class T, int ROWS, class P>
static void multiply_rows(const P& p, int row, int column, int width) {
    auto run = [&](auto fetches) {
        constexpr bool FETCHES = decltype(fetches)::value;
        switch (width) {
            case 1: return multiply<T, ROWS, 1, FETCHES>(p, row, column);
            case 2: return multiply<T, ROWS, 2, FETCHES>(p, row, column);
            case 3: return multiply<T, ROWS, 3, FETCHES>(p, row, column);
            default: return multiply<T, ROWS, 4, FETCHES>(p, row, column);
        }
    };
    row == 0 ? run(std::true_type{}) : run(std::false_type{});
}

// Columns [first, end), whole vectors, of `rows` rows.
template <class T, class P>
static void product(const P& p, int rows, int first, int end) {
    for (int column = first; column < end; column += MAX_WIDTH * LANES) {
        int left = (end - column) / LANES, width = left < MAX_WIDTH ? left : MAX_WIDTH;
        int row = 0;
        for (; row + MAX_ROWS <= rows; row += MAX_ROWS) multiply_rows<T, MAX_ROWS>(p, row, column, width);
        switch (rows - row) {
            case 1: multiply_rows<T, 1>(p, row, column, width); break;
#ifdef __AVX512F__
            case 2: multiply_rows<T, 2>(p, row, column, width); break;
            case 3: multiply_rows<T, 3>(p, row, column, width); break;
            case 4: multiply_rows<T, 4>(p, row, column, width); break;
            case 5: multiply_rows<T, 5>(p, row, column, width); break;
#endif
            default: break;
        }
    }
}

}  // namespace octavo::OCTAVO_ISA
