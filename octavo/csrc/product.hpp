// The one matrix product of attention: scores are queries by keys, results are weights by values.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

// The largest product that keeps its sums in registers.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 6, MAX_WIDTH = 4;
#else
constexpr int MAX_ROWS = 2, MAX_WIDTH = 4;
#endif

// c[r, :] (+)= sum over k in [from, to) of a[r, k] b[k, :], k ascending. Each element is one chain of additions, so that its
// value is the same whichever rows and columns are computed beside it.
struct Product {
    const float* a;
    int64_t a_stride;
    const float* b;
    int64_t b_stride;
    float* c;
    int64_t c_stride;
    int from, to;
    bool adds;
};

template <int ROWS, int WIDTH>
static void small_product(const Product& p, int row, int column) {
    const float* a = p.a + row * p.a_stride;
    const float* b = p.b + column;
    float* c = p.c + row * p.c_stride + column;
    Floats sum[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) sum[r][w] = p.adds ? load(c + r * p.c_stride + w * LANES) : Floats{};
    for (int k = p.from; k < p.to; k++) {
        Floats right[WIDTH];
        for (int w = 0; w < WIDTH; w++) right[w] = load(b + k * p.b_stride + w * LANES);
        for (int r = 0; r < ROWS; r++) {
            Floats left = broadcast(a[r * p.a_stride + k]);
            for (int w = 0; w < WIDTH; w++) sum[r][w] = fused(left, right[w], sum[r][w]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) store(c + r * p.c_stride + w * LANES, sum[r][w]);
}

template <int ROWS>
static void row_of_products(const Product& p, int row, int column, int width) {
    switch (width) {
        case 1: return small_product<ROWS, 1>(p, row, column);
        case 2: return small_product<ROWS, 2>(p, row, column);
        case 3: return small_product<ROWS, 3>(p, row, column);
        default: return small_product<ROWS, 4>(p, row, column);
    }
}

// Columns [first, end), whole vectors, of `rows` rows.
static void product(const Product& p, int rows, int first, int end) {
    for (int column = first; column < end; column += MAX_WIDTH * LANES) {
        int left = (end - column) / LANES, width = left < MAX_WIDTH ? left : MAX_WIDTH;
        int row = 0;
        for (; row + MAX_ROWS <= rows; row += MAX_ROWS) row_of_products<MAX_ROWS>(p, row, column, width);
        switch (rows - row) {
            case 1: row_of_products<1>(p, row, column, width); break;
#ifdef __AVX512F__
            case 2: row_of_products<2>(p, row, column, width); break;
            case 3: row_of_products<3>(p, row, column, width); break;
            case 4: row_of_products<4>(p, row, column, width); break;
            case 5: row_of_products<5>(p, row, column, width); break;
#endif
            default: break;
        }
    }
}

}  // namespace octavo::OCTAVO_ISA
