// Operators that work on one token at a time. They round where torch rounds, so that results are torch's, to the last place or so.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

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

static void argmax(const ArgmaxCall& call, int64_t row) {
    const float* x = call.x + row * call.stride;
    Floats top = broadcast(NONE), poison = {};
    Ints place = broadcast(0), at = first_lanes();
    const int64_t whole = call.size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES, at += LANES) {
        Floats value = load(x + i);
        place = value > top ? at : place;
        top = larger(value, top);
        poison = value == value ? poison : value;
    }
    float peak = NONE;
    int64_t first = call.size;
    bool is_number = total(poison) == 0;
    auto meet = [&](float value, int64_t i) {
        is_number &= value == value;
        if (value > peak || (value == peak && i < first)) {
            peak = value;
            first = i;
        }
    };
    for (int lane = 0; lane < LANES && whole > 0; lane++) meet(top[lane], top[lane] > NONE ? place[lane] : lane);
    for (int64_t i = whole; i < call.size; i++) meet(x[i], i);
    call.peaks[row] = is_number ? peak : std::numeric_limits<float>::quiet_NaN();
    call.places[row] = first;
}

static void mask(const MaskCall& call, int64_t at) {
    float* x = call.x + call.rows[at] * call.stride;
    const int32_t* bits = call.bits + at * call.words;
    const Ints own = broadcast(int32_t(1)) << first_lanes();
    in_vectors(call.size, [&](int i, int count) {
        const int32_t word = i / 32 < call.words ? bits[i / 32] : 0;
        const Ints allowed = broadcast(word >> i % 32) & own;
        store_some(x + i, allowed != 0 ? load_some(x + i, count) : broadcast(NONE), count);
    });
}

static void rms_norm(const NormCall& call, int64_t token) {
    call.type == Element::float32 ? rms_norm_token<float>(call, token) : rms_norm_token<Bfloat16>(call, token);
}

static void silu_and_mul(const GateCall& call, int64_t token) {
    call.type == Element::float32 ? silu_and_mul_token<float>(call, token) : silu_and_mul_token<Bfloat16>(call, token);
}

}  // namespace octavo::OCTAVO_ISA
