// The calls that one forward pass makes, to be made again: addresses and sizes stay as they were, what lies there changes, and so
// do the attention plans.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "attention_plan.hpp"

namespace octavo {

class Recording {
public:
    using Plans = std::vector<const AttentionPlan*>;
    using Call = std::function<void(const Plans&)>;

    void add(Call call) { calls.push_back(std::move(call)); }

    // A plan's place among those that `run` is given: in the order in which they came here.
    size_t place_of(const AttentionPlan& plan) {
        auto found = std::find(seen.begin(), seen.end(), &plan);
        if (found == seen.end()) found = seen.insert(found, &plan);
        return found - seen.begin();
    }

    void run(const Plans& plans) const {
        if (plans.size() != seen.size()) throw std::invalid_argument("other plans than were recorded");
        for (const Call& call : calls) call(plans);
    }

private:
    std::vector<Call> calls;
    Plans seen;
};

}  // namespace octavo
