// CTAs of a Hopper GPU on the host: their threads are fibers that take turns in a random order, TMA copies when it
// likes, and whoever waits for what never comes is reported. Everything that CUDA's names stand for in the kernels'
// sources (include/, overlay/) is made of this.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <source_location>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "products.h"

namespace emulator {

constexpr int kWarpLanes = 32;
constexpr int kSharedBytes = 232448;
constexpr int kSharedAlignment = 1024;
constexpr int kNamedBarriers = 16;
constexpr int kStackBytes = 96 << 10;
constexpr int kLongestTime = 4;  // in turns, that something takes

inline std::string machine_text;  // on what machine something fails: for messages

[[noreturn]] inline void fail(const std::string& what) {
  std::printf("%s%s\n", what.c_str(), machine_text.c_str());
  std::fflush(stdout);
  std::_Exit(1);  // other fibers have stacks of their own
}

// What a call chooses in place of the rules of csrc/launch (tests/emulation.py), or nothing.
inline std::optional<bool> finishes_dq;
inline bool has_short_tiles = false;

// What ptx::load_here may read, where the call says so.
struct Readable {
  const uint8_t *first = nullptr, *end = nullptr;
};
inline Readable readable;

// Goes on where `to` was left, and leaves in `from` where to go on here: on the stack, with the registers that a call
// keeps by the ABI of x86-64. swapcontext does the same and sets the mask of signals, by two system calls.
[[gnu::naked, gnu::noipa]] inline void switch_stacks(void** from, void* to) {
  asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret");
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
  // Of bulk operations from shared memory to global memory.
  struct BulkOperation {
    std::function<void()> read, perform;  // from there; to there; none if it has been done
  };

  struct Thread {
    std::unique_ptr<char[]> stack;
    void* place;  // on it, where to go on
    std::function<bool()> ready;  // what it waits for
    const char* waits_for = "";
    std::source_location where;  // the kernel waits
    bool ended = false;
    Products products;
    std::vector<BulkOperation> open_bulk;
    std::vector<std::vector<BulkOperation>> bulk_groups;  // committed, and not known to have been performed
    std::vector<std::function<void()>> writes;            // to shared memory, which TMA does not see before a fence
    std::vector<std::function<void()>> open_copies;       // to shared memory, not committed yet
    std::vector<std::vector<std::function<void()>>> copy_groups;  // committed, and not waited for
    const int* polled = nullptr;                          // where it last looked for a semaphore, and what it saw
    int seen = 0;
  };

  explicit Machine(unsigned seed) : random_(seed), is_lazy_(seed % 2) {}

  // Every CTA of a grid, `together` at a time, in the order of their numbers.
  template <typename Kernel, typename Params>
  void launch(Kernel kernel, const Params& params, unsigned blocks, int threads, unsigned together = 1) {
    running_ = this;
    body_ = [&] { kernel(params); };
    blocks_of_grid = blocks;
    for (unsigned next = 0; next < blocks || !blocks_.empty();) {
      while (next < blocks && blocks_.size() < together) { blocks_.push_back(make_block(next++, threads)); }
      run_blocks();
    }
    barriers_.clear();
  }

  // Returns when it is the calling thread's turn and `ready` says so.
  template <typename Ready>
  void wait(const char* what, Ready&& ready, std::source_location where = std::source_location::current()) {
    Thread& self = this->self();
    self.waits_for = what;
    self.where = where;
    self.ready = ready;
    switch_stacks(&self.place, scheduler_);
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
    Warp& warp = block_->warps[current / kWarpLanes];
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
  void wait_parity(const void* address, int parity, std::source_location where) {
    Barrier& b = barrier(address);
    if (b.count == 0) { fail("a wait for a barrier that is not initialised"); }
    wait("an mbarrier", [&b, parity] { return b.phase != parity; }, where);
  }

  // Done at any time from now on.
  void later(std::function<void()> copy) { block_->copies.push_back(std::move(copy)); }

  // What a semaphore in global memory says. Who looks again waits until it says something else.
  int poll(const int* semaphore, std::source_location where) {
    Thread& self = this->self();
    if (self.polled == semaphore) {
      wait("a semaphore", [semaphore, seen = self.seen] { return *semaphore != seen; }, where);
    }
    self.polled = semaphore;
    return self.seen = *semaphore;
  }

  // What a lane has decoded of the CTA's shared memory, for other lanes.
  struct Read {
    uint64_t writes = 0;  // when one looked
    std::string bytes;
    std::vector<float> numbers;
  };
  Read& read_of(uint64_t key) { return block_->reads[key]; }
  // Every write that a product may read is followed by wrote_shared().
  uint64_t writes() const { return block_->writes; }
  void wrote_shared() { ++block_->writes; }

  Thread& self() { return *block_->threads[current]; }
  Meeting& named(int id) { return block_->named.at(id); }
  Meeting& all() { return block_->all; }
  char* shared() { return block_->shared; }
  bool is_lazy() const { return is_lazy_; }
  int threads() const { return int(block_->threads.size()); }
  unsigned block() const { return block_->number; }
  unsigned random() { return unsigned(random_()); }

  unsigned current = 0, blocks_of_grid = 0;

 private:
  struct Block {
    unsigned number;
    std::unique_ptr<char[]> memory = std::make_unique<char[]>(kSharedBytes + kSharedAlignment);
    char* shared;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::vector<Meeting> named{kNamedBarriers};
    Meeting all;
    std::vector<std::function<void()>> copies;
    uint64_t writes = 1;  // to shared memory, so far
    std::unordered_map<uint64_t, Read> reads;

    bool has_ended() const {
      for (const auto& thread : threads) {
        if (!thread->ended) { return false; }
      }
      return true;
    }
  };

  std::unique_ptr<Block> make_block(unsigned number, int threads) {
    auto block = std::make_unique<Block>();
    block->number = number;
    const auto address = reinterpret_cast<uintptr_t>(block->memory.get());
    block->shared = block->memory.get() + (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
    std::memset(block->shared, 0xff, kSharedBytes);  // NaN
    block->warps = std::vector<Warp>(threads / kWarpLanes);
    for (int i = 0; i < threads; ++i) {
      auto thread = std::make_unique<Thread>();
      thread->stack = take_stack();
      thread->place = prepare_stack(thread->stack.get());
      block->threads.push_back(std::move(thread));
    }
    return block;
  }

  // So that whoever switches to the place returned begins.
  static void* prepare_stack(char* stack) {
    constexpr int kKept = 6;  // registers
    // `ret` takes `begin`, and leaves the stack as a call does: 8 bytes off a multiple of 16.
    auto* const place = reinterpret_cast<void**>(stack + kStackBytes) - 2 - kKept;
    place[kKept] = reinterpret_cast<void*>(&Machine::begin);
    return place;
  }

  std::unique_ptr<char[]> take_stack() {
    if (stacks_.empty()) { return std::make_unique_for_overwrite<char[]>(kStackBytes); }
    auto stack = std::move(stacks_.back());
    stacks_.pop_back();
    return stack;
  }

  static void begin() {
    running_->body_();
    Thread& self = running_->self();
    self.ended = true;
    switch_stacks(&self.place, running_->scheduler_);  // for good
  }

  // Until one of the CTAs has ended.
  void run_blocks() {
    for (;;) {
      bool moved = false;
      for (size_t i = 0; i < blocks_.size(); ++i) {
        if (blocks_.size() > 1 && random_() % 2) { continue; }  // they are not equally fast
        moved |= run_block(i);
        if (end_block(i)) { return; }
      }
      // Some may wait for a time.
      for (int turn = 0; turn < kLongestTime && !moved; ++turn) {
        for (size_t i = 0; i < blocks_.size(); ++i) {
          block_ = blocks_[i].get();
          for (unsigned warp = 0; warp < block_->warps.size(); ++warp) { moved |= run_warp(warp); }
          if (!block_->copies.empty()) { moved |= copy_one(); }
          if (end_block(i)) { return; }
        }
      }
      if (!moved) { report(); }
    }
  }

  // Warps in a random order, each as far as it comes, and copies between them.
  bool run_block(size_t i) {
    block_ = blocks_[i].get();
    bool moved = false;
    const unsigned warps = unsigned(block_->warps.size()), first = unsigned(random_() % warps);
    for (unsigned warp = 0; warp < warps; ++warp) {
      moved |= run_warp((first + warp * (1 + 2 * (random_() % 2))) % warps);
      while (!block_->copies.empty() && random_() % 4 == 0) { moved |= copy_one(); }
    }
    return moved;
  }

  bool end_block(size_t i) {
    if (!blocks_[i]->has_ended()) { return false; }
    if (!blocks_[i]->copies.empty()) { fail("a CTA ended before its copies"); }
    for (auto& thread : blocks_[i]->threads) { stacks_.push_back(std::move(thread->stack)); }
    blocks_.erase(blocks_.begin() + i);
    return true;
  }

  bool run_warp(unsigned warp) {
    bool moved = false;
    for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
      current = warp * kWarpLanes + lane;
      Thread& thread = self();
      if (thread.ended || (thread.ready && !thread.ready())) { continue; }
      thread.ready = nullptr;
      switch_stacks(&scheduler_, thread.place);
      moved = true;
    }
    return moved;
  }

  bool copy_one() {
    auto& copies = block_->copies;
    const size_t i = random_() % copies.size();
    const auto copy = std::move(copies[i]);
    copies.erase(copies.begin() + i);
    wrote_shared();
    copy();
    return true;
  }

  // The name of the file, the number of the line and its text, which names the barrier.
  static std::string source_line(const std::source_location& where) {
    const std::string path = where.file_name();
    std::ifstream file(path);
    std::string text;
    for (unsigned line = 0; line < where.line(); ++line) { std::getline(file, text); }
    text.erase(0, text.find_first_not_of(' '));
    return path.substr(path.rfind('/') + 1) + ":" + std::to_string(where.line()) + ": " + text;
  }

  [[noreturn]] void report() {
    std::string text = "nobody can go on";
    for (const auto& block : blocks_) {
      for (unsigned warp = 0; warp < block->warps.size(); ++warp) {
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
          const Thread& thread = *block->threads[warp * kWarpLanes + lane];
          if (thread.ended) { continue; }
          text += "\n  CTA " + std::to_string(block->number) + ", warp " + std::to_string(warp) + " waits for " +
                  thread.waits_for + " at " + source_line(thread.where);
          break;
        }
      }
    }
    fail(text);
  }

  static inline Machine* running_ = nullptr;
  std::mt19937 random_;
  bool is_lazy_;
  void* scheduler_ = nullptr;  // where it goes on
  std::function<void()> body_;
  std::vector<std::unique_ptr<Block>> blocks_;  // that are running
  Block* block_ = nullptr;                      // whose thread's turn it is
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::unordered_map<const void*, Barrier> barriers_;
};

inline Machine* machine = nullptr;

inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const char*>(pointer) - machine->shared());
}
inline char* shared_at(uint32_t address, int bytes) {
  if (address + bytes > kSharedBytes) { fail("an address beyond shared memory"); }
  return machine->shared() + address;
}

}  // namespace emulator
