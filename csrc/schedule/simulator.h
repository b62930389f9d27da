// Plays a schedule in the DAG model of DASH (arXiv 2601.21824): a tile's products take `product_time`, then the adding
// of its dQ partial takes `add_time`; the tiles of one KV tile are one sequential chain on one SM; a partial is added
// when the partial of the previous rank has been. Host only.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "assignment.h"
#include "order.h"
#include "policy.h"
#include "problem.h"

namespace dash_attn {

enum class Mapping {
  kClaims,       // clusters take claims from a counter, as the kernel does
  kIndependent,  // the KV tiles of the claims are taken one by one, by CTAs that need not be resident together
  kPublished,    // the paper's static mapping of one SM a KV tile, heads one after the other
};

struct SimulationOptions {
  int sms = 1;
  double product_time = 1;
  double add_time = 0;
  double signal_time = 0;  // from the end of an add until the next rank's CTA knows of it
  Mapping mapping = Mapping::kClaims;
  std::vector<double> launch_times;  // when each cluster (each SM, without clusters) becomes resident; empty: 0
  bool record_tasks = false;
};

struct SimulatedTask {
  int sm, batch, head, kv_tile, query_tile;
  double start, products_end, add_start, end;
};

struct Simulation {
  double makespan = 0;
  double busy = 0;  // SM time spent on products and adds
  int64_t num_tasks = 0;
  std::vector<SimulatedTask> tasks;  // in the order in which they end
};

// The static mapping of the paper: which KV tiles SM s owns, in order. Needs as many SMs as KV tiles.
inline std::vector<std::vector<Work>> published_mapping(Policy policy, Problem const& problem, int sms) {
  int const n = problem.kv_tiles;
  if (policy == Policy::kSpt) throw std::invalid_argument("the paper gives no static mapping for schedule='spt'");
  if (sms != n) {
    throw std::invalid_argument("sms must be the number of KV tiles, " + std::to_string(n) +
                                ", in the published mapping, got " + std::to_string(sms));
  }
  if (policy == Policy::kSymmetricShift && n % 2) {
    throw std::invalid_argument("the published symmetric shift needs an even number of KV tiles, got " +
                                std::to_string(n));
  }
  std::vector<std::vector<Work>> work(sms);
  for (int head = 0; head < problem.batch * problem.kv_heads; ++head) {
    auto const give = [&](int sm, int kv) {
      work[sm].push_back({head / problem.kv_heads, head % problem.kv_heads, kv, true});
    };
    for (int s = 0; s < n; ++s) {
      if (policy == Policy::kSymmetricShift) {
        if (s < n / 2) {
          int const sm = head % 2 * (n / 2) + s;  // two heads side by side, half of the SMs each
          give(sm, s);
          give(sm, n - 1 - s);
        }
      } else {
        bool const mirrored = problem.causal && head % 2;
        give(s, mirrored ? n - 1 - s : s);
      }
    }
  }
  return work;
}

template <Policy P>
class Simulator {
 public:
  Simulator(Problem const& problem, SimulationOptions options)
      : problem_(problem),
        options_(std::move(options)),
        claims_(num_claims<P>(problem)),
        cluster_size_(options_.mapping == Mapping::kClaims ? problem.cta_group : 1) {
    if (options_.sms < cluster_size_) {
      throw std::invalid_argument("sms must be at least cta_group=" + std::to_string(cluster_size_) + ", got " +
                                  std::to_string(options_.sms));
    }
    int const clusters = options_.sms / cluster_size_;
    if (options_.launch_times.empty()) options_.launch_times.assign(clusters, 0.0);
    if (static_cast<int>(options_.launch_times.size()) != clusters) {
      throw std::invalid_argument("launch_times must have one entry a cluster, " + std::to_string(clusters) +
                                  ", got " + std::to_string(options_.launch_times.size()));
    }
    if (options_.mapping == Mapping::kPublished) mapped_ = published_mapping(P, problem, options_.sms);
    ctas_.resize(clusters * cluster_size_);
    taken_.resize(clusters);
    sums_.resize(static_cast<size_t>(problem.batch) * heads() * problem.query_tiles);
  }

  Simulation run() {
    for (int i = 0; i < static_cast<int>(ctas_.size()); ++i) {
      events_.push({options_.launch_times[i / cluster_size_], i});
    }
    while (!events_.empty()) {
      auto const [time, i] = events_.top();
      events_.pop();
      if (ctas_[i].running) finish(i, time);
      if (next_tile(i, time)) begin(i, time);
    }
    check_finished();
    result_.busy = result_.num_tasks * (options_.product_time + options_.add_time);
    return std::move(result_);
  }

 private:
  struct Cta {
    bool running = false;
    bool parked = false;  // waits for its cluster's next claim
    Work work{};
    int taken = 0;       // claims (of its cluster) or entries (of its mapping) consumed
    int group_head = 0;  // query head within the KV head's group
    int step = 0;
    SimulatedTask task{};
  };

  struct Sum {
    int added = 0;
    double last_end = 0;
  };

  int heads() const { return problem_.kv_heads * problem_.queries_per_kv; }

  int64_t sum_index(SimulatedTask const& t) const {
    return (static_cast<int64_t>(t.batch) * heads() + t.head) * problem_.query_tiles + t.query_tile;
  }

  // Moves the CTA to its next (head, step), taking new work when the KV tile is done. False when there is none (yet).
  bool next_tile(int i, double time) {
    Cta& cta = ctas_[i];
    if (cta.running && ++cta.step == problem_.live_query_tiles(cta.work.kv_tile)) {
      cta.step = 0;
      cta.running = ++cta.group_head < problem_.queries_per_kv;
    }
    if (!cta.running) {
      if (!take_work(i, time)) return false;
      cta.group_head = cta.step = 0;
      cta.running = true;
    }
    return true;
  }

  bool take_work(int i, double time) {
    Cta& cta = ctas_[i];
    if (options_.mapping == Mapping::kPublished) {
      if (cta.taken == static_cast<int>(mapped_[i].size())) return false;
      cta.work = mapped_[i][cta.taken++];
      return true;
    }
    // The first CTA of a cluster takes its claims; one that is ahead of it waits for it.
    bool const together = options_.mapping == Mapping::kClaims;
    int const cta_rank = i % cluster_size_;
    std::vector<int64_t>& taken = taken_[i / cluster_size_];
    int64_t const tickets = together ? claims_ : claims_ * problem_.cta_group;
    do {
      if (cta.taken == static_cast<int>(taken.size())) {
        if (cta_rank > 0) cta.parked = true;
        if (cta_rank > 0 || next_ticket_ == tickets) return false;
        taken.push_back(next_ticket_++);
        for (int other = i + 1; other < i + cluster_size_; ++other) {
          if (std::exchange(ctas_[other].parked, false)) events_.push({time, other});
        }
      }
      int64_t const ticket = taken[cta.taken++];
      cta.work = together ? assign<P>(problem_, static_cast<int>(ticket), cta_rank)
                          : assign<P>(problem_, static_cast<int>(ticket / problem_.cta_group),
                                      static_cast<int>(ticket % problem_.cta_group));
    } while (!cta.work.valid);
    return true;
  }

  void begin(int i, double time) {
    Cta& cta = ctas_[i];
    int const kv = cta.work.kv_tile;
    cta.task = {i,
                cta.work.batch,
                cta.work.kv_head * problem_.queries_per_kv + cta.group_head,
                kv,
                Order<P>::visit(problem_, kv, cta.step),
                time,
                time + options_.product_time,
                0,
                0};
    int const rank = Order<P>::rank(problem_, kv, cta.task.query_tile);
    Sum const& sum = sums_[sum_index(cta.task)];
    if (accumulation(P) != Accumulation::kOrdered) {
      add(i, Sum{});
    } else if (sum.added == rank) {
      add(i, sum);
    } else {
      waiting_[sum_index(cta.task) * problem_.kv_tiles + rank] = i;
    }
  }

  void add(int i, Sum const& sum) {
    SimulatedTask& task = ctas_[i].task;
    double const told = sum.added ? sum.last_end + options_.signal_time : 0;
    task.add_start = told > task.products_end ? told : task.products_end;
    task.end = task.add_start + options_.add_time;
    events_.push({task.end, i});
  }

  void finish(int i, double time) {
    SimulatedTask const& task = ctas_[i].task;
    int64_t const index = sum_index(task);
    Sum& sum = sums_[index];
    ++sum.added;
    sum.last_end = time;
    ++result_.num_tasks;
    if (time > result_.makespan) result_.makespan = time;
    if (options_.record_tasks) result_.tasks.push_back(task);
    auto const next = waiting_.find(index * problem_.kv_tiles + sum.added);
    if (next != waiting_.end()) {
      int const waiter = next->second;
      waiting_.erase(next);
      add(waiter, sum);
    }
  }

  void check_finished() const {
    if (waiting_.empty()) return;
    SimulatedTask const& task = ctas_[waiting_.begin()->second].task;
    throw std::runtime_error("no progress: " + std::to_string(waiting_.size()) + " of " +
                             std::to_string(ctas_.size()) +
                             " CTAs wait for adds that no resident CTA will make; KV tile " +
                             std::to_string(task.kv_tile) + " waits at query tile " + std::to_string(task.query_tile) +
                             " of head " + std::to_string(task.head));
  }

  using Event = std::pair<double, int>;  // (time, CTA): its add ends, or it becomes resident

  Problem const problem_;
  SimulationOptions options_;
  int64_t const claims_;
  int const cluster_size_;
  int64_t next_ticket_ = 0;
  std::vector<Cta> ctas_;
  std::vector<std::vector<int64_t>> taken_;  // by each cluster, in order
  std::vector<std::vector<Work>> mapped_;
  std::vector<Sum> sums_;  // of each query tile of each head
  std::unordered_map<int64_t, int> waiting_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  Simulation result_;
};

template <Policy P>
Simulation simulate(Problem const& problem, SimulationOptions options) {
  return Simulator<P>(problem, std::move(options)).run();
}

// Longest path of the DAG: the time with an SM for every KV tile. No number of SMs does better. Heads are
// independent, so one of them tells.
template <Policy P>
double critical_path(Problem problem, double product_time, double add_time, double signal_time) {
  problem.batch = problem.kv_heads = 1;
  SimulationOptions options;
  options.sms = Order<P>::groups(problem) * problem.cta_group;
  options.product_time = product_time;
  options.add_time = add_time;
  options.signal_time = signal_time;
  return simulate<P>(problem, std::move(options)).makespan;
}

}  // namespace dash_attn
