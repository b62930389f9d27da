// The names of CUDA that the kernels' sources use without an include: before each of their files.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>

#include "machine.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static  // of kernels of which one CTA runs at a time; the others have dynamic shared memory
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
  struct OfThread {
    operator unsigned() const { return emulator::machine->current; }
  } x;
};
struct BlockIndex {
  struct OfBlock {
    operator unsigned() const { return emulator::machine->block(); }
  } x;
};
struct GridSize {
  struct OfGrid {
    operator unsigned() const { return emulator::machine->blocks_of_grid; }
  } x;
};
inline Index threadIdx;
inline BlockIndex blockIdx;
inline GridSize gridDim;

template <typename T>
T shuffled(const char* operation, T value, int from) {
  const auto given = emulator::machine->exchange(operation, value);
  T result;
  std::memcpy(&result, given[from], sizeof(T));
  return result;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return shuffled("shfl", value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return shuffled("shfl.xor", value, int(emulator::machine->current % 32) ^ mask);
}
template <typename Combine>
uint32_t reduced(const char* operation, uint32_t value, const Combine& combine) {
  const auto given = emulator::machine->exchange(operation, value);
  for (int lane = 0; lane < 32; ++lane) { value = combine(value, uint32_t(given[lane][0])); }
  return value;
}
inline bool __any_sync(unsigned, int value) { return reduced("vote", value, std::bit_or<uint32_t>()); }
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return reduced("redux.max", value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return reduced("redux.min", value, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline uint32_t __ballot_sync(unsigned, bool value) {
  return reduced("vote.ballot", uint32_t(value) << emulator::machine->current % 32, std::bit_or<uint32_t>());
}
inline void __syncwarp() { emulator::machine->exchange("syncwarp", 0); }
inline void __syncthreads() {
  emulator::machine->meet(emulator::machine->all(), emulator::machine->threads(), "syncthreads");
}

using std::isinf, std::max, std::min;

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(uint32_t x) { return std::countl_zero(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
template <typename T>
T __ldcg(const T* pointer) {
  return *pointer;
}
template <typename T>
T __ldcs(const T* pointer) {
  return *pointer;
}
template <typename T>
void __stcg(T* pointer, T value) {
  *pointer = value;
}
template <typename T>
void __stcs(T* pointer, T value) {
  *pointer = value;
}
inline void __nanosleep(unsigned) {}

inline float __fmul_rn(float a, float b) { return a * b; }  // compiled without contraction
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float x) { return std::log2(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline int atomicAdd(int* address, int value) {
  emulator::machine->self().polled = nullptr;  // who looks again after this does not only wait
  const int before = *address;
  *address += value;
  return before;
}
inline int atomicMax(int* address, int value) {
  const int before = *address;
  *address = std::max(before, value);
  return before;
}
inline unsigned atomicMin(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address = std::min(before, value);
  return before;
}
