// Python's view of the plan of a pack: what the kernels make of the numbers that they take, and how much room there is.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host_pack_plan.h"
#include "policy_bindings.h"
#include "tile_bindings.h"

namespace dash_attn {

using PackedLengths = std::vector<std::pair<int64_t, int64_t>>;  // (seqlen_q, seqlen_k) of each sequence

struct HostPack {
  PackRows rows;
  PackPlan plan;
  PackCapacity most;
};

struct BackwardPack : HostPack {
  BackwardPackRule rule;
  int kv_heads;

  int num_numbers() const { return plan.totals.units * kv_heads; }

  // Of each CTA of the cluster that takes the number and has one. As backward/work_ring.h does it.
  std::vector<WorkTile> work_tiles(int64_t taken, bool with_turns) const {
    int const number = in_range("number", taken, 0, num_numbers());
    PackView const pack = plan.view();
    TileScheduler common{};
    common.policy = rule.policy;
    common.kv_heads = kv_heads;
    common.group_size = rule.group_size;
    int const place = pack.place_of(number, kv_heads);
    PackedSequence const& sequence = pack.sequences[place];
    TileScheduler const alone = with_turns ? common.of(sequence).with_turns() : common.of(sequence);
    TileGrid const grid{rule.tiling, mask_of(rule.mask, alone.sequence)};
    int const within = sequence.number_within(number, kv_heads);
    std::vector<WorkTile> tiles;
    for (int cta = 0; cta < rule.tiling.cta_group; ++cta) {
      WorkTile work = AllPolicies::with(rule.policy,
                                        [&](auto p) { return alone.work_tile<decltype(p)::value>(grid, within, cta); });
      if (!work.valid()) continue;
      work.packed = place;
      common.move_into_pack(work, sequence);
      tiles.push_back(work);
    }
    return tiles;
  }
};

struct ForwardPack : HostPack {
  ForwardPackRule rule;

  Divisor const& groups() const { return rule.scheduler.head_groups; }
  int num_tiles() const { return plan.totals.units * groups(); }

  // As forward/load.h does it.
  std::tuple<int, int, int, int> tile(int64_t taken) const {
    int const number = in_range("place", taken, 0, num_tiles());
    PackView const pack = plan.view();
    PackedSequence const& sequence = pack.sequences[pack.place_of(number, groups())];
    forward::QueryTileScheduler const alone = rule.scheduler.of(sequence);
    forward::QueryTile const tile = alone.tile(sequence.number_within(number, groups()));
    int const end = alone.end_position(tile.index);
    return {sequence.number, tile.head_group, alone.first_position(end), min_int(end, sequence.lengths.seqlen_q)};
  }
};

// Rows outside the sequences make totals larger and change no length.
inline PackRows rows_of(PackedLengths const& lengths, std::pair<int64_t, int64_t> rows_outside) {
  constexpr int64_t kEnd = int64_t{1} << 30;
  int64_t total_q = in_range("rows_outside[0]", rows_outside.first, 0, kEnd);
  int64_t total_k = in_range("rows_outside[1]", rows_outside.second, 0, kEnd);
  for (auto const& [seqlen_q, seqlen_k] : lengths) {
    total_q += in_range("seqlen_q", seqlen_q, 0, kEnd);
    total_k += in_range("seqlen_k", seqlen_k, 0, kEnd);
  }
  return {positive("the number of lengths", static_cast<int64_t>(lengths.size())),
          in_range("the queries in all", total_q, 1, kEnd), in_range("the keys in all", total_k, 1, kEnd)};
}

inline std::vector<Sequence> sequences_of(PackedLengths const& lengths) {
  std::vector<Sequence> sequences;
  for (auto const& [q, k] : lengths) sequences.push_back({static_cast<int>(q), static_cast<int>(k)});
  return sequences;
}

template <class Pack>
void plan_on_host(Pack& pack, PackRows const& rows, PackedLengths const& lengths, int64_t numbers_of_unit) {
  pack.rows = rows;
  pack.most = pack.rule.most(rows);
  positive("numbers of work", std::max<int64_t>(1, pack.most.units * numbers_of_unit));
  pack.plan = plan_pack(pack.rule, sequences_of(lengths));
}

inline BackwardPack backward_pack(std::string const& schedule, PackedLengths const& lengths, int64_t heads,
                                  int64_t kv_heads, int64_t head_dim, std::optional<int64_t> value_head_dim,
                                  bool causal, WindowSize window, int64_t attention_chunk,
                                  std::pair<int64_t, int64_t> rows_outside) {
  PackRows const rows = rows_of(lengths, rows_outside);
  MaskRule const mask = checked_rule(causal, window, attention_chunk);
  BackwardPack pack{};
  pack.kv_heads = positive("kv_heads", kv_heads);
  pack.rule = backward_pack_rule(mask, checked_policy(schedule, mask.kind), checked_group_size(heads, kv_heads),
                                 checked_head_dims(head_dim, value_head_dim));
  plan_on_host(pack, rows, lengths, kv_heads);
  return pack;
}

inline ForwardPack forward_pack(PackedLengths const& lengths, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                std::optional<int64_t> value_head_dim, bool causal, int64_t sms, WindowSize window,
                                int64_t attention_chunk, std::pair<int64_t, int64_t> rows_outside, bool drops) {
  PackRows const rows = rows_of(lengths, rows_outside);
  checked_group_size(heads, kv_heads);
  ForwardPack pack{};
  pack.rule = forward_pack_rule(checked_rule(causal, window, attention_chunk), rows, static_cast<int>(heads),
                                static_cast<int>(kv_heads), checked_head_dims(head_dim, value_head_dim),
                                positive("sms", sms), drops);
  plan_on_host(pack, rows, lengths, pack.rule.scheduler.head_groups);
  return pack;
}

template <class Counts>
py::dict counts(Counts const& of) {
  py::dict dict;
  dict["units"] = of.units;
  dict["query_tiles"] = of.query_tiles;
  dict["split_tiles"] = of.split_tiles;
  dict["key_chunks"] = of.key_chunks;
  return dict;
}

// (sequence number, longest) in the order in which sequences are worked on.
template <class Pack>
std::vector<std::pair<int, int>> sequences_in_order(Pack const& pack) {
  std::vector<std::pair<int, int>> order;
  for (PackedSequence const& s : pack.plan.sequences) {
    order.emplace_back(s.number, pack.rule.need(s.lengths).longest);
  }
  return order;
}

template <class Pack>
py::class_<Pack> bind_pack(py::module_& m, char const* name, char const* doc) {
  return py::class_<Pack>(m, name, doc)
      .def_property_readonly(
          "sequences", &sequences_in_order<Pack>,
          "(sequence, about the steps of its longest work tile), in the order in which sequences are worked on.")
      .def_property_readonly(
          "totals", [](Pack const& pack) { return counts(pack.plan.totals); },
          "What the sequences take: units of work, and for each head places in the workspace.")
      .def_property_readonly(
          "most", [](Pack const& pack) { return counts(pack.most); },
          "What there is room for, by the number of sequences and of rows alone.");
}

inline void bind_packs(py::module_& m) {
  py::class_<WorkTile>(m, "WorkTile", "What a CTA of the backward does between two looks at the counter.")
      .def_readonly("sequence", &WorkTile::batch)
      .def_readonly("kv_head", &WorkTile::kv_head)
      .def_property_readonly("split", [](WorkTile const& work) { return int{work.split}; })
      .def_property_readonly("visits", [](WorkTile const& work) { return kVisitsNames[static_cast<int>(work.visits)]; })
      .def_readonly("kv_tile", &WorkTile::kv_tile)
      .def_readonly("splits", &WorkTile::splits)
      .def_readonly("first_query_head", &WorkTile::first_query_head)
      .def_readonly("query_heads", &WorkTile::query_heads)
      .def_readonly("first_dq_tile", &WorkTile::first_dq_tile)
      .def_readonly("split_tile", &WorkTile::split_tile)
      .def_property_readonly("steps", &WorkTile::steps)
      .def_readonly("end_q", &WorkTile::q_outer)
      .def_readonly("end_k", &WorkTile::k_outer)
      .def_property_readonly(
          "lengths", [](WorkTile const& work) { return std::pair(work.sequence.seqlen_q, work.sequence.seqlen_k); });

  using Outside = std::pair<int64_t, int64_t>;
  bind_pack<BackwardPack>(m, "BackwardPack", "The work of a backward of a pack, from (seqlen_q, seqlen_k) of each.")
      .def(py::init(&backward_pack), py::arg("schedule"), py::arg("lengths"), py::kw_only(), py::arg("heads"),
           py::arg("kv_heads"), py::arg("head_dim"), py::arg("value_head_dim") = py::none(), py::arg("causal"),
           py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0, py::arg("rows_outside") = Outside{0, 0})
      .def_property_readonly("num_numbers", &BackwardPack::num_numbers, "The numbers that CTAs or clusters take.")
      .def("work_tiles", &BackwardPack::work_tiles, py::arg("number"), py::arg("with_turns") = false,
           "Of each CTA that has one, of the cluster that took a number. With turns: of order-free sums, where some "
           "head needs the order after all.");

  bind_pack<ForwardPack>(m, "ForwardPack", "The query tiles of a forward of a pack, in the order of their numbers.")
      .def(py::init(&forward_pack), py::arg("lengths"), py::kw_only(), py::arg("heads"), py::arg("kv_heads"),
           py::arg("head_dim"), py::arg("value_head_dim") = py::none(), py::arg("causal"), py::arg("sms"),
           py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0, py::arg("rows_outside") = Outside{0, 0},
           py::arg("drops") = false)
      .def_property_readonly("num_tiles", &ForwardPack::num_tiles)
      .def_property_readonly("head_groups", [](ForwardPack const& pack) { return int{pack.groups()}; })
      .def_property_readonly("tile_positions",
                             [](ForwardPack const& pack) { return pack.rule.scheduler.tile_positions; })
      .def("tile", &ForwardPack::tile, py::arg("place"),
           "(sequence, head group, first position, where the next tile begins).");
}

}  // namespace dash_attn
