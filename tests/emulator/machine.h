// One CTA of a Hopper GPU on the host: its threads are fibers that take turns in a random order, TMA copies when it
// likes, and whoever waits for what never comes is reported. Everything that CUDA's names stand for in the kernels'
// sources (include/, overlay/) is made of this.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

constexpr int kWarpLanes = 32;
constexpr int kSharedBytes = 232448;
constexpr int kSharedAlignment = 1024;
constexpr int kNamedBarriers = 16;
constexpr int kStackBytes = 96 << 10;
constexpr int kLongestTime = 4;  // in turns, that something takes

}  // namespace emulator

namespace dash_attn {
alignas(emulator::kSharedAlignment) inline char shared_memory[emulator::kSharedBytes];  // the kernels' name for it
}

namespace emulator {

using dash_attn::shared_memory;

[[noreturn]] inline void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);  // other fibers have stacks of their own
}

// An mbarrier (PTX ISA 9.7.13.15). State is kept beside shared memory, by address.
struct Barrier {
  int count = 0, pending = 0, bytes = 0, phase = 0;

  void settle() {
    if (pending < 0) { fail("a barrier has more arrivals than it counts"); }
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = count;
    }
  }
};

// Where threads meet who all come: a warp's, or those of a named barrier.
struct Meeting {
  int here = 0;
  uint64_t round = 0;
};

struct Warp {
  Meeting meeting;
  const char* operation = nullptr;
  uint64_t given[2][kWarpLanes][8];  // by the lanes, of this round and of the last
};

class Machine {
 public:
  struct Product {
    std::function<void()> run;     // adds to the sums
    std::function<void()> finish;  // hands them over, if none before it has
  };

  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::function<bool()> ready;  // what it waits for
    const char* waits_for = "";
    bool ended = false;
    std::vector<std::vector<Product>> groups;  // of products that were committed
    std::vector<Product> open;                 // and not yet
    std::unordered_map<const float*, std::shared_ptr<std::vector<float>>> sums;  // of those, by accumulator
    std::vector<std::function<void()>> stores;                                   // bulk operations
    std::vector<std::function<void()>> writes;  // to shared memory, which TMA does not see before a fence
  };

  explicit Machine(unsigned seed) : random_(seed), is_lazy_(seed % 2) {}

  // Every CTA of a grid, one after the other.
  template <typename Kernel, typename Params>
  void launch(Kernel kernel, const Params& params, unsigned blocks, int threads) {
    for (block = 0; block < blocks; ++block) {
      blocks_of_grid = blocks;
      run_block([&] { kernel(params); }, threads);
    }
  }

  // Returns when it is the calling thread's turn and `ready` says so.
  template <typename Ready>
  void wait(const char* what, Ready&& ready) {
    Thread& self = *threads_[current];
    self.waits_for = what;
    self.ready = ready;
    swapcontext(&self.context, &scheduler_);
  }

  void meet(Meeting& meeting, int threads, const char* what) {
    if (++meeting.here < threads) {
      wait(what, [&meeting, round = meeting.round] { return meeting.round != round; });
    } else {
      meeting.here = 0;
      ++meeting.round;
    }
  }

  // What each lane of the warp gives, to all of them. Lanes that do not do the same are reported.
  template <typename T>
  const uint64_t (*exchange(const char* operation, const T& own))[8] {
    static_assert(sizeof(T) <= 64);
    Warp& warp = warps_[current / kWarpLanes];
    const uint64_t round = warp.meeting.round;
    if (warp.meeting.here == 0) {
      warp.operation = operation;
    } else if (std::strcmp(warp.operation, operation) != 0) {
      fail(std::string("lanes of a warp are at ") + warp.operation + " and at " + operation);
    }
    std::memcpy(warp.given[round % 2][current % kWarpLanes], &own, sizeof(T));
    meet(warp.meeting, kWarpLanes, operation);
    return warp.given[round % 2];
  }

  Barrier& barrier(const void* address) { return barriers_[address]; }
  void wait_parity(const void* address, int parity) {
    Barrier& b = barrier(address);
    if (b.count == 0) { fail("a wait for a barrier that is not initialised"); }
    wait("an mbarrier", [&b, parity] { return b.phase != parity; });
  }

  // Done at any time from now on.
  void later(std::function<void()> copy) { copies_.push_back(std::move(copy)); }

  // What a warp makes of shared memory in one turn, kept for its other lanes. Whoever writes there says so.
  template <typename Make>
  const std::vector<float>& read_once(uint64_t key, Make&& make) {
    std::vector<float>& found = read_[key];
    if (found.empty()) { found = make(); }
    return found;
  }
  void wrote_shared() { read_.clear(); }

  Thread& self() { return *threads_[current]; }
  Meeting& named(int id) { return named_.at(id); }
  Meeting& all() { return all_; }
  bool is_lazy() const { return is_lazy_; }
  int threads() const { return int(threads_.size()); }
  unsigned random() { return unsigned(random_()); }

  unsigned current = 0, block = 0, blocks_of_grid = 0;

 private:
  void run_block(std::function<void()> body, int threads) {
    body_ = std::move(body);
    threads_.clear();
    warps_ = std::vector<Warp>(threads / kWarpLanes);
    barriers_.clear();
    named_ = std::vector<Meeting>(kNamedBarriers);
    all_ = {};
    for (int i = 0; i < threads; ++i) {
      auto thread = std::make_unique<Thread>();
      thread->stack = std::make_unique<char[]>(kStackBytes);
      getcontext(&thread->context);
      thread->context.uc_stack = {thread->stack.get(), 0, kStackBytes};
      thread->context.uc_link = &scheduler_;
      makecontext(&thread->context, &Machine::begin, 0);
      threads_.push_back(std::move(thread));
    }
    std::memset(shared_memory, 0xff, kSharedBytes);  // NaN
    running_ = this;
    schedule();
    if (!copies_.empty()) { fail("a CTA ended before its copies"); }
  }

  static void begin() {
    running_->body_();
    running_->self().ended = true;
  }

  // Warps in a random order, each as far as it comes, and copies between them.
  void schedule() {
    for (;;) {
      bool moved = false, all_ended = true;
      const int first = int(random_() % warps_.size());
      for (unsigned i = 0; i < warps_.size(); ++i) {
        const unsigned warp = (first + i * (1 + 2 * (random_() % 2))) % unsigned(warps_.size());
        moved |= run_warp(warp);
        while (!copies_.empty() && random_() % 4 == 0) { moved |= copy_one(); }
      }
      for (const auto& thread : threads_) { all_ended &= thread->ended; }
      if (all_ended && copies_.empty()) { return; }
      // Some may wait for a time.
      for (int i = 0; i < kLongestTime && !moved; ++i) {
        for (unsigned warp = 0; warp < warps_.size(); ++warp) { moved |= run_warp(warp); }
        if (!copies_.empty()) { moved |= copy_one(); }
      }
      if (!moved) { report(); }
    }
  }

  bool run_warp(unsigned warp) {
    bool moved = false;
    read_.clear();
    for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
      current = warp * kWarpLanes + lane;
      Thread& thread = *threads_[current];
      if (thread.ended || (thread.ready && !thread.ready())) { continue; }
      thread.ready = nullptr;
      swapcontext(&scheduler_, &thread.context);
      moved = true;
    }
    return moved;
  }

  bool copy_one() {
    const size_t i = random_() % copies_.size();
    const auto copy = std::move(copies_[i]);
    copies_.erase(copies_.begin() + i);
    copy();
    return true;
  }

  [[noreturn]] void report() {
    std::string text = "nobody can go on: CTA " + std::to_string(block);
    for (unsigned warp = 0; warp < warps_.size(); ++warp) {
      for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
        const Thread& thread = *threads_[warp * kWarpLanes + lane];
        if (thread.ended) { continue; }
        text += "\n  warp " + std::to_string(warp) + " waits for " + thread.waits_for;
        break;
      }
    }
    fail(text);
  }

  static inline Machine* running_ = nullptr;
  std::mt19937 random_;
  bool is_lazy_;
  ucontext_t scheduler_;
  std::function<void()> body_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::unordered_map<const void*, Barrier> barriers_;
  std::vector<Meeting> named_;
  Meeting all_;
  std::vector<std::function<void()>> copies_;
  std::unordered_map<uint64_t, std::vector<float>> read_;
};

inline Machine* machine = nullptr;

inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const char*>(pointer) - shared_memory);
}
inline char* shared_at(uint32_t address, int bytes) {
  if (address + bytes > kSharedBytes) { fail("an address beyond shared memory"); }
  return shared_memory + address;
}

}  // namespace emulator
