// One draw from a row of logits: filtered by top_k, min_p and top_p, each by its definition, then by inversion in the order of places.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

// Logits are looked at in blocks, so that of most of them the largest is all that is looked at twice.
constexpr int BLOCK = 64;

struct Candidate {
    float value;
    int32_t place;
    double weight;
};

// The larger comes first, and of equal ones the one at the lower place.
OCTAVO_INLINE bool before(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.place < b.place); }

OCTAVO_INLINE void exchange(Candidate& a, Candidate& b) {
    Candidate held = a;
    a = b;
    b = held;
}

static void sort_few(Candidate* candidates, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        for (int64_t j = i; j > 0 && before(candidates[j], candidates[j - 1]); j--) exchange(candidates[j], candidates[j - 1]);
}

// Brings those that come first to the front, the fewest that weigh `wanted` together, the last of them in its place; returns how many.
// Halves what may hold the last one around a pivot, as quickselect does.
static int64_t select(Candidate* candidates, int64_t count, double wanted) {
    int64_t low = 0, high = count;
    double weight = 0;
    while (high - low > 24) {
        Candidate few[3] = {candidates[low], candidates[(low + high) / 2], candidates[high - 1]};
        sort_few(few, 3);
        const Candidate pivot = few[1];
        int64_t middle = low;
        double upper = 0;
        for (int64_t i = low; i < high; i++)
            if (before(candidates[i], pivot)) {
                upper += candidates[i].weight;
                exchange(candidates[i], candidates[middle++]);
            }
        if (weight + upper >= wanted) {
            high = middle;
        } else {
            weight += upper;
            low = middle;
        }
    }
    sort_few(candidates + low, high - low);
    for (int64_t i = low; i < high; i++) {
        weight += candidates[i].weight;
        if (weight >= wanted) return i + 1;
    }
    return high;
}

class Draw {
public:
    static size_t scratch_bytes(const SampleCall& call) {
        const int64_t blocks = (call.size + BLOCK - 1) / BLOCK;
        return (call.size + blocks) * sizeof(Candidate) + blocks * (sizeof(double) + sizeof(float));
    }

    Draw(const SampleCall& call, int64_t row, char* scratch)
        : x(call.x + row * call.stride),
          size(call.size),
          blocks((size + BLOCK - 1) / BLOCK),
          peak(broadcast(call.peaks[row])),
          temperature(broadcast(call.temperature[row])),
          least(broadcast(call.min_p[row])),
          candidates(reinterpret_cast<Candidate*>(scratch)),
          others(candidates + size),
          sums(reinterpret_cast<double*>(others + blocks)),
          tops(reinterpret_cast<float*>(sums + blocks)) {}

    int64_t run(int64_t top_k, double top_p, double uniform) {
        const bool is_cut_by_k = top_k > 0 && top_k < size;
        if (is_cut_by_k || top_p < 1) find_tops();
        int64_t count = -1;
        if (is_cut_by_k) {
            collect(threshold(top_k), 1.0);
            count = select(candidates, found, double(top_k));
            last = candidates[count - 1];
        }
        if (top_p < 1) keep_share(count, top_p);
        return invert(uniform);
    }

private:
    // min_p drops what weighs less than it; the likeliest weighs 1.
    Floats weights(Floats value) const {
        Floats weight = exponential((value - peak) / temperature);
        return weight >= least ? weight : Floats{};
    }

    // Calls apply(offset, values, count) for the vectors of a block; beyond `count` values are minus infinity.
    template <class Apply>
    void in_block(int64_t block, Apply apply) const {
        const int length = int(size - block * BLOCK < BLOCK ? size - block * BLOCK : BLOCK);
        in_vectors(length, [&](int i, int count) {
            Floats value = load_some(x + block * BLOCK + i, count);
            apply(i, count == LANES ? value : within(value, 0, 0, count, NONE), count);
        });
    }

    void find_tops() {
        for (int64_t block = 0; block < blocks; block++) {
            Floats top = broadcast(NONE);
            in_block(block, [&](int, Floats value, int) { top = larger(value, top); });
            tops[block] = largest(top);
        }
    }

    // Not above the top_k-th largest logit: as many blocks hold one that is not below it.
    float threshold(int64_t top_k) {
        if (top_k > blocks) return NONE;
        for (int64_t block = 0; block < blocks; block++) others[block] = {tops[block], int32_t(block), 1.0};
        return others[select(others, blocks, double(top_k)) - 1].value;
    }

    // Logits from `threshold` on become candidates, of that weight, or of their own where it is 0.
    void collect(float threshold, double weight) {
        found = 0;
        for (int64_t block = 0; block < blocks; block++) {
            if (tops[block] < threshold) continue;
            in_block(block, [&](int i, Floats value, int count) {
                Floats own = weight > 0 ? Floats{} : weights(value);
                for (int lane = 0; lane < count; lane++)
                    if (value[lane] >= threshold)
                        candidates[found++] = {value[lane], int32_t(block * BLOCK + i + lane), weight > 0 ? weight : double(own[lane])};
            });
        }
    }

    // The fewest likeliest tokens whose share of the weight reaches top_p, of the first `count` candidates, or of all tokens where it is -1.
    void keep_share(int64_t count, double top_p) {
        double sum = 0;
        if (count >= 0) {
            for (int64_t i = 0; i < count; i++) {
                candidates[i].weight = weights(broadcast(candidates[i].value))[0];
                sum += candidates[i].weight;
            }
        } else {
            sum = add_up();
            // Tokens that weigh less than this come to less than what top_p leaves out, all of them together.
            const float cut = float(0.5 * (1 - top_p) * sum / double(size));
            float threshold = cut > 0 ? peak[0] + temperature[0] * __builtin_logf(cut) : NONE;
            collect(threshold, 0.0);
            count = found;
        }
        const int64_t kept = select(candidates, count, top_p * sum);
        last = candidates[kept - 1];
    }

    // The weight of a block's vector, of what is kept.
    Floats kept(int64_t block, int i, Floats value) const {
        Ints place = first_lanes() + int32_t(block * BLOCK + i);
        Floats bound = broadcast(last.value);
        return (value > bound) | ((value == bound) & (place <= last.place)) ? weights(value) : Floats{};
    }

    double add_up() {
        double sum = 0;
        for (int64_t block = 0; block < blocks; block++) {
            Floats lanes = {};
            in_block(block, [&](int i, Floats value, int) { lanes += kept(block, i, value); });
            sums[block] = total(lanes);
            sum += sums[block];
        }
        return sum;
    }

    // The first place at which the weights up to it exceed `uniform` of all.
    int64_t invert(double uniform) {
        double wanted = uniform * add_up(), sum = 0;
        int64_t block = 0, chosen = -1;
        while (block + 1 < blocks && !(sum + sums[block] > wanted)) sum += sums[block++];
        while (block > 0 && sums[block] == 0) block--;  // rounding went past all that is kept
        bool is_beyond = false;
        in_block(block, [&](int i, Floats value, int count) {
            Floats weight = kept(block, i, value);
            for (int lane = 0; lane < count && !is_beyond; lane++) {
                if (weight[lane] > 0) chosen = block * BLOCK + i + lane;
                sum += weight[lane];
                is_beyond = sum > wanted;
            }
        });
        return chosen;
    }

    const float* x;
    const int64_t size, blocks;
    const Floats peak, temperature, least;
    Candidate* candidates;
    Candidate* others;
    double* sums;
    float* tops;
    int64_t found = 0;
    Candidate last{NONE, std::numeric_limits<int32_t>::max(), 0.0};
};

static size_t sample_bytes(const SampleCall& call) { return Draw::scratch_bytes(call); }

static void sample(const SampleCall& call, int64_t row, char* scratch) {
    call.places[row] = Draw(call, row, scratch).run(call.top_k[row], call.top_p[row], call.uniform[row]);
}

}  // namespace octavo::OCTAVO_ISA
