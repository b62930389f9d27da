#pragma once
#include "wgmma.h"

namespace cute {
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { emulator::commit_products(); }
template <int kPending>
void warpgroup_wait() {
  emulator::wait_products<kPending>();
}
}  // namespace cute
