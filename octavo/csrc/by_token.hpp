// The loop over tokens that the simple kernels share.
#pragma once

#include <cstdint>

namespace octavo {

// Below this many elements the threads cost more than they give.
constexpr int64_t WORTH_SHARING = 16384;

template <class Call>
void by_token(void (*kernel)(const Call&, int64_t), const Call& call, int64_t tokens, int64_t elements_per_token) {
#pragma omp parallel for schedule(static) if (tokens * elements_per_token >= WORTH_SHARING)
    for (int64_t token = 0; token < tokens; token++) kernel(call, token);
}

}  // namespace octavo
