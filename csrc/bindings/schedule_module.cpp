// dash_attn._schedule: the schedule headers, tile table and dropout masks, as the kernels see them, for Python. Host
// only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../contract/fixed_point.h"
#include "../contract/order.h"
#include "../contract/policy.h"
#include "../contract/splits.h"
#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../placement/head_swizzle.h"
#include "../placement/work_tile.h"
#include "dropout_bindings.h"
#include "pack_bindings.h"
#include "policy_bindings.h"
#include "problem.h"
#include "tile_bindings.h"

using namespace dash_attn;

namespace {

using Table = std::vector<std::vector<int>>;

Problem checked_problem(int64_t seqlen_q, int64_t seqlen_k, int64_t tile_q, int64_t tile_k, bool causal, int64_t batch,
                        int64_t kv_heads, int64_t group_size, int64_t cta_group, int64_t head_swizzle,
                        int64_t last_heads, int64_t splits, WindowSize window, int64_t attention_chunk,
                        std::optional<int64_t> first_own_key, int64_t keys_before) {
  // Lengths and tiles below 2^30 keep every sum of the headers below 2^31.
  constexpr int64_t kEnd = int64_t{1} << 30;
  for (auto const& [argument, value] :
       std::initializer_list<std::pair<char const*, int64_t>>{{"seqlen_q", seqlen_q},
                                                              {"seqlen_k", seqlen_k},
                                                              {"tile_q", tile_q},
                                                              {"tile_k", tile_k},
                                                              {"batch", batch},
                                                              {"kv_heads", kv_heads},
                                                              {"group_size", group_size},
                                                              {"cta_group", cta_group},
                                                              {"head_swizzle", head_swizzle},
                                                              {"splits", splits}}) {
    in_range(argument, value, 1, kEnd);
  }
  in_range("last_heads", last_heads, 0, kEnd);
  if (group_size % splits) {
    throw py::value_error("splits must divide group_size=" + std::to_string(group_size) + ", got " +
                          std::to_string(splits));
  }
  auto const as_int = [](int64_t value) { return static_cast<int>(value); };
  Sequence const sequence{as_int(seqlen_q), as_int(seqlen_k)};
  MaskRule rule = checked_rule(causal, window, attention_chunk);
  int64_t const usual = seqlen_k - seqlen_q;
  if (first_own_key) in_range("first_own_key", *first_own_key, -kMostRowsAway, kMostRowsAway + 1);
  rule.window.own_key_shift = as_int(first_own_key.value_or(usual) - usual);
  rule.window.keys_before = in_range("keys_before", keys_before, 0, kMostRowsAway + 1);
  TileGrid const grid{{as_int(tile_q), as_int(tile_k), as_int(cta_group)}, mask_of(rule, sequence)};
  constexpr Policy kGivenAtEachCall = Policy::kAscending;
  TileScheduler const scheduler{sequence,         kGivenAtEachCall,   as_int(splits),       as_int(batch),
                                as_int(kv_heads), as_int(group_size), as_int(head_swizzle), as_int(last_heads)};
  if (batch * kv_heads > (((int64_t{1} << 31) - 1) / (grid.kv_tiles() + 1)) / splits) {
    throw py::value_error("batch * kv_heads * splits * KV tiles must be below 2^31, got " + std::to_string(batch) +
                          " * " + std::to_string(kv_heads) + " * " + std::to_string(splits) + " * " +
                          std::to_string(grid.kv_tiles()));
  }
  return {grid, scheduler};
}

int checked_kv_tile(Problem const& problem, int64_t kv) { return in_range("kv_tile", kv, 0, problem.grid.kv_tiles()); }

int visit(std::string const& schedule, Problem const& problem, int64_t kv_tile, int64_t step) {
  return with_policy(schedule, problem, [&](auto policy) {
    int const kv = checked_kv_tile(problem, kv_tile);
    return Order<policy()>::visit(problem.grid, kv, in_range("step", step, 0, problem.grid.query_tiles_of(kv).count));
  });
}

int rank(std::string const& schedule, Problem const& problem, int64_t kv_tile, int64_t query_tile) {
  return with_policy(schedule, problem, [&](auto policy) {
    int const kv = checked_kv_tile(problem, kv_tile);
    Range const live = problem.grid.query_tiles_of(kv);
    return Order<policy()>::rank(problem.grid, kv, in_range("query_tile", query_tile, live.first, live.end()));
  });
}

int64_t num_groups(std::string const& schedule, Problem const& problem) {
  return with_policy(schedule, problem, [&](auto policy) { return problem.num_groups<policy()>(); });
}

std::optional<std::tuple<int, int, int, int>> work_tile(std::string const& schedule, Problem const& problem,
                                                        int64_t number, int64_t cta_rank) {
  return with_policy(schedule, problem, [&](auto policy) -> std::optional<std::tuple<int, int, int, int>> {
    WorkTile const work = problem.work_tile<policy()>(in_range("number", number, 0, problem.num_groups<policy()>()),
                                                      in_range("cta_rank", cta_rank, 0, problem.grid.tiling.cta_group));
    if (!work.valid()) return std::nullopt;
    return std::tuple(work.batch, work.kv_head, work.kv_tile, work.split);
  });
}

Table groups(std::string const& schedule, Problem const& problem) {
  return with_policy(schedule, problem, [&](auto policy) {
    using O = Order<policy()>;
    Table table(O::groups(problem.grid));
    for (int group = 0; group < static_cast<int>(table.size()); ++group) {
      for (int r = 0; r < min_int(problem.grid.tiling.cta_group, problem.grid.kv_tiles()); ++r) {
        int const kv = O::kv_tile(problem.grid, group, r);
        if (kv >= 0) table[group].push_back(kv);
      }
    }
    return table;
  });
}

Table visit_order(std::string const& schedule, Problem const& problem) {
  return with_policy(schedule, problem, [&](auto policy) {
    Table table(problem.grid.kv_tiles());
    for (int kv = 0; kv < static_cast<int>(table.size()); ++kv) {
      for (int step = 0; step < problem.grid.query_tiles_of(kv).count; ++step) {
        table[kv].push_back(Order<policy()>::visit(problem.grid, kv, step));
      }
    }
    return table;
  });
}

std::tuple<int, int> steps(std::string const& schedule, Problem const& problem, int64_t group, int64_t kv_tile) {
  return with_policy(schedule, problem, [&](auto policy) {
    using O = Order<policy()>;
    Visits const visits = O::visits(problem.grid, in_range("group", group, 0, O::groups(problem.grid)));
    return as_tuple(O::steps(problem.grid, checked_kv_tile(problem, kv_tile), visits));
  });
}

int first_number_of_head(std::string const& schedule, Problem const& problem, int64_t number) {
  return with_policy(schedule, problem, [&](auto policy) -> int {
    int const checked = in_range("number", number, 0, problem.num_groups<policy()>());
    if constexpr (Order<policy()>::kDivided) {
      return problem.scheduler.first_number_of_head<policy()>(problem.grid, problem.work_tile<policy()>(checked, 0));
    } else {
      throw py::value_error("schedule must divide KV tiles, got '" + schedule + "'");
    }
  });
}

using Walk = std::vector<std::pair<int, int>>;

Walk walk(std::string const& schedule, Problem const& problem, int64_t kv_tile) {
  return with_policy(schedule, problem, [&](auto policy) {
    int const kv = checked_kv_tile(problem, kv_tile), heads = problem.heads_per_split();
    int const steps = problem.grid.query_tiles_of(kv).count;
    Walk result;
    WorkStep at{0, 0};
    for (int left = steps * heads; left > 0; --left) {
      result.emplace_back(at.step, at.head);
      if constexpr (Order<policy()>::kDivided) {
        at = next_divided_step<policy()>(problem.grid, kv, Visits::kAll, at, heads);
      } else {
        at = next_step(heads_together<policy()>(problem.grid.mask.kind), at, heads, steps);
      }
    }
    return result;
  });
}

Table ranks(std::string const& schedule, Problem const& problem) {
  return with_policy(schedule, problem, [&](auto policy) {
    Table table(problem.grid.kv_tiles(), std::vector<int>(problem.grid.query_tiles(), -1));
    for (int kv = 0; kv < static_cast<int>(table.size()); ++kv) {
      Range const live = problem.grid.query_tiles_of(kv);
      for (int q = live.first; q < live.end(); ++q) table[kv][q] = Order<policy()>::rank(problem.grid, kv, q);
    }
    return table;
  });
}

Table add_order(std::string const& schedule, Problem const& problem) {
  return with_policy(schedule, problem, [&](auto policy) {
    Table table(problem.grid.query_tiles());
    for (int q = 0; q < static_cast<int>(table.size()); ++q) {
      Range const live = problem.grid.kv_tiles_of(q);
      table[q].assign(live.count, -1);
      for (int kv = live.first; kv < live.end(); ++kv) table[q].at(Order<policy()>::rank(problem.grid, kv, q)) = kv;
    }
    return table;
  });
}

int cta_group(std::string const& schedule) {
  return AllPolicies::with(parse_policy(schedule), [](auto policy) { return Order<policy()>::kCtaGroup; });
}

template <TileShape (*kTileShape)(HeadDims)>
std::tuple<int, int> tile_shape(int64_t head_dim, std::optional<int64_t> value_head_dim) {
  TileShape const shape = kTileShape(padded_row(head_dim, value_head_dim));
  return {shape.query, shape.key};
}

int launched_head_swizzle(std::string const& schedule, Problem const& problem, int64_t head_dim,
                          std::optional<int64_t> value_head_dim, int64_t ctas) {
  Policy const policy = parse_policy(schedule);
  HeadDims const padded = padded_row(head_dim, value_head_dim);
  int const launched = in_range("ctas", ctas, 0, INT32_MAX);
  if (!divides(policy)) return head_swizzle(policy, problem.grid, problem.heads_per_split(), padded);
  return divided_head_swizzle(problem.grid, int64_t{problem.scheduler.batch} * problem.scheduler.kv_heads, launched);
}

int launched_last_heads(std::string const& schedule, Problem const& problem, int64_t head_dim,
                        std::optional<int64_t> value_head_dim) {
  return last_heads(parse_policy(schedule), problem.grid, padded_row(head_dim, value_head_dim));
}

// (first, end) of the keys that each of the queries first_query ... end_query - 1 sees.
std::vector<std::pair<int, int>> visible_keys(bool causal, int64_t seqlen_q, int64_t seqlen_k, int64_t first_query,
                                              int64_t end_query, WindowSize window, int64_t attention_chunk) {
  Mask const mask = mask_of(checked_rule(causal, window, attention_chunk), checked_lengths(seqlen_q, seqlen_k));
  int const end = in_range("end_query", end_query, 0, seqlen_q + 1);
  std::vector<std::pair<int, int>> keys;
  for (int query = in_range("first_query", first_query, 0, seqlen_q + 1); query < end; ++query) {
    Range const seen = mask.keys_of(query);
    keys.emplace_back(seen.first, seen.end());
  }
  return keys;
}

// As Python has it; the mask of no window has (-1, -1) and chunk 0, the causal one too.
WindowSize window_of(Mask const& mask) {
  if (mask.kind != MaskKind::kWindow) return kAnyWindow;
  auto const side = [](int keys) { return int64_t{keys == kUnbounded ? -1 : keys}; };
  return {side(mask.window.left), side(mask.window.right)};
}

int chunk_of(Mask const& mask) { return mask.kind == MaskKind::kWindow ? mask.window.chunk : 0; }

std::string repr(Problem const& p) {
  Mask const& mask = p.grid.mask;
  auto const [left, right] = window_of(mask);
  std::string const window = mask.kind != MaskKind::kWindow
                                 ? ""
                                 : ", window=(" + std::to_string(left) + ", " + std::to_string(right) +
                                       "), attention_chunk=" + std::to_string(mask.window.chunk);
  return "Problem(seqlen_q=" + std::to_string(p.grid.mask.sequence.seqlen_q) +
         ", seqlen_k=" + std::to_string(p.grid.mask.sequence.seqlen_k) +
         ", tile_q=" + std::to_string(p.grid.tiling.query) + ", tile_k=" + std::to_string(p.grid.tiling.key) +
         ", causal=" + (mask.kind == MaskKind::kCausal ? "True" : "False") + window +
         ", batch=" + std::to_string(p.scheduler.batch) + ", kv_heads=" + std::to_string(p.scheduler.kv_heads) +
         ", group_size=" + std::to_string(p.scheduler.group_size) +
         ", cta_group=" + std::to_string(p.grid.tiling.cta_group) +
         ", head_swizzle=" + std::to_string(p.scheduler.head_swizzle) +
         ", last_heads=" + std::to_string(p.scheduler.last_heads) +
         ", splits=" + std::to_string(p.scheduler.splits) + ")";
}

}  // namespace

PYBIND11_MODULE(_schedule, m) {
  m.doc() =
      "The schedules of the kernels (csrc/contract, csrc/placement), their tile table and the masks of dropout "
      "(csrc/dropout), on the host.";

  py::class_<Problem>(m, "Problem", "Tile counts, mask ranges and work of one attention backward.")
      .def(py::init(&checked_problem), py::arg("seqlen_q"), py::arg("seqlen_k"), py::kw_only(), py::arg("tile_q"),
           py::arg("tile_k"), py::arg("causal"), py::arg("batch") = 1, py::arg("kv_heads") = 1,
           py::arg("group_size") = 1, py::arg("cta_group") = 1, py::arg("head_swizzle") = 1, py::arg("last_heads") = 0,
           py::arg("splits") = 1, py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
           py::arg("first_own_key") = py::none(), py::arg("keys_before") = 0)
      .def_property_readonly("seqlen_q", [](Problem const& p) { return p.grid.mask.sequence.seqlen_q; })
      .def_property_readonly("seqlen_k", [](Problem const& p) { return p.grid.mask.sequence.seqlen_k; })
      .def_property_readonly("tile_q", [](Problem const& p) { return p.grid.tiling.query; })
      .def_property_readonly("tile_k", [](Problem const& p) { return p.grid.tiling.key; })
      .def_property_readonly(
          "mask", [](Problem const& p) { return mask_name(p.grid.mask.kind); }, "full, causal or window.")
      .def_property_readonly("causal", [](Problem const& p) { return p.grid.mask.kind == MaskKind::kCausal; })
      .def_property_readonly("window", [](Problem const& p) { return window_of(p.grid.mask); })
      .def_property_readonly("attention_chunk", [](Problem const& p) { return chunk_of(p.grid.mask); })
      .def_property_readonly("batch", [](Problem const& p) { return p.scheduler.batch; })
      .def_property_readonly("kv_heads", [](Problem const& p) { return p.scheduler.kv_heads; })
      .def_property_readonly("group_size", [](Problem const& p) { return p.scheduler.group_size; })
      .def_property_readonly("cta_group", [](Problem const& p) { return p.grid.tiling.cta_group; })
      .def_property_readonly("head_swizzle", [](Problem const& p) { return p.scheduler.head_swizzle; })
      .def_property_readonly("last_heads", [](Problem const& p) { return p.scheduler.last_heads; })
      .def_property_readonly("splits", [](Problem const& p) { return p.scheduler.splits; })
      .def_property_readonly("heads_per_split", &Problem::heads_per_split)
      .def_property_readonly("num_query_tiles", [](Problem const& p) { return p.grid.query_tiles(); })
      .def_property_readonly("num_kv_tiles", [](Problem const& p) { return p.grid.kv_tiles(); })
      .def(
          "query_tiles_of",
          [](Problem const& p, int64_t kv) { return as_tuple(p.grid.query_tiles_of(checked_kv_tile(p, kv))); },
          py::arg("kv_tile"), "(first, count) of the query tiles that see a key of a KV tile.")
      .def(
          "kv_tiles_of",
          [](Problem const& p, int64_t q) {
            return as_tuple(p.grid.kv_tiles_of(in_range("query_tile", q, 0, p.grid.query_tiles())));
          },
          py::arg("query_tile"), "(first, count) of the KV tiles with a key that a query tile sees.")
      .def(
          "needs_masking",
          [](Problem const& p, int64_t q, int64_t kv) {
            return p.grid.needs_masking(in_range("query_tile", q, 0, p.grid.query_tiles()), checked_kv_tile(p, kv));
          },
          py::arg("query_tile"), py::arg("kv_tile"), "Whether a query of the tile does not see a key of it.")
      .def("__repr__", &repr);

  m.def("cta_group", &cta_group, py::arg("schedule"), "CTAs of the clusters that the kernel launches for the policy.");
  m.def("visible_keys", &visible_keys, py::kw_only(), py::arg("causal"), py::arg("seqlen_q"), py::arg("seqlen_k"),
        py::arg("first_query"), py::arg("end_query"), py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
        "(first, end) of the keys that each of some queries sees.");
  m.def("visit", &visit, py::arg("schedule"), py::arg("problem"), py::arg("kv_tile"), py::arg("step"),
        "Query tile that a KV tile visits at a step.");
  m.def("rank", &rank, py::arg("schedule"), py::arg("problem"), py::arg("kv_tile"), py::arg("query_tile"),
        "Place of a KV tile in the sum of dQ of a query tile that is live for it.");
  m.def("num_groups", &num_groups, py::arg("schedule"), py::arg("problem"),
        "Groups of KV tiles of the whole problem: the numbers that CTAs or clusters take.");
  m.def("work_tile", &work_tile, py::arg("schedule"), py::arg("problem"), py::arg("number"), py::arg("cta_rank") = 0,
        "(batch, KV head, KV tile, split) of one CTA of the cluster that took a number; None when it sits it out.");
  m.def("groups", &groups, py::arg("schedule"), py::arg("problem"),
        "KV tiles of each group of one (sequence, KV head, split), by CTA of the cluster; where they are divided, each "
        "tile is in two groups.");
  m.def(
      "divides", [](std::string const& schedule) { return divides(parse_policy(schedule)); }, py::arg("schedule"),
      "Whether a KV tile is in two groups, each with a part of its visits.");
  m.def("first_number_of_head", &first_number_of_head, py::arg("schedule"), py::arg("problem"), py::arg("number"),
        "Where KV tiles are divided: the smallest number of all splits of the KV head that a number is of.");
  m.def("steps", &steps, py::arg("schedule"), py::arg("problem"), py::arg("group"), py::arg("kv_tile"),
        "(first, count) of the visits, of each query head, that a KV tile of the group makes in it.");
  m.def("visit_order", &visit_order, py::arg("schedule"), py::arg("problem"),
        "Query tiles of each KV tile, in the order of its visits.");
  m.def(
      "heads_together",
      [](std::string const& schedule, Problem const& problem) {
        return with_policy(schedule, problem,
                           [&](auto policy) { return heads_together<policy()>(problem.grid.mask.kind); });
      },
      py::arg("schedule"), py::arg("problem"),
      "Whether the query heads of a work tile all take a step before any takes the next.");
  m.def("walk", &walk, py::arg("schedule"), py::arg("problem"), py::arg("kv_tile"),
        "(step, query head of the split) of each step of a KV tile, in order.");
  m.def("ranks", &ranks, py::arg("schedule"), py::arg("problem"), "[kv_tile][query_tile]: rank, -1 where masked out.");
  m.def("add_order", &add_order, py::arg("schedule"), py::arg("problem"),
        "KV tiles of each query tile, in the order in which their partials are added to dQ.");
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.def(
      "padded_head_dims",
      [](int64_t head_dim, std::optional<int64_t> value_head_dim) {
        HeadDims const row = padded_row(head_dim, value_head_dim);
        return std::tuple(row.qk, row.v);
      },
      py::arg("head_dim"), py::arg("value_head_dim") = py::none(), "Head dims of the kernels that take these.");
  m.def("backward_tile_shape", &tile_shape<backward_tile_shape>, py::arg("head_dim"),
        py::arg("value_head_dim") = py::none(), "(queries, keys) of one tile of the backward.");
  m.def("forward_tile_shape", &tile_shape<forward_tile_shape>, py::arg("head_dim"),
        py::arg("value_head_dim") = py::none(), "(queries, keys) of one tile of the forward.");
  m.def("row_bound", &fixed_point::row_bound, py::kw_only(), py::arg("dout_norm"), py::arg("delta"),
        py::arg("max_product"), py::arg("max_element"), py::arg("seqlen_k"), py::arg("half_precision"),
        "Of the sum of the magnitudes of a row's partials in order-free accumulation.");
  m.def("row_exponent", &fixed_point::row_exponent, py::arg("bound"),
        "The fixed-point scale e of a row in order-free accumulation: units of 2^-e. One below the smallest e: none.");
  m.def(
      "rounded_to_units",
      [](float x, int exponent) {
        float const scale = float(fixed_point::power_of_two(exponent - fixed_point::kFractionBits));
        return int32_t(fixed_point::in_units(x, scale) - fixed_point::kOffsetBits);
      },
      py::arg("x"), py::arg("exponent"),
      "x in units of 2^-exponent, as order-free accumulation rounds a partial: of at most 2^31 units, less 2^9.");
  m.def(
      "row_needs_order",
      [](int exponent, double dout_norm, double min_step_product, int64_t head_dim,
         std::optional<int64_t> value_head_dim, int keys, int tiles) {
        return fixed_point::row_needs_order(exponent, dout_norm, min_step_product,
                                            checked_head_dims(head_dim, value_head_dim), keys, tiles);
      },
      py::kw_only(), py::arg("exponent"), py::arg("dout_norm"), py::arg("min_step_product"), py::arg("head_dim"),
      py::arg("value_head_dim") = py::none(), py::arg("keys"), py::arg("tiles"),
      "Whether a row leaves its head to the ordered sum in order-free accumulation.");
  m.def(
      "keys_need_order",
      [](float max_product, float min_step_product, int seqlen_k) {
        return fixed_point::keys_need_order({0.f, max_product, min_step_product}, seqlen_k);
      },
      py::kw_only(), py::arg("max_product"), py::arg("min_step_product"), py::arg("seqlen_k"),
      "Whether a head, whatever its rows are, is left to the ordered sum in order-free accumulation.");
  m.def("lse_needs_order", &fixed_point::lse_needs_order, py::arg("lse"),
        "Whether a row's log-sum-exp leaves its head to the ordered sum in order-free accumulation.");

  m.def("head_swizzle", &launched_head_swizzle, py::arg("schedule"), py::arg("problem"), py::arg("head_dim"),
        py::arg("value_head_dim") = py::none(), py::arg("ctas") = 0,
        "The (sequence, KV head, split)s whose work tiles a launch interleaves; where KV tiles are divided, that of a "
        "dense batch on so many CTAs (0: one head after the other, as in a pack).");
  m.def("last_heads", &launched_last_heads, py::arg("schedule"), py::arg("problem"), py::arg("head_dim"),
        py::arg("value_head_dim") = py::none(),
        "The last (sequence, KV head, split)s, whose work tiles a launch interleaves all together.");
  m.def(
      "num_splits", [](Problem const& p) { return num_splits(p.scheduler.group_size, p.grid); }, py::arg("problem"),
      "Into how many parts a launch cuts the query heads of a KV head.");
  bind_policies(m);
  bind_masks_and_forward_tiles(m);
  bind_packs(m);
  dropout::bind_dropout(m);
}
