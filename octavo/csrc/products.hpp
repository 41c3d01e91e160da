// Products and lookups, their work divided among the threads.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace octavo {

void linear(const Kernels& kernels, const LinearCall& call);

// Rows [first, end) of a call, which have a matrix of their own.
struct Part {
    const Matrix* matrix;
    int64_t first, end;
};

// A product for each part, all in one sweep of the threads. The call's own matrix is not read; outputs are those of each part's.
void linear_in_parts(const Kernels& kernels, const LinearCall& call, const std::vector<Part>& parts);

// Throws std::out_of_range where an id is none of the matrix's outputs.
void embedding(const Kernels& kernels, const EmbeddingCall& call);

}  // namespace octavo
