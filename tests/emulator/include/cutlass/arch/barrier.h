#pragma once
#include "machine.h"

namespace cutlass::arch {

class ClusterBarrier {
 public:
  void init(int count) const {
    emulator::Barrier& b = emulator::machine->barrier(this);
    b = {};
    b.count = b.pending = count;
  }
  void wait(uint32_t parity, std::source_location where = std::source_location::current()) const {
    emulator::machine->wait_parity(this, int(parity), where);
  }
  void arrive() const {
    emulator::Barrier& b = emulator::machine->barrier(this);
    --b.pending;
    b.settle();
  }

 private:
  uint64_t place_;
};

class ClusterTransactionBarrier : public ClusterBarrier {
 public:
  void arrive_and_expect_tx(uint32_t bytes) const {
    emulator::machine->barrier(this).bytes += int(bytes);
    arrive();
  }
};

struct NamedBarrier {
  static void sync(int threads, uint32_t id) {
    emulator::machine->meet(emulator::machine->named(int(id)), threads, "a named barrier");
  }
};

inline void fence_barrier_init() {}

}  // namespace cutlass::arch
