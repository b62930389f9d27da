// Plays a schedule: every tile of a KV tile takes its products, then its partial of dQ is added when the partial of the
// previous rank has been. Host only.
//
// With the options' defaults this is the DAG model of DASH (arXiv 2601.21824): a KV tile's products and adds are one
// chain. The other options say what the kernel does differently: partials are staged, so that products go on while
// adders wait for the semaphore of a query tile, which counts the partials in its sum; a work tile is taken while the
// last steps of the one before still run; going from one work tile to the next has a price.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../contract/order.h"
#include "../contract/policy.h"
#include "problem.h"
#include "published_mapping.h"
#include "simulation.h"

namespace dash_attn {

template <Policy P>
class Simulator {
 public:
  Simulator(Problem const& problem, SimulationOptions options)
      : problem_(problem),
        options_(std::move(options)),
        groups_(problem.num_groups<P>()),
        cluster_size_(options_.mapping == Mapping::kCounter ? problem.grid.tiling.cta_group : 1) {
    if (options_.sms < cluster_size_) {
      throw std::invalid_argument("sms must be at least cta_group=" + std::to_string(cluster_size_) + ", got " +
                                  std::to_string(options_.sms));
    }
    int const clusters = options_.sms / cluster_size_;
    if (options_.launch_times.empty()) options_.launch_times.assign(clusters, 0.0);
    if (static_cast<int>(options_.launch_times.size()) != clusters) {
      throw std::invalid_argument("launch_times must have one entry a cluster, " + std::to_string(clusters) + ", got " +
                                  std::to_string(options_.launch_times.size()));
    }
    if (options_.mapping == Mapping::kPublished) mapped_ = published_mapping<P>(problem, options_.sms);
    options_.ordered = options_.ordered && accumulation(P) == Accumulation::kOrdered;
    slots_ = std::max(1, options_.staging);
    Cta cta;
    cta.slots.resize(slots_);
    cta.adder_busy.resize(options_.adders);
    ctas_.assign(clusters * cluster_size_, cta);
    taken_.resize(clusters);
    sums_.resize(static_cast<size_t>(problem.scheduler.batch) * problem.heads() * problem.grid.query_tiles());
    size_t const kv_heads = static_cast<size_t>(problem.scheduler.batch) * problem.scheduler.kv_heads;
    if (problem.scheduler.splits > 1) split_sums_.resize(kv_heads * problem.grid.kv_tiles());
    if (Order<P>::kDivided) first_parts_.resize(kv_heads * problem.scheduler.splits * problem.grid.kv_tiles());
  }

  Simulation run() {
    for (int i = 0; i < static_cast<int>(ctas_.size()); ++i) {
      events_.push({options_.launch_times[i / cluster_size_], i, Kind::kTakeWork, 0});
    }
    while (!events_.empty()) {
      auto const [time, i, kind, adder] = events_.top();
      events_.pop();
      switch (kind) {
        case Kind::kTakeWork:
          take_work(i, time);
          break;
        case Kind::kProductsEnd:
          end_products(i, time);
          break;
        case Kind::kAddEnd:
          end_add(i, adder, time);
          break;
        case Kind::kStepsEnd:
          end_steps(i, time);
          break;
        case Kind::kSplitEnd:
          end_split(i, time);
          break;
      }
    }
    check_finished();
    result_.memory_time = memory_used_;
    result_.busy = result_.num_tasks * (options_.product_time + (options_.staging ? 0 : options_.add_time));
    return std::move(result_);
  }

 private:
  // What happens at one time to one CTA, in this order.
  enum class Kind : int { kAddEnd, kSplitEnd, kProductsEnd, kStepsEnd, kTakeWork };
  using Event = std::tuple<double, int, Kind, int>;  // time, CTA, what, adder

  // A partial of dQ on its way: a staging buffer.
  struct Slot {
    bool used = false;
    double ready = 0;  // when its adder took it up
    SimulatedTask task{};
  };

  struct Cta {
    bool parked = false;  // waits for its cluster's next group
    bool idle = true;     // between work tiles
    bool held = false;    // its partial waits for a staging buffer
    bool has_next = false;
    WorkTile work{}, next{};
    int taken = 0;  // groups (of its cluster) or entries (of its mapping) consumed
    int64_t others_until = 0;  // numbers below it are others' to take first: backward/whole_tiles.h
    WorkStep at{0, 0};
    int steps_left = 0;  // of the work tile, over all its query heads
    int64_t handed = 0;  // partials given to the adders
    SimulatedTask task{};
    std::vector<Slot> slots;
    std::vector<char> adder_busy;
  };

  struct Sum {
    bool visited = false;
    double last_visit = 0;  // in use of memory until then
    int added = 0;
    double last_end = 0;
  };

  // The sum of dK and dV of a KV tile over the splits of its query heads.
  struct SplitSum {
    int splits = 0;              // that are in it
    std::map<int, int> waiting;  // split: CTA
  };

  // The first part of a divided KV tile, as one of a head that is worked on whole, or not.
  struct FirstPart {
    bool is_whole = false;  // of a KV head's first number: of all its KV tiles and splits
    bool ended = false;
    int waiting = -1;  // the CTA that has the second part
  };

  // When memory has served a request made now. Half of it writes, which the cache takes until it is full.
  double use_memory(double time, double taken) {
    double const waited_for = memory_used_ < options_.cache_time ? taken / 2 : taken;
    memory_used_ += taken;
    return memory_free_ = std::max(memory_free_, time) + waited_for;
  }

  bool is_evicted(Sum const& sum) {
    double const age = (memory_used_ - sum.last_visit) / options_.cache_time;
    return age > 0.5 && noise() < 2 * age - 2;
  }

  // A fixed sequence of numbers in [-1, 1).
  double noise() {
    noise_ = noise_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(noise_ >> 33) / (1u << 30) - 1;
  }

  int64_t sum_index(SimulatedTask const& t) const {
    return (static_cast<int64_t>(t.batch) * problem_.heads() + t.head) * problem_.grid.query_tiles() + t.query_tile;
  }

  int rank(SimulatedTask const& t) const { return Order<P>::rank(problem_.grid, t.kv_tile, t.query_tile); }

  void take_work(int i, double time) {
    Cta& cta = ctas_[i];
    if (!find_work(i, time)) return;
    cta.has_next = true;
    if (cta.idle) begin_work_tile(i, time);
  }

  // Finds the CTA's next piece of work. False when there is none (yet).
  bool find_work(int i, double time) {
    Cta& cta = ctas_[i];
    if (options_.mapping == Mapping::kPublished) {
      if (cta.taken == static_cast<int>(mapped_[i].size())) return false;
      cta.next = mapped_[i][cta.taken++];
      return true;
    }
    // The first CTA of a cluster takes its groups; one that is ahead of it waits for it.
    bool const together = options_.mapping == Mapping::kCounter;
    int const cta_rank = i % cluster_size_;
    std::vector<int64_t>& taken = taken_[i / cluster_size_];
    int64_t const numbers = together ? groups_ : groups_ * problem_.grid.tiling.cta_group;
    int64_t number_of_group = 0;
    do {
      if (next_number_ < cta.others_until) {
        parked_.push_back(i);
        return false;
      }
      if (cta.taken == static_cast<int>(taken.size())) {
        if (cta_rank > 0) cta.parked = true;
        if (cta_rank > 0 || next_number_ == numbers) return false;
        taken.push_back(next_number_++);
        for (int other : std::exchange(parked_, {})) events_.push({time, other, Kind::kTakeWork, 0});
        for (int other = i + 1; other < i + cluster_size_; ++other) {
          if (std::exchange(ctas_[other].parked, false)) events_.push({time, other, Kind::kTakeWork, 0});
        }
      }
      int64_t const number = taken[cta.taken++];
      int const group = problem_.grid.tiling.cta_group;
      number_of_group = together ? number : number / group;
      cta.next = problem_.work_tile<P>(static_cast<int>(number_of_group),
                                       together ? cta_rank : static_cast<int>(number % group));
    } while (!cta.next.valid() || !is_worked_on(cta, number_of_group, time));
    return true;
  }

  // Whether the CTA's next work tile is one at all, and if so, whether it is the whole KV tile: backward/whole_tiles.h.
  bool is_worked_on(Cta& cta, int64_t number, double time) {
    if constexpr (Order<P>::kDivided) {
      int const tiles = problem_.grid.kv_tiles();
      int const first = problem_.scheduler.first_number_of_head<P>(problem_.grid, cta.next);
      FirstPart& head = first_parts_[(cta.next.batch * problem_.scheduler.kv_heads + cta.next.kv_head) * tiles];
      if (number == first) {
        auto const runs = [&](double launched) { return launched <= time + options_.patience; };
        head.is_whole = std::count_if(options_.launch_times.begin(), options_.launch_times.end(), runs) >= tiles;
      }
      if (head.is_whole && cta.next.visits == Visits::kSecond) return false;
      if (head.is_whole) {
        cta.next.visits = Visits::kAll;
        cta.next.steps = problem_.scheduler.steps_of<P>(cta.next, problem_.grid);
        bool const together = options_.mapping == Mapping::kCounter;
        cta.others_until = (number + cta.next.kv_tile + 1) * (together ? 1 : problem_.grid.tiling.cta_group);
      }
    }
    return true;
  }

  FirstPart& first_part_of(WorkTile const& work) {
    TileScheduler const& s = problem_.scheduler;
    size_t const head = (static_cast<size_t>(work.split) * s.batch + work.batch) * s.kv_heads + work.kv_head;
    return first_parts_[head * problem_.grid.kv_tiles() + work.kv_tile];
  }

  void begin_work_tile(int i, double time) {
    Cta& cta = ctas_[i];
    cta.idle = cta.has_next = false;
    cta.work = cta.next;
    cta.at = {0, 0};
    if constexpr (Order<P>::kDivided) {
      if (cta.work.visits == Visits::kSecond) {
        FirstPart& first = first_part_of(cta.work);
        if (!first.ended) {
          first.waiting = i;
          return;
        }
        cta.at.step = Order<P>::steps(problem_.grid, cta.work.kv_tile, Visits::kSecond).first;
      }
    }
    cta.steps_left = cta.work.steps;
    double const start = std::max(time + options_.work_time, use_memory(time, options_.memory_work_time));
    if (cta.steps_left) {
      begin_products(i, start);
    } else {  // of keys that no query sees
      events_.push({start, i, Kind::kStepsEnd, 0});
    }
    // The loads of a short work tile go out one behind the other, and the next one is taken behind them.
    if (options_.loads_ahead && cta.steps_left <= options_.loads_ahead) {
      events_.push({time + options_.load_time, i, Kind::kTakeWork, 0});
    }
  }

  void begin_products(int i, double time) {
    Cta& cta = ctas_[i];
    int const head = cta.work.first_query_head + cta.at.head;
    int const q = Order<P>::visit(problem_.grid, cta.work.kv_tile, cta.at.step);
    bool const masked = problem_.grid.needs_masking(q, cta.work.kv_tile);
    double end = time + options_.product_time * (1 + options_.spread * noise()) + (masked ? options_.mask_time : 0);
    cta.task = {i, cta.work.batch, head, cta.work.kv_tile, q, time, 0, 0, 0};
    Sum& sum = sums_[sum_index(cta.task)];
    if (!sum.visited || is_evicted(sum)) {
      end = std::max(end + options_.miss_time, use_memory(time, options_.memory_tile_time));
    }
    sum.visited = true;
    sum.last_visit = memory_used_;
    cta.task.products_end = end;
    events_.push({end, i, Kind::kProductsEnd, 0});
  }

  void end_products(int i, double time) {
    Cta& cta = ctas_[i];
    // The last step's loads go out as soon as this step's buffers are free.
    if (options_.loads_ahead && cta.steps_left == options_.loads_ahead + 1) take_work(i, time);
    if (cta.slots[cta.handed % slots_].used) {
      cta.held = true;
    } else {
      hand_over(i, time);
    }
  }

  void hand_over(int i, double time) {
    Cta& cta = ctas_[i];
    int64_t const number = cta.handed++;
    cta.held = false;
    cta.slots[number % slots_] = {true, 0, cta.task};
    if (!cta.adder_busy[number % options_.adders]) take_up(i, number, time);
    if (options_.staging) next_step(i, time);
  }

  void next_step(int i, double time) {
    Cta& cta = ctas_[i];
    if constexpr (Order<P>::kDivided) {
      cta.at = next_divided_step<P>(problem_.grid, cta.work.kv_tile, cta.work.visits, cta.at, cta.work.query_heads);
    } else {
      int const visits = problem_.grid.query_tiles_of(cta.work.kv_tile).count;
      cta.at = dash_attn::next_step(heads_together<P>(problem_.grid.mask.kind), cta.at, cta.work.query_heads, visits);
    }
    if (--cta.steps_left) {
      begin_products(i, time);
    } else {
      end_steps(i, time);
    }
  }

  void end_steps(int i, double time) {
    Cta& cta = ctas_[i];
    result_.makespan = std::max(result_.makespan, time);
    if (cta.work.visits == Visits::kFirst) {
      FirstPart& first = first_part_of(cta.work);
      first.ended = true;
      end_work_tile(i, time);
      if (first.waiting >= 0) begin_work_tile(first.waiting, time);
      return;
    }
    if (problem_.scheduler.splits == 1) {
      end_work_tile(i, time);
      return;
    }
    SplitSum& sum = split_sum_of(cta.work);
    if (sum.splits == cta.work.split) {
      add_split(i, time);
    } else {
      sum.waiting[cta.work.split] = i;
    }
  }

  SplitSum& split_sum_of(WorkTile const& work) {
    size_t const kv_head = static_cast<size_t>(work.batch) * problem_.scheduler.kv_heads + work.kv_head;
    return split_sums_[kv_head * problem_.grid.kv_tiles() + work.kv_tile];
  }

  void add_split(int i, double time) { events_.push({time + options_.split_time, i, Kind::kSplitEnd, 0}); }

  void end_split(int i, double time) {
    SplitSum& sum = split_sum_of(ctas_[i].work);
    auto const next = sum.waiting.find(++sum.splits);
    if (next != sum.waiting.end()) {
      add_split(next->second, time);
      sum.waiting.erase(next);
    }
    result_.makespan = std::max(result_.makespan, time);
    end_work_tile(i, time);
  }

  void end_work_tile(int i, double time) {
    Cta& cta = ctas_[i];
    cta.idle = true;
    if (cta.has_next) {
      begin_work_tile(i, time);
    } else if (!options_.loads_ahead) {
      take_work(i, time);
    }
  }

  // An adder takes up partial `number` of its CTA, and adds it or waits.
  void take_up(int i, int64_t number, double time) {
    Slot& slot = ctas_[i].slots[number % slots_];
    ctas_[i].adder_busy[number % options_.adders] = 1;
    slot.ready = time;
    Sum const& sum = sums_[sum_index(slot.task)];
    if (!options_.ordered || sum.added == rank(slot.task)) {
      add(i, number, sum);
    } else {
      waiting_[sum_index(slot.task) * problem_.grid.kv_tiles() + rank(slot.task)] = {i, number};
    }
  }

  void add(int i, int64_t number, Sum const& sum) {
    Slot& slot = ctas_[i].slots[number % slots_];
    bool const told = options_.ordered && sum.added;
    slot.task.add_start =
        told ? std::max(slot.ready + options_.poll_time, sum.last_end + options_.signal_time) : slot.ready;
    slot.task.end = slot.task.add_start + options_.add_time;
    events_.push({slot.task.end, i, Kind::kAddEnd, static_cast<int>(number % slots_)});
  }

  void end_add(int i, int slot_index, double time) {
    Cta& cta = ctas_[i];
    Slot& slot = cta.slots[slot_index];
    SimulatedTask const task = slot.task;
    slot.used = false;
    finish(task, time);

    // The slot's number is the last one handed over that maps to it.
    int64_t const number = cta.handed - 1 - (cta.handed - 1 - slot_index) % slots_;
    cta.adder_busy[number % options_.adders] = 0;
    if (number + options_.adders < cta.handed) take_up(i, number + options_.adders, time);
    if (!options_.staging) {
      next_step(i, time);
    } else if (cta.held && cta.handed % slots_ == slot_index) {
      hand_over(i, time);
    }
  }

  void finish(SimulatedTask const& task, double time) {
    int64_t const index = sum_index(task);
    Sum& sum = sums_[index];
    ++sum.added;
    sum.last_end = time;
    ++result_.num_tasks;
    if (time > result_.makespan) result_.makespan = time;
    if (options_.record_tasks) result_.tasks.push_back(task);
    auto const next = waiting_.find(index * problem_.grid.kv_tiles() + sum.added);
    if (next != waiting_.end()) {
      auto const [waiter, number] = next->second;
      waiting_.erase(next);
      add(waiter, number, sum);
    }
  }

  int64_t tasks_of_all() const {
    int64_t of_head = 0;
    for (int kv = 0; kv < problem_.grid.kv_tiles(); ++kv) of_head += problem_.grid.query_tiles_of(kv).count;
    return of_head * problem_.scheduler.batch * problem_.heads();
  }

  void check_finished() const {
    for (SplitSum const& sum : split_sums_) {
      if (sum.splits < problem_.scheduler.splits && waiting_.empty()) {
        throw std::runtime_error("no progress: a split waits for dK and dV of one that no resident CTA will work on");
      }
    }
    if (waiting_.empty() && result_.num_tasks < tasks_of_all()) {
      throw std::runtime_error("no progress: CTAs wait for others to take work, or for first parts of KV tiles");
    }
    if (waiting_.empty()) return;
    auto const [i, number] = waiting_.begin()->second;
    SimulatedTask const& task = ctas_[i].slots[number % slots_].task;
    throw std::runtime_error("no progress: " + std::to_string(waiting_.size()) + " of " + std::to_string(ctas_.size()) +
                             " CTAs wait for adds that no resident CTA will make; KV tile " +
                             std::to_string(task.kv_tile) + " waits at query tile " + std::to_string(task.query_tile) +
                             " of head " + std::to_string(task.head));
  }

  Problem const problem_;
  SimulationOptions options_;
  int64_t const groups_;
  int const cluster_size_;
  int slots_ = 1;
  uint64_t noise_ = 1;
  double memory_free_ = 0, memory_used_ = 0;
  int64_t next_number_ = 0;
  std::vector<Cta> ctas_;
  std::vector<std::vector<int64_t>> taken_;  // by each cluster, in order
  std::vector<std::vector<WorkTile>> mapped_;
  std::vector<Sum> sums_;             // of each query tile of each head
  std::vector<SplitSum> split_sums_;    // of each KV tile of each KV head, where heads are split
  std::vector<FirstPart> first_parts_;  // of each split of each KV head, of each KV tile, where these are divided
  std::vector<int> parked_;             // CTAs that wait for others to take numbers
  std::unordered_map<int64_t, std::pair<int, int64_t>> waiting_;  // (sum, rank): CTA and number of its partial
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  Simulation result_;
};

template <Policy P>
Simulation simulate(Problem const& problem, SimulationOptions options) {
  return Simulator<P>(problem, std::move(options)).run();
}

// The time of one head with an SM for every KV tile: in the DAG model its longest path. Heads are independent, so no
// number of SMs does better.
template <Policy P>
double critical_path(Problem problem, SimulationOptions options) {
  problem.scheduler.batch = problem.scheduler.kv_heads = 1;
  int const groups = Order<P>::kDivided ? problem.grid.kv_tiles() : Order<P>::groups(problem.grid);
  options.sms = groups * problem.grid.tiling.cta_group * problem.scheduler.splits;
  options.mapping = Mapping::kCounter;
  options.launch_times.clear();
  options.record_tasks = false;
  return simulate<P>(problem, std::move(options)).makespan;
}

}  // namespace dash_attn
