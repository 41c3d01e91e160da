// The kernels of the instruction set that this is compiled for.
#pragma once

#include "attention.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

static size_t scratch_floats(const AttentionCall& call, int queries) { return Scratch::floats(queries, call.dim); }

static size_t state_floats(const AttentionCall& call) { return Scratch::state_floats(round_up(call.dim)); }

static constexpr Kernels table(const char* name) {
    return {name, scratch_floats, state_floats, store_token, attend, merge, rms_norm, rotary, silu_and_mul};
}

}  // namespace octavo::OCTAVO_ISA
