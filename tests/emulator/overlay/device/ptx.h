// csrc/device/ptx.h on the host: what the kernels use of it.
#pragma once

#include <memory>
#include <utility>

#include "machine.h"
#include "tensor_of_map.h"

namespace dash_attn::ptx {

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float sqrt_approx(float x) { return std::sqrt(x); }
inline float tanh_approx(float x) { return std::tanh(x); }

inline int max3(int a, int b, int c) { return std::max(a, std::max(b, c)); }
inline uint32_t min3(uint32_t a, uint32_t b, uint32_t c) { return std::min(a, std::min(b, c)); }

inline uint32_t permute_bytes(uint32_t x, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> 4 * i & 15, byte = choice % 8 < 4 ? x >> 8 * (choice % 8) & 0xff : 0;
    result |= (choice < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * i;
  }
  return result;
}

inline uint32_t multiply_add_relu_bf16(uint32_t a, uint32_t b, uint32_t c) {
  const auto value = [](uint32_t pair, int half) { return __uint_as_float((pair >> 16 * half) << 16); };
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const float sum = value(a, half) * value(b, half) + value(c, half);  // exact where the kernels use it
    result |= (sum < 0 ? 0 : __float_as_uint(sum) >> 16) << 16 * half;
  }
  return result;
}

// The magnitudes of numbers are in the order of their bits; beyond that of infinity is NaN.
inline uint32_t larger_magnitude(uint32_t a, uint32_t b, uint32_t infinity) {
  uint32_t result = (a ^ b) & 0x80008000;
  for (int shift : {0, 16}) {
    const uint32_t x = a >> shift & 0x7fff, y = b >> shift & 0x7fff;
    result |= (x > infinity ? y : y > infinity ? x : std::max(x, y)) << shift;
  }
  return result;
}
inline uint32_t larger_magnitude_f16(uint32_t a, uint32_t b) { return larger_magnitude(a, b, 0x7c00); }
inline uint32_t larger_magnitude_bf16(uint32_t a, uint32_t b) { return larger_magnitude(a, b, 0x7f80); }

template <typename T>
T load_here(const T* address) {
  const auto& [first, end] = emulator::readable;
  const auto* bytes = reinterpret_cast<const uint8_t*>(address);
  if (end && (bytes < first || bytes + sizeof(T) > end)) { emulator::fail("a load of what is not there"); }
  return *address;
}

inline void bulk_prefetch(const void*, int) {}
constexpr int kDiscardedBytes = 128;
// What is read afterwards is NaN.
inline void discard_l2(void* global) { std::memset(global, 0xff, kDiscardedBytes); }
// A bulk operation reads shared memory and is performed when it is issued, or when it is waited for.
inline void bulk_to_global(float* global, const float* shared, int bytes, uint32_t (*combine)(uint32_t, uint32_t)) {
  auto staged = std::make_shared<std::vector<uint32_t>>(bytes / 4);
  emulator::Machine::BulkOperation operation;
  operation.read = [=] { std::memcpy(staged->data(), shared, bytes); };
  operation.perform = [=] {
    for (int i = 0; i < bytes / 4; ++i) {
      uint32_t word;
      std::memcpy(&word, global + i, 4);
      word = combine(word, (*staged)[i]);
      std::memcpy(global + i, &word, 4);
    }
  };
  if (!emulator::machine->is_lazy()) {
    operation.read();
    operation.perform();
    operation = {};
  }
  emulator::machine->self().open_bulk.push_back(std::move(operation));
}
inline void bulk_add_f32(float* global, const float* shared, int bytes) {
  bulk_to_global(global, shared, bytes,
                 [](uint32_t a, uint32_t b) { return __float_as_uint(__uint_as_float(a) + __uint_as_float(b)); });
}
inline void bulk_add_s32(float* global, const float* shared, int bytes) {
  bulk_to_global(global, shared, bytes, [](uint32_t a, uint32_t b) { return a + b; });
}
inline void bulk_store(float* global, const float* shared, int bytes) {
  bulk_to_global(global, shared, bytes, [](uint32_t, uint32_t b) { return b; });
}

// Loads come at any time from now on.
inline void bulk_load(void* shared, const void* global, int bytes, const void* barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) { emulator::fail("a bulk copy off 16 bytes"); }
  emulator::machine->later([=] {
    std::memcpy(shared, global, bytes);
    emulator::Barrier& b = emulator::machine->barrier(barrier);
    b.bytes -= bytes;
    b.settle();
  });
}

// A copy is performed either when it is issued, or by the first fence after the wait for it.
inline void copy_16_bytes(void* shared, const void* global, int bytes, uint64_t) {
  const auto place = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (place % 16 != 0) { emulator::fail("a copy off 16 bytes"); }
  const auto copy = [=, to = emulator::shared_at(shared_address(shared), 16)] {
    std::memset(to, 0, 16);
    std::memcpy(to, global, bytes);
  };
  if (emulator::machine->is_lazy()) { return emulator::machine->self().open_copies.push_back(copy); }
  emulator::machine->wrote_shared();
  copy();
}
inline void commit_copies() {
  auto& self = emulator::machine->self();
  self.copy_groups.push_back(std::move(self.open_copies));
  self.open_copies.clear();
}
template <int kPending>
void wait_for_copies() {
  emulator::machine->wait("copies", [] { return true; });
  auto& self = emulator::machine->self();
  while (self.copy_groups.size() > kPending) {
    for (auto& copy : self.copy_groups.front()) { self.writes.push_back(std::move(copy)); }
    self.copy_groups.erase(self.copy_groups.begin());
  }
}

struct BoxOrigin {
  int x0, x1, x2, x3, x4;
};
inline void load_box(void* shared, const CUtensorMap& map, BoxOrigin c, const void* barrier, uint64_t) {
  emulator::machine->later([=, tensor = map.tensor, address = shared_address(shared)] {
    tensor->for_box(address, {c.x0, c.x1, c.x2, c.x3, c.x4}, [](uint32_t place, const char* element) {
      char* const to = emulator::shared_at(place, 2);
      element ? (void)std::memcpy(to, element, 2) : (void)std::memset(to, 0, 2);
    });
    emulator::Barrier& b = emulator::machine->barrier(barrier);
    b.bytes -= tensor->box_bytes();
    b.settle();
  });
}
// Reads when it is waited for.
inline void store_box(const CUtensorMap& map, const void* shared, BoxOrigin c) {
  const auto copy = [=, tensor = map.tensor, address = shared_address(shared)] {
    tensor->for_box(address, {c.x0, c.x1, c.x2, c.x3, c.x4}, [](uint32_t place, char* element) {
      if (element) { std::memcpy(element, emulator::shared_at(place, 2), 2); }
    });
  };
  emulator::machine->self().open_bulk.push_back({copy, {}});
}

inline void bulk_commit() {
  auto& self = emulator::machine->self();
  self.bulk_groups.push_back(std::move(self.open_bulk));
  self.open_bulk.clear();
}
inline void wait_for_bulk(size_t pending, bool until_performed) {
  const unsigned longest = emulator::machine->is_lazy() ? emulator::kLongestTime : 1;
  unsigned turns = emulator::machine->random() % longest;
  emulator::machine->wait("bulk operations", [turns]() mutable { return turns-- == 0; });
  auto& groups = emulator::machine->self().bulk_groups;
  for (size_t i = 0; i + pending < groups.size(); ++i) {
    for (auto& operation : groups[i]) {
      if (operation.read) { std::exchange(operation.read, {})(); }
      if (until_performed && operation.perform) { std::exchange(operation.perform, {})(); }
    }
  }
  if (until_performed) { groups.clear(); }
}
template <int kPending = 0>
void bulk_wait_read() {
  wait_for_bulk(kPending, false);
}
inline void bulk_wait_performed() { wait_for_bulk(0, true); }

inline void fence_async_global() {}
inline int load_acquire(const int* address, std::source_location where = std::source_location::current()) {
  return emulator::machine->poll(address, where);
}
inline int poll(const int* address) {
  emulator::machine->wait("another turn", [] { return true; });
  return *address;
}
inline void store_release(int* address, int value) {
  *address = value;
  emulator::machine->self().polled = nullptr;
}
inline void store_relaxed(int* address, int value) { store_release(address, value); }
inline void add_release(int* address, int value) { store_release(address, *address + value); }
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline bool elect_one() {
  emulator::machine->exchange("elect", 0);
  return emulator::machine->current % emulator::kWarpLanes == 0;
}
template <int>
void give_registers() {}
template <int>
void take_registers() {}

// Of clusters, which there are none of.
void sync_cluster();
int cta_rank();
uint32_t map_shared(const void* shared, uint32_t cta_rank);
void store_async(uint32_t remote_address, int value, uint32_t remote_barrier);

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

// The same of the matrices' transposes: lane l has elements l / 4 of rows 2 (l % 4) and the next.
inline void store_matrix_transposed(uint32_t row, const uint32_t (&m)[4]) {
  const auto given = emulator::machine->exchange("stmatrix.trans", row);
  const int lane = int(emulator::machine->current % emulator::kWarpLanes);
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      const auto address = uint32_t(given[8 * i + 2 * (lane % 4) + half][0]) + 2 * (lane / 4);
      emulator::machine->self().writes.push_back(
          [address, value = uint16_t(m[i] >> 16 * half)] { std::memcpy(emulator::shared_at(address, 2), &value, 2); });
    }
  }
}

inline void load_matrix(uint32_t row, uint32_t (&m)[4]) {
  const auto given = emulator::machine->exchange("ldmatrix", row);
  const int lane = int(emulator::machine->current % emulator::kWarpLanes);
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&m[i], emulator::shared_at(uint32_t(given[8 * i + lane / 4][0]) + 4 * (lane % 4), 4), 4);
  }
}

inline void load_matrix_transposed(uint32_t row, uint32_t (&m)[4]) {
  const auto given = emulator::machine->exchange("ldmatrix.trans", row);
  const int lane = int(emulator::machine->current % emulator::kWarpLanes);
  for (int i = 0; i < 4; ++i) {
    m[i] = 0;
    for (int half = 0; half < 2; ++half) {
      uint16_t value;
      const auto address = uint32_t(given[8 * i + 2 * (lane % 4) + half][0]) + 2 * (lane / 4);
      std::memcpy(&value, emulator::shared_at(address, 2), 2);
      m[i] |= uint32_t(value) << 16 * half;
    }
  }
}

}  // namespace dash_attn::ptx

namespace dash_attn {

inline int read_thread_index() { return int(emulator::machine->current); }
inline void opaque(int&) {}
inline void opaque(uint32_t&) {}
inline void compiler_fence() {}

}  // namespace dash_attn
