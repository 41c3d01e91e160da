// Operators that work on one token at a time. They round where torch rounds, so that results are torch's, to the last place or so.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

// Calls apply(offset, count) for each vector of `size` elements, the last perhaps shorter.
template <class Apply>
OCTAVO_INLINE void in_vectors(int size, Apply apply) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) apply(i, LANES);
    if (i < size) apply(i, size - i);
}

template <class T>
OCTAVO_INLINE Floats load_some(const T* from, int count) {
    if (count == LANES) return load(from);
    alignas(64) T held[LANES] = {};
    memcpy(held, from, count * sizeof(T));
    return load(held);
}

template <class T>
OCTAVO_INLINE void store_some(T* to, Floats x, int count) {
    if (count == LANES) return store(to, x);
    alignas(64) T held[LANES];
    store(held, x);
    memcpy(to, held, count * sizeof(T));
}

template <class T>
static void rms_norm_row(const T* x, const T* residual, const T* weight, T* out, T* sum, int size, float eps) {
    Floats squares = {};
    in_vectors(size, [&](int i, int count) {
        Floats wide = load_some(x + i, count);
        if (residual) {
            wide = rounded<T>(wide + load_some(residual + i, count));
            store_some(sum + i, wide, count);
        }
        squares = fused(wide, wide, squares);
    });
    float scale = 1.0f / __builtin_sqrtf(total(squares) / float(size) + eps);
    const T* summed = residual ? sum : x;
    in_vectors(size, [&](int i, int count) {
        Floats normal = rounded<T>(load_some(summed + i, count) * broadcast(scale));
        store_some(out + i, normal * load_some(weight + i, count), count);
    });
}

template <class T>
static void rms_norm_token(const NormCall& call, int64_t token) {
    int64_t at = token * call.heads * call.size;
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
    const T* residual = call.residual ? static_cast<const T*>(call.residual) + at : nullptr;
    T* sum = call.residual ? static_cast<T*>(call.sum) + at : nullptr;
    T* out = static_cast<T*>(call.out) + at;
    const T* weight = static_cast<const T*>(call.weight);
    for (int64_t head = 0; head < call.heads; head++) {
        int64_t skip = head * call.size;
        rms_norm_row(x + skip, residual ? residual + skip : nullptr, weight, out + skip, residual ? sum + skip : nullptr, call.size, call.eps);
    }
}

template <class T>
static void rotary_token(const RotaryCall& call, int64_t token) {
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
    T* out = static_cast<T*>(call.out) + token * call.heads * call.dim;
    const float *cos = call.cos + token * call.half, *sin = call.sin + token * call.half;
    const int half = call.half, rest = call.dim - 2 * half;
    for (int head = 0; head < call.heads; head++, x += call.dim, out += call.dim) {
        in_vectors(half, [&](int i, int count) {
            Floats first = load_some(x + i, count), second = load_some(x + half + i, count);
            Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
            store_some(out + i, first * c - second * s, count);
            store_some(out + half + i, second * c + first * s, count);
        });
        memcpy(out + 2 * half, x + 2 * half, rest * sizeof(T));
    }
}

template <class T>
static void silu_and_mul_token(const GateCall& call, int64_t token) {
    const T* gate = static_cast<const T*>(call.gate_up) + token * call.stride;
    const T* up = gate + call.size;
    T* out = static_cast<T*>(call.out) + token * call.size;
    in_vectors(call.size, [&](int i, int count) {
        Floats x = load_some(gate + i, count), one = broadcast(1.0f);
        Floats small = exponential(x > Floats{} ? -x : x);
        Floats silu = (x < Floats{} ? x * small : x) / (one + small);
        store_some(out + i, rounded<T>(silu) * load_some(up + i, count), count);
    });
}

static void rms_norm(const NormCall& call, int64_t token) {
    call.type == Element::float32 ? rms_norm_token<float>(call, token) : rms_norm_token<Bfloat16>(call, token);
}

static void rotary(const RotaryCall& call, int64_t token) {
    call.type == Element::float32 ? rotary_token<float>(call, token) : rotary_token<Bfloat16>(call, token);
}

static void silu_and_mul(const GateCall& call, int64_t token) {
    call.type == Element::float32 ? silu_and_mul_token<float>(call, token) : silu_and_mul_token<Bfloat16>(call, token);
}

}  // namespace octavo::OCTAVO_ISA
