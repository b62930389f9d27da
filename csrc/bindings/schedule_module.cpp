// dash_attn._schedule: the schedule headers and the tile table, as the kernels see them, for Python. Host only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../config/fixed_point.h"
#include "../config/tile_shapes.h"
#include "../schedule/assignment.h"
#include "../schedule/head_splits.h"
#include "../schedule/order.h"
#include "../schedule/policy.h"
#include "../schedule/problem.h"
#include "../schedule/sections.h"
#include "../schedule/simulator.h"

namespace py = pybind11;
using namespace dash_attn;

namespace {

using Table = std::vector<std::vector<int>>;

Policy parse_policy(std::string const& name) {
  std::string allowed;
  for (int i = 0; i < kNumPolicies; ++i) {
    if (name == kPolicyNames[i]) return static_cast<Policy>(i);
    allowed += std::string(i ? ", '" : "'") + kPolicyNames[i] + "'";
  }
  throw py::value_error("schedule must be one of " + allowed + ", got '" + name + "'");
}

// Calls f with the policy as a type, once its mask is known to fit.
template <class F>
decltype(auto) with_fitting_policy(std::string const& name, Problem const& problem, F&& f) {
  Policy const policy = parse_policy(name);
  if (!fits(policy, problem.causal)) {
    throw py::value_error("schedule='" + name + "' is defined for causal=" + (problem.causal ? "False" : "True") +
                          " only, got causal=" + (problem.causal ? "True" : "False"));
  }
  return with_policy(policy, std::forward<F>(f));
}

// The same for what the order of a head decides.
template <class F>
decltype(auto) with_order(std::string const& name, Problem const& problem, F&& f) {
  return with_fitting_policy(name, problem, [&](auto policy) {
    if constexpr (policy() == Policy::kSptDescending) {
      throw py::value_error("schedule='" + name + "' has another order in some heads: order_of_head names a head's");
      return f(PolicyConstant<Policy::kSpt>{});
    } else {
      return f(policy);
    }
  });
}

int in_range(char const* argument, int64_t value, int64_t first, int64_t end) {
  if (value < first || value >= end) {
    throw py::value_error(std::string(argument) + " must be in [" + std::to_string(first) + ", " + std::to_string(end) +
                          "), got " + std::to_string(value));
  }
  return static_cast<int>(value);
}

Problem checked_problem(int64_t seqlen_q, int64_t seqlen_k, int64_t tile_q, int64_t tile_k, bool causal, int64_t batch,
                        int64_t kv_heads, int64_t queries_per_kv, int64_t cta_group, int64_t head_section,
                        int64_t head_splits) {
  // Lengths and tiles below 2^30 keep every sum of the headers below 2^31.
  constexpr int64_t kEnd = int64_t{1} << 30;
  for (auto const& [argument, value] :
       std::initializer_list<std::pair<char const*, int64_t>>{{"seqlen_q", seqlen_q},
                                                              {"seqlen_k", seqlen_k},
                                                              {"tile_q", tile_q},
                                                              {"tile_k", tile_k},
                                                              {"batch", batch},
                                                              {"kv_heads", kv_heads},
                                                              {"queries_per_kv", queries_per_kv},
                                                              {"cta_group", cta_group},
                                                              {"head_section", head_section},
                                                              {"head_splits", head_splits}}) {
    in_range(argument, value, 1, kEnd);
  }
  if (queries_per_kv % head_splits) {
    throw py::value_error("head_splits must divide queries_per_kv=" + std::to_string(queries_per_kv) + ", got " +
                          std::to_string(head_splits));
  }
  Problem const problem = make_problem(
      static_cast<int>(batch), static_cast<int>(kv_heads), static_cast<int>(queries_per_kv), static_cast<int>(seqlen_q),
      static_cast<int>(seqlen_k), static_cast<int>(tile_q), static_cast<int>(tile_k), static_cast<int>(cta_group),
      causal, static_cast<int>(head_section), static_cast<int>(head_splits));
  if (batch * kv_heads > (((int64_t{1} << 31) - 1) / (problem.kv_tiles + 1)) / head_splits) {
    throw py::value_error("batch * kv_heads * head_splits * KV tiles must be below 2^31, got " + std::to_string(batch) +
                          " * " + std::to_string(kv_heads) + " * " + std::to_string(head_splits) + " * " +
                          std::to_string(problem.kv_tiles));
  }
  return problem;
}

int checked_live_query_tile(Problem const& problem, int kv, int64_t q) {
  return in_range("query_tile", q, problem.first_query_tile(kv), problem.query_tiles);
}

int visit(std::string const& schedule, Problem const& problem, int64_t kv_tile, int64_t step) {
  return with_order(schedule, problem, [&](auto policy) {
    int const kv = in_range("kv_tile", kv_tile, 0, problem.kv_tiles);
    return Order<policy()>::visit(problem, kv, in_range("step", step, 0, problem.live_query_tiles(kv)));
  });
}

int rank(std::string const& schedule, Problem const& problem, int64_t kv_tile, int64_t query_tile) {
  return with_order(schedule, problem, [&](auto policy) {
    int const kv = in_range("kv_tile", kv_tile, 0, problem.kv_tiles);
    return Order<policy()>::rank(problem, kv, checked_live_query_tile(problem, kv, query_tile));
  });
}

int64_t claims(std::string const& schedule, Problem const& problem) {
  return with_fitting_policy(schedule, problem, [&](auto policy) { return num_claims<policy()>(problem); });
}

std::optional<std::tuple<int, int, int, int>> assigned(std::string const& schedule, Problem const& problem,
                                                       int64_t claim, int64_t cta_rank) {
  return with_fitting_policy(schedule, problem, [&](auto policy) -> std::optional<std::tuple<int, int, int, int>> {
    Work const work = assign<policy()>(problem, in_range("claim", claim, 0, num_claims<policy()>(problem)),
                                       in_range("cta_rank", cta_rank, 0, problem.cta_group));
    if (!work.valid()) return std::nullopt;
    return std::tuple(work.batch, work.kv_head, work.kv_tile, work.split);
  });
}

Table groups(std::string const& schedule, Problem const& problem) {
  return with_order(schedule, problem, [&](auto policy) {
    using O = Order<policy()>;
    Table table(O::groups(problem));
    for (int group = 0; group < static_cast<int>(table.size()); ++group) {
      for (int r = 0; r < min_int(problem.cta_group, problem.kv_tiles); ++r) {
        int const kv = O::kv_tile(problem, group, r);
        if (kv >= 0) table[group].push_back(kv);
      }
    }
    return table;
  });
}

Table visit_order(std::string const& schedule, Problem const& problem) {
  return with_order(schedule, problem, [&](auto policy) {
    Table table(problem.kv_tiles);
    for (int kv = 0; kv < problem.kv_tiles; ++kv) {
      for (int step = 0; step < problem.live_query_tiles(kv); ++step) {
        table[kv].push_back(Order<policy()>::visit(problem, kv, step));
      }
    }
    return table;
  });
}

using Walk = std::vector<std::pair<int, int>>;

Walk walk(std::string const& schedule, Problem const& problem, int64_t kv_tile) {
  return with_order(schedule, problem, [&](auto policy) {
    int const kv = in_range("kv_tile", kv_tile, 0, problem.kv_tiles);
    Walk steps;
    ClaimStep at{0, 0};
    for (int left = problem.live_query_tiles(kv) * problem.queries_per_claim; left > 0; --left) {
      steps.emplace_back(at.step, at.head);
      at = next_step<policy()>(problem, kv, at);
    }
    return steps;
  });
}

Table ranks(std::string const& schedule, Problem const& problem) {
  return with_order(schedule, problem, [&](auto policy) {
    Table table(problem.kv_tiles, std::vector<int>(problem.query_tiles, -1));
    for (int kv = 0; kv < problem.kv_tiles; ++kv) {
      for (int q = problem.first_query_tile(kv); q < problem.query_tiles; ++q) {
        table[kv][q] = Order<policy()>::rank(problem, kv, q);
      }
    }
    return table;
  });
}

Table add_order(std::string const& schedule, Problem const& problem) {
  return with_order(schedule, problem, [&](auto policy) {
    Table table(problem.query_tiles);
    for (int q = 0; q < problem.query_tiles; ++q) {
      table[q].assign(problem.live_kv_tiles(q), -1);
      for (int kv = 0; kv < problem.live_kv_tiles(q); ++kv) { table[q].at(Order<policy()>::rank(problem, kv, q)) = kv; }
    }
    return table;
  });
}

std::string order_of_head(std::string const& schedule, Problem const& problem, int64_t kv_head) {
  return with_fitting_policy(schedule, problem, [&](auto policy) {
    int const head = in_range("kv_head", kv_head, 0, problem.kv_heads);
    return with_order_of_head<policy()>(
        problem, head, [](auto order) { return std::string(kPolicyNames[static_cast<int>(order())]); });
  });
}

int cta_group(std::string const& schedule) {
  return with_policy(parse_policy(schedule), [](auto policy) { return Order<policy()>::kCtaGroup; });
}

std::tuple<int, int, int> tile_shape(int head_dim, bool causal) {
  int const padded = padded_head_dim(head_dim);
  if (padded == 0) { throw py::value_error("head_dim must be in [1, 128], got " + std::to_string(head_dim)); }
  TileShape const shape = backward_tile_shape(padded, causal);
  return {shape.query, shape.key, shape.head_dim};
}

int section(std::string const& schedule, Problem const& problem, int head_dim) {
  return head_section(parse_policy(schedule), problem, std::get<2>(tile_shape(head_dim, problem.causal)));
}

Mapping parse_mapping(std::string const& name) {
  if (name == "claims") return Mapping::kClaims;
  if (name == "independent") return Mapping::kIndependent;
  if (name == "published") return Mapping::kPublished;
  throw py::value_error("mapping must be one of 'claims', 'independent', 'published', got '" + name + "'");
}

double duration(char const* argument, double value) {
  if (!(value >= 0) || value > 1e12) {
    throw py::value_error(std::string(argument) + " must be in [0, 1e12], got " + std::to_string(value));
  }
  return value;
}

void check(SimulationOptions const& options) {
  in_range("sms", options.sms, 1, 1 << 20);
  duration("product_time", options.product_time);
  if (!(options.spread >= 0 && options.spread < 1)) {
    throw py::value_error("spread must be in [0, 1), got " + std::to_string(options.spread));
  }
  duration("mask_time", options.mask_time);
  duration("add_time", options.add_time);
  duration("signal_time", options.signal_time);
  duration("poll_time", options.poll_time);
  duration("claim_time", options.claim_time);
  duration("carry_time", options.carry_time);
  duration("load_time", options.load_time);
  duration("memory_claim_time", options.memory_claim_time);
  duration("memory_tile_time", options.memory_tile_time);
  duration("cache_time", options.cache_time);
  in_range("staging", options.staging, 0, 1 << 10);
  in_range("adders", options.adders, 1, std::max(1, options.staging) + 1);
  in_range("loads_ahead", options.loads_ahead, 0, 1 << 10);
  for (double time : options.launch_times) duration("launch_times", time);
}

Simulation simulated(std::string const& schedule, Problem const& problem, SimulationOptions const& options) {
  check(options);
  return with_fitting_policy(schedule, problem, [&](auto policy) { return simulate<policy()>(problem, options); });
}

double longest_path(std::string const& schedule, Problem const& problem, SimulationOptions const& options) {
  check(options);
  return with_fitting_policy(schedule, problem, [&](auto policy) { return critical_path<policy()>(problem, options); });
}

std::string repr(Problem const& p) {
  return "Problem(seqlen_q=" + std::to_string(p.seqlen_q) + ", seqlen_k=" + std::to_string(p.seqlen_k) +
         ", tile_q=" + std::to_string(p.tile_q) + ", tile_k=" + std::to_string(p.tile_k) +
         ", causal=" + (p.causal ? "True" : "False") + ", batch=" + std::to_string(p.batch) +
         ", kv_heads=" + std::to_string(p.kv_heads) + ", queries_per_kv=" + std::to_string(p.queries_per_kv) +
         ", cta_group=" + std::to_string(p.cta_group) + ", head_section=" + std::to_string(p.head_section) +
         ", head_splits=" + std::to_string(p.head_splits) + ")";
}

}  // namespace

PYBIND11_MODULE(_schedule, m) {
  m.doc() = "The schedules of the kernels (csrc/schedule) and their tile table, on the host.";

  py::tuple names(kNumDeterministicPolicies), yardsticks(kNumPolicies - kNumDeterministicPolicies);
  for (int i = 0; i < kNumPolicies; ++i) {
    if (i < kNumDeterministicPolicies) {
      names[i] = py::str(kPolicyNames[i]);
    } else {
      yardsticks[i - kNumDeterministicPolicies] = py::str(kPolicyNames[i]);
    }
  }
  m.attr("POLICIES") = names;
  m.attr("YARDSTICKS") = yardsticks;

  py::class_<Problem>(m, "Problem", "Tile counts and mask ranges of one attention problem.")
      .def(py::init(&checked_problem), py::arg("seqlen_q"), py::arg("seqlen_k"), py::kw_only(), py::arg("tile_q"),
           py::arg("tile_k"), py::arg("causal"), py::arg("batch") = 1, py::arg("kv_heads") = 1,
           py::arg("queries_per_kv") = 1, py::arg("cta_group") = 1, py::arg("head_section") = 1,
           py::arg("head_splits") = 1)
      .def_readonly("seqlen_q", &Problem::seqlen_q)
      .def_readonly("seqlen_k", &Problem::seqlen_k)
      .def_readonly("tile_q", &Problem::tile_q)
      .def_readonly("tile_k", &Problem::tile_k)
      .def_readonly("causal", &Problem::causal)
      .def_readonly("batch", &Problem::batch)
      .def_readonly("kv_heads", &Problem::kv_heads)
      .def_readonly("queries_per_kv", &Problem::queries_per_kv)
      .def_readonly("cta_group", &Problem::cta_group)
      .def_readonly("head_section", &Problem::head_section)
      .def_readonly("head_splits", &Problem::head_splits)
      .def_readonly("queries_per_claim", &Problem::queries_per_claim)
      .def_readonly("num_query_tiles", &Problem::query_tiles)
      .def_readonly("num_kv_tiles", &Problem::kv_tiles)
      .def(
          "first_query_tile",
          [](Problem const& p, int64_t kv) { return p.first_query_tile(in_range("kv_tile", kv, 0, p.kv_tiles)); },
          py::arg("kv_tile"))
      .def(
          "live_query_tiles",
          [](Problem const& p, int64_t kv) { return p.live_query_tiles(in_range("kv_tile", kv, 0, p.kv_tiles)); },
          py::arg("kv_tile"))
      .def(
          "live_kv_tiles",
          [](Problem const& p, int64_t q) { return p.live_kv_tiles(in_range("query_tile", q, 0, p.query_tiles)); },
          py::arg("query_tile"))
      .def("__repr__", &repr);

  m.def(
      "fits", [](std::string const& schedule, bool causal) { return fits(parse_policy(schedule), causal); },
      py::arg("schedule"), py::arg("causal"), "Whether the policy is defined for this mask.");
  m.def(
      "is_ordered",
      [](std::string const& schedule) { return accumulation(parse_policy(schedule)) == Accumulation::kOrdered; },
      py::arg("schedule"), "Whether partials of dQ wait for those of lower rank.");
  m.def("cta_group", &cta_group, py::arg("schedule"), "CTAs of the clusters that the kernel launches for the policy.");
  m.def("visit", &visit, py::arg("schedule"), py::arg("problem"), py::arg("kv_tile"), py::arg("step"),
        "Query tile that a KV tile visits at a step.");
  m.def("rank", &rank, py::arg("schedule"), py::arg("problem"), py::arg("kv_tile"), py::arg("query_tile"),
        "Place of a KV tile in the sum of dQ of a query tile that is live for it.");
  m.def("order_of_head", &order_of_head, py::arg("schedule"), py::arg("problem"), py::arg("kv_head"),
        "The policy whose order a KV head has: the policy itself, but for spt_descending.");
  m.def("num_claims", &claims, py::arg("schedule"), py::arg("problem"), "Claims of the whole problem.");
  m.def(
      "assign", &assigned, py::arg("schedule"), py::arg("problem"), py::arg("claim"), py::arg("cta_rank") = 0,
      "(batch, KV head, KV tile, split) of one CTA of the cluster that took a claim; None when it sits the claim out.");
  m.def("groups", &groups, py::arg("schedule"), py::arg("problem"),
        "KV tiles of each claim of one (batch, KV head, split), by CTA of the cluster.");
  m.def("visit_order", &visit_order, py::arg("schedule"), py::arg("problem"),
        "Query tiles of each KV tile, in the order of its visits.");
  m.def(
      "heads_together",
      [](std::string const& schedule, Problem const& problem) {
        return with_order(schedule, problem, [](auto policy) { return Order<policy()>::kHeadsTogether; });
      },
      py::arg("schedule"), py::arg("problem"),
      "Whether the query heads of a claim all take a step before any takes the next.");
  m.def("walk", &walk, py::arg("schedule"), py::arg("problem"), py::arg("kv_tile"),
        "(step, query head of the split) of each product of a KV tile's claim, in order.");
  m.def("ranks", &ranks, py::arg("schedule"), py::arg("problem"), "[kv_tile][query_tile]: rank, -1 where masked out.");
  m.def("add_order", &add_order, py::arg("schedule"), py::arg("problem"),
        "KV tiles of each query tile, in the order in which their partials are added to dQ.");
  m.def("padded_head_dim", &padded_head_dim, py::arg("head_dim"),
        "Head dim of the kernel that takes this one; 0 when none does.");
  m.def("backward_tile_shape", &tile_shape, py::arg("head_dim"), py::arg("causal"),
        "(queries, keys, padded head dim) of one tile of the backward.");
  m.def("row_bound", &fixed_point::row_bound, py::kw_only(), py::arg("dout_norm"), py::arg("delta"),
        py::arg("max_product"), py::arg("max_element"), py::arg("seqlen_k"), py::arg("half_precision"),
        "Of the sum of the magnitudes of a row's partials in order-free accumulation.");
  m.def("row_exponent", &fixed_point::row_exponent, py::arg("bound"),
        "The grid of a row in order-free accumulation: units of 2^-e. One below the smallest e where it has none.");
  m.def("row_needs_order", &fixed_point::row_needs_order, py::kw_only(), py::arg("exponent"), py::arg("dout_norm"),
        py::arg("min_step_product"), py::arg("head_dim"), py::arg("keys"), py::arg("tiles"),
        "Whether a row leaves its head to the ordered sum in order-free accumulation.");
  m.def(
      "needs_order",
      [](float max_query_norm, float max_key_norm, float max_product, float min_step_product, double softmax_scale,
         int seqlen_k) {
        fixed_point::HeadStatistics const head{max_query_norm, max_key_norm, max_product, min_step_product};
        return fixed_point::needs_order(head, softmax_scale, seqlen_k);
      },
      py::kw_only(), py::arg("max_query_norm"), py::arg("max_key_norm"), py::arg("max_product"),
      py::arg("min_step_product"), py::arg("softmax_scale"), py::arg("seqlen_k"),
      "Whether a head, whatever its rows are, is left to the ordered sum in order-free accumulation.");

  m.def("head_section", &section, py::arg("schedule"), py::arg("problem"), py::arg("head_dim"),
        "The (batch, KV head, split)s whose claims a launch interleaves.");
  m.def("head_splits", &head_splits, py::kw_only(), py::arg("kv_heads"), py::arg("queries_per_kv"),
        py::arg("query_tiles"), py::arg("kv_tiles"), py::arg("causal"),
        "Into how many parts a launch cuts the query heads of a KV head.");

  py::class_<SimulatedTask>(m, "Task",
                            "One tile: its products from start to products_end, its add from add_start to end.")
      .def_readonly("sm", &SimulatedTask::sm)
      .def_readonly("batch", &SimulatedTask::batch)
      .def_readonly("head", &SimulatedTask::head)
      .def_readonly("kv_tile", &SimulatedTask::kv_tile)
      .def_readonly("query_tile", &SimulatedTask::query_tile)
      .def_readonly("start", &SimulatedTask::start)
      .def_readonly("products_end", &SimulatedTask::products_end)
      .def_readonly("add_start", &SimulatedTask::add_start)
      .def_readonly("end", &SimulatedTask::end);

  py::class_<Simulation>(m, "Simulation")
      .def_readonly("makespan", &Simulation::makespan)
      .def_readonly("busy", &Simulation::busy)
      .def_readonly("memory_time", &Simulation::memory_time)
      .def_readonly("num_tasks", &Simulation::num_tasks)
      .def_readonly("tasks", &Simulation::tasks);

  py::class_<SimulationOptions>(m, "SimulationOptions", "A machine and its costs; see csrc/schedule/simulator.h.")
      .def(py::init())
      .def_readwrite("sms", &SimulationOptions::sms)
      .def_readwrite("product_time", &SimulationOptions::product_time)
      .def_readwrite("spread", &SimulationOptions::spread)
      .def_readwrite("mask_time", &SimulationOptions::mask_time)
      .def_readwrite("add_time", &SimulationOptions::add_time)
      .def_readwrite("signal_time", &SimulationOptions::signal_time)
      .def_readwrite("poll_time", &SimulationOptions::poll_time)
      .def_readwrite("claim_time", &SimulationOptions::claim_time)
      .def_readwrite("carry_time", &SimulationOptions::carry_time)
      .def_readwrite("load_time", &SimulationOptions::load_time)
      .def_readwrite("memory_claim_time", &SimulationOptions::memory_claim_time)
      .def_readwrite("memory_tile_time", &SimulationOptions::memory_tile_time)
      .def_readwrite("miss_time", &SimulationOptions::miss_time)
      .def_readwrite("cache_time", &SimulationOptions::cache_time)
      .def_readwrite("staging", &SimulationOptions::staging)
      .def_readwrite("adders", &SimulationOptions::adders)
      .def_readwrite("loads_ahead", &SimulationOptions::loads_ahead)
      .def_readwrite("ordered", &SimulationOptions::ordered)
      .def_readwrite("launch_times", &SimulationOptions::launch_times)
      .def_readwrite("record_tasks", &SimulationOptions::record_tasks)
      .def_property(
          "mapping", [](SimulationOptions const& o) { return static_cast<int>(o.mapping); },
          [](SimulationOptions& o, std::string const& name) { o.mapping = parse_mapping(name); });

  m.def("simulate", &simulated, py::arg("schedule"), py::arg("problem"), py::arg("options"),
        py::call_guard<py::gil_scoped_release>(), "Plays a problem under a policy.");
  m.def("critical_path", &longest_path, py::arg("schedule"), py::arg("problem"), py::arg("options"),
        "Time of one head with an SM for every KV tile.");
}
