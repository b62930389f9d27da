// The plan of a pack as packing/plan.h writes it, made on the host of lengths that are known: for tests. Sequences that
// are about equally long may come in another order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../placement/pack_needs.h"

namespace dash_attn {

struct PackPlan {
  std::vector<PackedSequence> sequences;
  std::vector<int> of_unit, of_query_tile;
  PackTotals totals{};

  PackView view() const { return {sequences.data(), of_unit.data(), of_query_tile.data(), &totals}; }
};

// `lengths` in the order of the pack, one after the other.
template <class Rule>
PackPlan plan_pack(Rule const& rule, std::vector<Sequence> const& lengths) {
  PackPlan plan;
  int end_q = 0, end_k = 0;
  for (Sequence const& sequence : lengths) {
    end_q += sequence.seqlen_q;
    end_k += sequence.seqlen_k;
    int const number = static_cast<int>(plan.sequences.size());
    plan.sequences.push_back(packed_sequence(number, sequence, end_q, end_k, rule.need(sequence)));
  }
  std::stable_sort(plan.sequences.begin(), plan.sequences.end(), [&](auto const& a, auto const& b) {
    return rule.need(a.lengths).longest > rule.need(b.lengths).longest;
  });
  for (std::size_t place = 0; place < plan.sequences.size(); ++place) {
    PackedSequence& sequence = plan.sequences[place];
    begin_after(sequence, plan.totals);
    plan.totals = plan.totals + rule.need(sequence.lengths).share;
    plan.of_unit.resize(plan.totals.units, static_cast<int>(place));
    plan.of_query_tile.resize(plan.totals.query_tiles, static_cast<int>(place));
  }
  return plan;
}

}  // namespace dash_attn
