// Operators that work on one token at a time. They round where torch rounds, so that results are torch's, to the last place or so.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

// What is normalised takes the weight's type before it is multiplied with it.
template <class T, class W>
static void rms_norm_row(const T* x, const T* residual, const W* weight, T* out, T* sum, int size, float eps, float multiplier) {
    Floats squares = {};
    in_vectors(size, [&](int i, int count) {
        Floats wide = load_some(x + i, count);
        if (residual) {
            wide = rounded<T>(rounded<T>(wide * broadcast(multiplier)) + load_some(residual + i, count));
            store_some(sum + i, wide, count);
        }
        squares = fused(wide, wide, squares);
    });
    if (!weight) return;
    float scale = 1.0f / __builtin_sqrtf(total(squares) / float(size) + eps);
    const T* summed = residual ? sum : x;
    in_vectors(size, [&](int i, int count) {
        Floats normal = rounded<W>(load_some(summed + i, count) * broadcast(scale));
        store_some(out + i, normal * load_some(weight + i, count), count);
    });
}

template <class T, class W>
static void rms_norm_token(const NormCall& call, int64_t token) {
    int64_t at = token * call.heads * call.size;
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
    const T* residual = call.residual ? static_cast<const T*>(call.residual) + at : nullptr;
    T* sum = call.residual ? static_cast<T*>(call.sum) + at : nullptr;
    T* out = static_cast<T*>(call.out) + at;
    const W* weight = static_cast<const W*>(call.weight);
    for (int64_t head = 0; head < call.heads; head++) {
        int64_t skip = head * call.size;
        rms_norm_row(x + skip, residual ? residual + skip : nullptr, weight, out + skip, residual ? sum + skip : nullptr, call.size, call.eps,
                     call.multiplier);
    }
}

// x / (1 + e^-y).
OCTAVO_INLINE Floats times_logistic(Floats x, Floats y) {
    Floats one = broadcast(1.0f);
    Floats small = exponential(y > Floats{} ? -y : y);
    return (y < Floats{} ? x * small : x) / (one + small);
}

template <Activation ACTIVATION>
OCTAVO_INLINE Floats activated(Floats x) {
    if constexpr (ACTIVATION == Activation::silu) return times_logistic(x, x);
    // Half of 1 + tanh(z) is the logistic function of 2z; z = sqrt(2 / pi) * (x + 0.044715 x^3).
    return times_logistic(x, x * fused(x * x, broadcast(0.0713548163f), broadcast(1.59576912f)));
}

template <class T, Activation ACTIVATION>
static void activate_and_mul_token(const GateCall& call, int64_t token) {
    const T* gate = static_cast<const T*>(call.gate_up) + token * call.stride;
    const T* up = gate + call.size;
    T* out = static_cast<T*>(call.out) + token * call.size;
    in_vectors(call.size, [&](int i, int count) {
        Floats x = activated<ACTIVATION>(load_some(gate + i, count));
        store_some(out + i, rounded<T>(x) * load_some(up + i, count), count);
    });
}

static void softcap(const CapCall& call, int64_t row) {
    float* x = call.x + row * call.stride;
    in_vectors(int(call.size), [&](int i, int count) {
        store_some(x + i, tangent(load_some(x + i, count) / broadcast(call.cap)) * broadcast(call.cap), count);
    });
}

static void route(const RouteCall& call, int64_t token) {
    const float* x = call.logits + token * call.stride;
    int64_t* places = call.places + token * call.count;
    float* weights = call.weights + token * call.count;
    int held = 0;
    for (int i = 0; i < call.size; i++) {
        if (held == call.count && !(x[i] > x[places[held - 1]])) continue;
        int at = held < call.count ? held++ : held - 1;
        for (; at > 0 && x[i] > x[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = i;
    }
    const float peak = x[places[0]];
    for (int i = 0; i < call.count; i++) weights[i] = x[places[i]] - peak;
    double sum = 0;
    in_vectors(call.count, [&](int i, int count) { store_some(weights + i, exponential(load_some(weights + i, count)), count); });
    if (call.over_chosen) {
        for (int i = 0; i < call.count; i++) sum += weights[i];
    } else {
        Floats shares = {};
        in_vectors(call.size, [&](int i, int count) {
            shares += within(exponential(load_some(x + i, count) - broadcast(peak)), 0, 0, count, 0.0f);
        });
        sum = total(shares);
    }
    for (int i = 0; i < call.count; i++) weights[i] = float(weights[i] / sum);
}

template <class T>
static void combine_rows(const CombineCall& call, int64_t token) {
    T* out = static_cast<T*>(call.out) + token * call.size;
    in_vectors(call.size, [&](int i, int width) {
        Floats sum = {};
        for (int64_t at = token * call.count; at < (token + 1) * call.count; at++)
            sum = fused(load_some(call.x + call.rows[at] * call.size + i, width), broadcast(call.weights[at]), sum);
        store_some(out + i, sum, width);
    });
}

static void combine(const CombineCall& call, int64_t token) {
    call.type == Element::float32 ? combine_rows<float>(call, token) : combine_rows<Bfloat16>(call, token);
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
    if (call.type == Element::float32) return rms_norm_token<float, float>(call, token);
    if (call.weight_type == Element::float32) return rms_norm_token<Bfloat16, float>(call, token);
    rms_norm_token<Bfloat16, Bfloat16>(call, token);
}

template <Activation ACTIVATION>
static void activate_and_mul_as(const GateCall& call, int64_t token) {
    call.type == Element::float32 ? activate_and_mul_token<float, ACTIVATION>(call, token) : activate_and_mul_token<Bfloat16, ACTIVATION>(call, token);
}

static void activate_and_mul(const GateCall& call, int64_t token) {
    switch (call.activation) {
        case Activation::silu: return activate_and_mul_as<Activation::silu>(call, token);
        case Activation::gelu_tanh: return activate_and_mul_as<Activation::gelu_tanh>(call, token);
    }
}

}  // namespace octavo::OCTAVO_ISA
