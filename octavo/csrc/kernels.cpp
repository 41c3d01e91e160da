// Compiled once for each instruction set, OCTAVO_ISA being its name.
#include "attention.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "sampling.hpp"

namespace octavo::OCTAVO_ISA {

#define OCTAVO_TEXT(name) #name
#define OCTAVO_NAME(name) OCTAVO_TEXT(name)

static size_t scratch_floats(const AttentionCall& call, int queries) { return Scratch::floats(queries, call.dim); }

static size_t state_floats(const AttentionCall& call) { return Scratch::state_floats(round_up(call.dim)); }

extern const Kernels kernels;
const Kernels kernels{
    OCTAVO_NAME(OCTAVO_ISA),
    scratch_floats,
    state_floats,
    store_token,
    attend,
    merge,
    rms_norm,
    activate_and_mul,
    softcap,
    route,
    combine,
    mask,
    argmax,
    look_bytes,
    sample,
    score,
    prepared_bytes,
    prepare,
    product_bytes,
    multiply,
    embed,
};

}  // namespace octavo::OCTAVO_ISA
