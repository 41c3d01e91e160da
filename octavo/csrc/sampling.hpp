// What is taken from a row of logits: a draw, filtered by top_k, min_p and top_p, each by its definition, then by inversion in the order
// of places; and the log-probabilities of one token and of the likeliest.
#pragma once

#include "lanes.hpp"

namespace octavo::OCTAVO_ISA {

// Logits are looked at in blocks, so that of most of them the largest is all that is looked at twice.
constexpr int BLOCK = 64;

// Vectors added up in float32 before their sum is added to the others in float64.
constexpr int ADDED = 16;

// As few tokens are put in order one by one.
constexpr int64_t FEW = 256;

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

OCTAVO_INLINE float as_float(int32_t bits) {
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

OCTAVO_INLINE int32_t as_bits(float x) {
    int32_t out;
    memcpy(&out, &x, sizeof out);
    return out;
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

// Puts all in order, in place: a heap whose first is the last in order gives them up one by one.
static void sort_many(Candidate* candidates, int64_t count) {
    auto sink = [&](int64_t at, int64_t size) {
        for (int64_t child; (child = 2 * at + 1) < size; at = child) {
            if (child + 1 < size && before(candidates[child], candidates[child + 1])) child++;
            if (!before(candidates[at], candidates[child])) return;
            exchange(candidates[at], candidates[child]);
        }
    };
    for (int64_t at = count / 2; at-- > 0;) sink(at, count);
    for (int64_t size = count; --size > 0;) {
        exchange(candidates[0], candidates[size]);
        sink(0, size);
    }
}

// A row in blocks, the largest of each, and what of it is looked at one by one.
class Blocks {
public:
    static size_t scratch_bytes(int64_t size) {
        const int64_t blocks = (size + BLOCK - 1) / BLOCK;
        return (size + blocks) * sizeof(Candidate) + blocks * (sizeof(double) + sizeof(float)) + blocks * BLOCK * sizeof(float);
    }

    Blocks(const float* x, int64_t size, char* scratch)
        : x(x),
          size(size),
          blocks((size + BLOCK - 1) / BLOCK),
          candidates(reinterpret_cast<Candidate*>(scratch)),
          others(candidates + size),
          sums(reinterpret_cast<double*>(others + blocks)),
          tops(reinterpret_cast<float*>(sums + blocks)),
          weighed(tops + blocks) {
        for (int64_t block = 0; block < blocks; block++) {
            Floats top = broadcast(NONE);
            in_block(block, [&](int, Floats value, int) { top = larger(value, top); });
            tops[block] = largest(top);
        }
    }

protected:
    // Calls apply(offset, values, count) for the vectors of a block; beyond `count` values are minus infinity.
    template <class Apply>
    void in_block(int64_t block, Apply apply) const {
        const int length = int(size - block * BLOCK < BLOCK ? size - block * BLOCK : BLOCK);
        in_vectors(length, [&](int i, int count) {
            Floats value = load_some(x + block * BLOCK + i, count);
            apply(i, count == LANES ? value : within(value, 0, 0, count, NONE), count);
        });
    }

    // The `count` largest become the first candidates, the last of them in its place; fewer where there are not so many.
    int64_t take_largest(int64_t count) {
        // As many blocks hold a logit that is not below this.
        float threshold = NONE;
        if (count <= blocks) {
            for (int64_t block = 0; block < blocks; block++) others[block] = {tops[block], int32_t(block), 1.0};
            threshold = others[select(others, blocks, double(count)) - 1].value;
        }
        int64_t found = 0;
        for (int64_t block = 0; block < blocks; block++) {
            if (tops[block] < threshold) continue;
            in_block(block, [&](int i, Floats value, int length) {
                if (!any(value >= broadcast(threshold))) return;
                for (int lane = 0; lane < length; lane++)
                    if (value[lane] >= threshold) candidates[found++] = {value[lane], int32_t(block * BLOCK + i + lane), 1.0};
            });
        }
        return select(candidates, found, double(count));
    }

    const float* x;
    const int64_t size, blocks;
    Candidate* candidates;
    Candidate* others;
    double* sums;
    float* tops;
    float* weighed;
};

class Draw : Blocks {
public:
    Draw(const SampleCall& call, int64_t row, char* scratch)
        : Blocks(call.x + row * call.stride, call.size, scratch),
          peak(broadcast(call.peaks[row])),
          temperature(broadcast(call.temperature[row])),
          least(broadcast(call.min_p[row])),
          lightest(float(call.peaks[row] + call.temperature[row] * (__builtin_fmax(__builtin_log(call.min_p[row]), -87) - 0.01))) {}

    int64_t run(int64_t top_k, double top_p, double uniform) {
        if (top_k > 0 && top_k < size) {
            const int64_t count = take_largest(top_k);
            last = candidates[count - 1];
            if (top_p < 1) keep_share_of(count, top_p);
        } else if (top_p < 1) {
            keep_share(top_p);
        }
        return invert(uniform, add_up());
    }

private:
    // min_p drops what weighs less than it; the likeliest weighs 1.
    Floats weights(Floats value) const {
        Floats weight = exponential((value - peak) / temperature);
        return weight >= least ? weight : Floats{};
    }

    // The fewest of the first `count` candidates whose share of their weight reaches top_p.
    void keep_share_of(int64_t count, double top_p) {
        double sum = 0;
        for (int64_t i = 0; i < count; i++) {
            candidates[i].weight = weights(broadcast(candidates[i].value))[0];
            sum += candidates[i].weight;
        }
        last = candidates[select(candidates, count, top_p * sum) - 1];
    }

    // The fewest likeliest tokens of all whose share of the weight reaches top_p.
    void keep_share(double top_p) {
        const double sum = weigh();
        const double wanted = top_p * sum;
        // All that weigh `low` or more reach the share, and all that weigh `high` or more do not; in between stand `between` tokens. What
        // weighs less than this at first comes to less than what top_p leaves out, all of it together.
        float low = float(0.5 * (1 - top_p) * sum / double(size)), high = 2.0f;
        double above = 0;
        int64_t between = size, higher = 0;
        while (between > FEW && as_bits(high) - as_bits(low) > 1) {
            const float pivot = as_float((as_bits(low) + as_bits(high)) / 2);  // as many floats lie above as below
            int64_t count = 0;
            const double weight = weight_from(pivot, count);
            if (weight >= wanted) {
                low = pivot;
                between = count - higher;
            } else {
                high = pivot;
                between -= count - higher;
                above = weight;
                higher = count;
            }
        }
        int64_t found = 0;
        for (int64_t block = 0; block < blocks; block++)
            in_block(block, [&](int i, Floats value, int length) {
                const float* weight = weighed + block * BLOCK + i;
                if (!any(load(weight) >= broadcast(low))) return;
                for (int lane = 0; lane < length; lane++)
                    if (weight[lane] >= low && weight[lane] < high)
                        candidates[found++] = {value[lane], int32_t(block * BLOCK + i + lane), double(weight[lane])};
            });
        if (found) last = candidates[select(candidates, found, wanted - above) - 1];
    }

    // All weights side by side; returns their sum.
    double weigh() {
        is_weighed = true;
        for (int64_t block = 0; block < blocks; block++) {
            float* to = weighed + block * BLOCK;
            const bool is_light = tops[block] < lightest;
            for (int i = 0; i < BLOCK; i += LANES) store(to + i, Floats{});
            if (!is_light) in_block(block, [&](int i, Floats value, int) { store(to + i, weights(value)); });
        }
        int64_t count = 0;
        return weight_from(0, count);
    }

    // The weight of all that weigh `least` or more, and how many there are.
    double weight_from(float least, int64_t& count) const {
        const Floats bound = broadcast(least);
        double sum = 0;
        Ints held = {};
        for (int64_t i = 0; i < blocks * BLOCK;) {
            const int64_t end = i + ADDED * LANES < blocks * BLOCK ? i + ADDED * LANES : blocks * BLOCK;
            Floats lanes = {};
            for (; i < end; i += LANES) {
                Floats weight = load(weighed + i);
                lanes += weight >= bound ? weight : Floats{};
                held -= weight >= bound;
            }
            sum += total(lanes);
        }
        count = total(held);
        return sum;
    }

    // The weights of a block's vector, of what is kept.
    Floats kept(int64_t block, int i, Floats value) const {
        Ints place = first_lanes() + int32_t(block * BLOCK + i);
        Floats bound = broadcast(last.value);
        Floats weight = is_weighed ? load(weighed + block * BLOCK + i) : weights(value);
        return (value > bound) | ((value == bound) & (place <= last.place)) ? weight : Floats{};
    }

    // The sums of what is kept, by block, and of all blocks.
    double add_up() {
        double sum = 0;
        for (int64_t block = 0; block < blocks; block++) {
            sums[block] = 0;
            if (tops[block] < lightest || tops[block] < last.value) continue;
            Floats lanes = {};
            in_block(block, [&](int i, Floats value, int) { lanes += kept(block, i, value); });
            sums[block] = total(lanes);
            sum += sums[block];
        }
        return sum;
    }

    // The first place at which the weights up to it exceed `uniform` of all.
    int64_t invert(double uniform, double all) const {
        double wanted = uniform * all, sum = 0;
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

    const Floats peak, temperature, least;
    const float lightest;
    bool is_weighed = false;
    Candidate last{NONE, std::numeric_limits<int32_t>::max(), 0.0};
};

// The log-probabilities of a token and of the likeliest ones, and their ranks: one more than there are larger logits.
class Score : Blocks {
public:
    Score(const ScoreCall& call, int64_t row, char* scratch) : Blocks(call.x + row * call.stride, call.size, scratch) {}

    // NaN for all of a row that holds one, or whose largest logit is not finite.
    void run(int64_t token, int64_t count, float* logprobs, int64_t* ids, int64_t* ranks) {
        float peak = NONE;
        for (int64_t block = 0; block < blocks; block++) peak = tops[block] > peak ? tops[block] : peak;
        const Floats own = broadcast(x[token]);
        double sum = 0;
        Ints higher = {};
        for (int64_t block = 0; block < blocks; block++) {
            Floats lanes = {};
            in_block(block, [&](int, Floats value, int) {
                lanes += exponential(value - broadcast(peak));
                higher -= value > own;
            });
            sum += total(lanes);
        }
        const double all = peak + __builtin_log(sum);
        ids[0] = token;
        logprobs[0] = float(x[token] - all);
        ranks[0] = total(higher) + 1;
        const bool is_sound = all == all;
        if (is_sound && count > 0) sort_many(candidates, take_largest(count));
        for (int64_t i = 0; i < count; i++) {
            const Candidate found = is_sound ? candidates[i] : Candidate{float(all), 0, 0.0};
            ids[1 + i] = found.place;
            logprobs[1 + i] = float(found.value - all);
            ranks[1 + i] = is_sound && i > 0 && found.value == candidates[i - 1].value ? ranks[i] : i + 1;
        }
    }
};

static size_t look_bytes(int64_t size) { return Blocks::scratch_bytes(size); }

static void sample(const SampleCall& call, int64_t row, char* scratch) {
    call.places[row] = Draw(call, row, scratch).run(call.top_k[row], call.top_p[row], call.uniform[row]);
}

static void score(const ScoreCall& call, int64_t row, char* scratch) {
    const int64_t at = row * (1 + call.count);
    Score(call, row, scratch).run(call.token_ids[row], call.count, call.logprobs + at, call.ids + at, call.ranks + at);
}

}  // namespace octavo::OCTAVO_ISA
