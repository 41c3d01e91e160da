// A mixture of experts: each token goes through a few of many gated feed-forwards.
#pragma once

#include <vector>

#include "matrix.hpp"

namespace octavo {

// x [tokens, size] with a stride between tokens; choices, each below the number of experts, and weights [tokens, count]; out [tokens, size].
// gate_up[e] [2 * inner, size] and down[e] [size, inner] are expert e's.
struct ExpertsCall {
    const void* x;
    Element type;
    int64_t x_stride, tokens;
    const int64_t* choices;
    const float* weights;
    int count;
    const std::vector<const Matrix*>& gate_up;
    const std::vector<const Matrix*>& down;
    Activation activation;
    void* out;
};

// Rows are sorted by expert, so that each expert chosen is one product over its rows; a token's results are added in the order of its
// choices. Throws std::out_of_range for a choice that is no expert, std::invalid_argument where shapes do not fit together.
void experts(const Kernels& kernels, const ExpertsCall& call);

}  // namespace octavo
