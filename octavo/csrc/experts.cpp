#include "experts.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "buffer.hpp"
#include "by_token.hpp"
#include "products.hpp"

namespace octavo {

// Bounds the memory between the products.
constexpr int64_t TOKENS_TOGETHER = 512;

static void check(const ExpertsCall& call) {
    const size_t experts = call.gate_up.size();
    if (experts == 0 || call.down.size() != experts) throw std::invalid_argument("as many experts' matrices are needed going up as down");
    const int64_t size = call.gate_up[0]->inputs(), inner = call.down[0]->inputs();
    for (size_t i = 0; i < experts; i++)
        if (call.gate_up[i]->inputs() != size || call.gate_up[i]->outputs() != 2 * inner || call.down[i]->inputs() != inner ||
            call.down[i]->outputs() != size)
            throw std::invalid_argument("the matrices of expert " + std::to_string(i) + " are shaped otherwise");
    for (int64_t i = 0; i < call.tokens * call.count; i++)
        if (call.choices[i] < 0 || call.choices[i] >= int64_t(experts))
            throw std::out_of_range("expert " + std::to_string(call.choices[i]) + " of " + std::to_string(experts));
}

// Tokens [first, end).
static void run(const Kernels& kernels, const ExpertsCall& call, int64_t first, int64_t end) {
    const int64_t tokens = end - first, rows = tokens * call.count, size = call.down[0]->outputs(), inner = call.down[0]->inputs();
    const int64_t element = call.type == Element::bfloat16 ? 2 : 4;
    const int64_t* choices = call.choices + first * call.count;

    const int64_t experts = call.gate_up.size();
    std::vector<int64_t> next(experts + 1), places(rows);
    for (int64_t i = 0; i < rows; i++) next[choices[i] + 1]++;
    std::vector<Part> up, down;
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t from = next[expert], to = next[expert + 1] += from;
        if (from == to) continue;
        up.push_back({call.gate_up[expert], from, to});
        down.push_back({call.down[expert], from, to});
    }
    for (int64_t i = 0; i < rows; i++) places[i] = next[choices[i]]++;

    static thread_local Buffer buffers[4];
    float* x = buffers[0].take(rows * size);
    float* gate_up = buffers[1].take(rows * 2 * inner);
    float* activated = buffers[2].take(rows * inner);
    float* results = buffers[3].take(rows * size);
    const char* from = static_cast<const char*>(call.x) + first * call.x_stride * element;
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(reinterpret_cast<char*>(x) + places[i] * size * element, from + i / call.count * call.x_stride * element, size * element);
    linear_in_parts(kernels, {nullptr, x, call.type, size, rows, nullptr, gate_up, call.type, 2 * inner}, up);
    by_token(kernels.activate_and_mul, GateCall{gate_up, activated, call.type, call.activation, 2 * inner, int(inner)}, rows, inner);
    linear_in_parts(kernels, {nullptr, activated, call.type, inner, rows, nullptr, results, Element::float32, size}, down);
    const CombineCall combine{results, places.data(), call.weights + first * call.count, call.count, int(size),
                              static_cast<char*>(call.out) + first * size * element, call.type};
    by_token(kernels.combine, combine, tokens, call.count * size);
}

void experts(const Kernels& kernels, const ExpertsCall& call) {
    check(call);
    for (int64_t first = 0; first < call.tokens; first += TOKENS_TOGETHER)
        run(kernels, call, first, std::min(call.tokens, first + TOKENS_TOGETHER));
}

}  // namespace octavo
