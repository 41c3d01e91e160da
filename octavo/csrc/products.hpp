// Products and lookups, their work divided among the threads.
#pragma once

#include "kernels.hpp"

namespace octavo {

void linear(const Kernels& kernels, const LinearCall& call);

// Throws std::out_of_range where an id is none of the matrix's outputs.
void embedding(const Kernels& kernels, const EmbeddingCall& call);

}  // namespace octavo
