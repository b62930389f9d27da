// Runs the source of the fingerprint kernel (csrc/receipts/kernel.h) on the host, with a thread for each lane of a warp
// that really exchanges its sums with the others, beside what the CPU's op does. Every load and every addition is
// checked: it must lie within its tensor or the sums, and begin at a multiple of its size.
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

namespace {

struct Range {
  std::uintptr_t begin, end;

  void check(const void* pointer, std::size_t bytes, const char* what) const {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    if (address % bytes != 0 || address < begin || address + bytes > end) {
      std::printf("%s of %zu bytes at %td of %td\n", what, bytes, address - begin, end - begin);
      std::fflush(stdout);
      std::_Exit(1);  // not exit: other lanes are running, and what it destroys is theirs
    }
  }
};

struct Dimension {
  unsigned x;
};

constexpr int kWarpLanes = 32;
Range readable, writable;
Dimension gridDim;
thread_local Dimension threadIdx, blockIdx;
std::barrier<> together(kWarpLanes);
unsigned long long exchanged[kWarpLanes];

template <class T>
T __ldg(const T* pointer) {
  readable.check(pointer, sizeof(T), "a load");
  T value;
  std::memcpy(&value, pointer, sizeof value);
  return value;
}

unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int mask) {
  const unsigned lane = threadIdx.x % kWarpLanes;
  exchanged[lane] = value;
  together.arrive_and_wait();
  const unsigned long long other = exchanged[lane ^ static_cast<unsigned>(mask)];
  together.arrive_and_wait();
  return other;
}

void atomicAdd(unsigned long long* sum, unsigned long long value) {
  writable.check(sum, sizeof *sum, "an addition");
  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

}  // namespace

#include "receipts/host.h"
#include "receipts/kernel.h"
#include "receipts/plan.h"

namespace {

using namespace dash_attn::receipts;

void run_kernel(const Table& table) {
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    lanes.emplace_back([&table, lane] {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (unsigned warp = 0; warp < kKernelWarps; ++warp) {
          threadIdx.x = warp * kWarpLanes + lane;
          fingerprint_kernel(table);
        }
      }
    });
  }
  for (std::thread& lane : lanes) { lane.join(); }
}

// A call of tensors of all kinds of words, places and rows; some end where what may be read ends.
struct Call {
  std::vector<Words> tensors;
  std::vector<int64_t> numbers;
  int64_t sums = 0;

  Call(std::mt19937_64& random, int shift, int count) {
    const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
    for (int64_t i = 0; i < count; ++i) {
      const int bytes = 1 << below(3);
      const int64_t rows = below(3) ? 1 : 1 + below(9), columns = 1 + below(below(2) ? 40 : 9000 / rows);
      const int64_t pitch = columns + below(30), offset = below(20);
      const int64_t words = offset + (rows - 1) * pitch + columns;
      const int64_t stride = columns + (below(2) ? below(5000) : 0);
      const int64_t first = below(3) ? below(5000) : below(int64_t{1} << 59);
      const auto size = static_cast<std::uintptr_t>(bytes);
      const std::uintptr_t at_end = readable.end - static_cast<std::uintptr_t>(words) * size;
      const std::uintptr_t address = below(4) ? readable.begin + static_cast<std::uintptr_t>(below(1000)) : at_end;
      const int64_t last = first + (rows - 1) * stride + columns - 1;
      tensors.push_back({address / size * size, words, bytes});
      for (int64_t number : {i, offset, rows, columns, pitch, first, stride, sums - (first >> shift)}) {
        numbers.push_back(number);
      }
      sums += (last >> shift) - (first >> shift) + 1;
    }
  }
};

}  // namespace

int main() {
  std::mt19937_64 random(1);
  std::vector<uint64_t> memory(1 << 15);
  for (uint64_t& words : memory) { words = random(); }
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  readable = {begin, begin + memory.size() * sizeof memory[0]};
  for (int shift = kLeastBlockShift; shift < 15; ++shift) {
    const Call call(random, shift, shift % 3 == 0 ? 70 : 25);
    const PieceReader reader(call.tensors, int64_t{1} << shift, call.sums);
    const std::vector<Piece> pieces = reader.read(call.numbers);
    std::vector<uint64_t> expected(static_cast<std::size_t>(call.sums)), found = expected;
    const auto first = reinterpret_cast<std::uintptr_t>(found.data());
    writable = {first, first + found.size() * sizeof found[0]};
    gridDim.x = 1 + static_cast<unsigned>(shift % 2);
    // First: the other one's loads and additions are not checked.
    for_tables(pieces, shift, found.data(), run_kernel);
    for_tables(pieces, shift, expected.data(), run_on_host);
    if (found != expected) {
      std::printf("sums of blocks of 2^%d words differ\n", shift);
      return 1;
    }
  }
  std::printf("the kernel's source and the CPU's op agree\n");
}
