// csrc/device/barrier.h on the host. The machine keeps the barriers' state.
#pragma once

#include "machine.h"

namespace dash_attn {

class Barrier {
 public:
  void init(int arrivals) const {
    emulator::Barrier& b = emulator::machine->barrier(this);
    b = {};
    b.count = b.pending = arrivals;
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

class TransactionBarrier : public Barrier {
 public:
  void arrive_and_expect_tx(int bytes) const {
    emulator::machine->barrier(this).bytes += bytes;
    arrive();
  }
};

inline void fence_barrier_init() {}

inline void sync_numbered(int barrier, int threads) {
  emulator::machine->meet(emulator::machine->named(barrier), threads, "a named barrier");
}

}  // namespace dash_attn
