// csrc/device/ptx.h on the host: what the forward uses of it.
#pragma once

#include <cute/arch/util.hpp>

namespace dash_attn::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float tanh_approx(float x) { return std::tanh(x); }

inline uint32_t permute_bytes(uint32_t x, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> 4 * i & 15, byte = choice % 8 < 4 ? x >> 8 * (choice % 8) & 0xff : 0;
    result |= (choice < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * i;
  }
  return result;
}

inline void bulk_prefetch(const void*, int) {}
inline void bulk_commit() {}
template <int kPending = 0>
void bulk_wait_read() {
  static_assert(kPending == 0);
  emulator::machine->wait("its stores", [] { return true; });
  auto& stores = emulator::machine->self().stores;
  for (const auto& store : stores) { store(); }
  stores.clear();
}
inline void fence_async_shared() {
  auto& writes = emulator::machine->self().writes;
  for (const auto& write : writes) { write(); }
  writes.clear();
  emulator::machine->wrote_shared();
}

// Matrix i's row r is at the address of lane 8 i + r; lane l has elements 2 (l % 4) and the next of row l / 4.
inline void store_matrix(uint32_t row, const uint32_t (&m)[4]) {
  const auto given = emulator::machine->exchange("stmatrix", row);
  const int lane = int(emulator::machine->current % emulator::kWarpLanes);
  for (int i = 0; i < 4; ++i) {
    const auto address = uint32_t(given[8 * i + lane / 4][0]) + 4 * (lane % 4);
    emulator::machine->self().writes.push_back(
        [address, value = m[i]] { std::memcpy(emulator::shared_at(address, 4), &value, 4); });
  }
}

void store_matrix_transposed(uint32_t row, const uint32_t (&m)[4]);
void load_matrix(uint32_t row, uint32_t (&m)[4]);

}  // namespace dash_attn::ptx

namespace dash_attn {

inline int read_thread_index() { return int(emulator::machine->current); }
inline void forget(int&) {}
inline void forget(uint32_t&) {}
inline void forget_memory() {}

}  // namespace dash_attn
