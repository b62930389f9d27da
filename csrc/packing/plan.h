// Runs before a pass over a pack, except where check.h runs. One CTA reads the lengths, which the host does not know,
// and writes a PackedSequence for each sequence, longest first, with its share of the work and of the workspace.
// Tables map each unit of work, and each query tile, to its sequence. The other CTAs write what is promised of rows
// that belong to no sequence, and check the table of pages.
//
// None of this decides a bit: a sequence's place in the list decides only when it is worked on.
//
// A Rule says what a pass needs for a sequence: placement/pack_needs.h.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "../device/ptx.h"
#include "../placement/pack_needs.h"
#include "../placement/sequences.h"
#include "lengths.h"

namespace dash_attn::packing {

constexpr int kPlanThreads = 1024;

// A tensor of 16-byte vectors, in which rows outside all sequences are zeroed.
struct ClearedTensor {
  void* data;                       // or null if there is no tensor
  int64_t stride_row, stride_head;  // in bytes
  int heads, vectors;               // vectors: in a row of a head
  bool of_keys;
};

struct ClearedRows {
  static constexpr int kTensors = 3;
  ClearedTensor tensors[kTensors];
  float* softmax_lse;  // (heads, total_q), set to +inf; or null
  int heads;

  __device__ bool has_any(bool of_keys) const {
    bool found = !of_keys && softmax_lse;
    for (const ClearedTensor& tensor : tensors) { found |= tensor.data && tensor.of_keys == of_keys; }
    return found;
  }
};

template <typename Rule>
struct PlanParams {
  Rule rule;
  Lengths q, k;
  int batch;
  PackedSequence* sequences;
  int* of_unit;
  int* of_query_tile;  // or null
  PackTotals* totals;
  int* counter;  // set to zero, or null
  ClearedRows cleared;
  PageTable pages;
};

// Sequences are sorted by length, to a precision of 1/64, into buckets, longest first.
constexpr int kBuckets = 2048;

__device__ __forceinline__ int bucket_of(int steps) {
  constexpr int kDigits = 6;
  const int of_one = __float_as_int(1.f) >> (23 - kDigits);
  const int bucket = steps == 0 ? 0 : (__float_as_int(float(steps)) >> (23 - kDigits)) - of_one + 1;
  return kBuckets - 1 - min(bucket, kBuckets - 1);
}

// Sets `count` entries from `first` on to `value`, for each lane's own arguments. Called by whole warps.
__device__ __forceinline__ void fill_entries(int* table, int first, int count, int value) {
  constexpr int kFew = 8;
  if (count <= kFew) {
    for (int i = 0; i < count; ++i) { table[first + i] = value; }
  }
  const int lane = threadIdx.x % 32;
  for (unsigned many = __ballot_sync(0xffffffff, count > kFew); many; many &= many - 1) {
    const int owner = __ffs(many) - 1;
    const int owners_first = __shfl_sync(0xffffffff, first, owner),
              owners_count = __shfl_sync(0xffffffff, count, owner);
    const int owners_value = __shfl_sync(0xffffffff, value, owner);
    for (int i = lane; i < owners_count; i += 32) { table[owners_first + i] = owners_value; }
  }
}

template <typename Rule>
__device__ __forceinline__ void plan(const PlanParams<Rule>& params) {
  using Scan = cub::BlockScan<PackTotals, kPlanThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using BucketScan = cub::BlockScan<int, kPlanThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ int place_of_bucket[kBuckets];
  __shared__ union {
    typename Scan::TempStorage totals;
    typename BucketScan::TempStorage buckets;
  } scratch;
  const int thread = threadIdx.x;

  if (thread == 0 && params.counter) { *params.counter = 0; }
  constexpr int kBucketsOfThread = kBuckets / kPlanThreads;
  for (int i = thread; i < kBuckets; i += kPlanThreads) { place_of_bucket[i] = 0; }
  __syncthreads();
  const auto need_of = [&](int i) { return params.rule.need({params.q(i).length, params.k(i).length}); };
  for (int i = thread; i < params.batch; i += kPlanThreads) {
    atomicAdd(&place_of_bucket[bucket_of(need_of(i).longest)], 1);
  }
  __syncthreads();
  int counts[kBucketsOfThread];
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) { counts[i] = place_of_bucket[thread * kBucketsOfThread + i]; }
  BucketScan(scratch.buckets).ExclusiveSum(counts, counts);
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) { place_of_bucket[thread * kBucketsOfThread + i] = counts[i]; }
  __syncthreads();
  for (int i = thread; i < params.batch; i += kPlanThreads) {
    const Lengths::Rows q = params.q(i), k = params.k(i);
    const PackNeed need = params.rule.need({q.length, k.length});
    const int place = atomicAdd(&place_of_bucket[bucket_of(need.longest)], 1);
    params.sequences[place] = packed_sequence(i, {q.length, k.length}, q.first + q.length, k.first + k.length, need);
  }
  __syncthreads();

  PackTotals before{};
  for (int base = 0; base < params.batch; base += kPlanThreads) {
    const int place = base + thread;
    PackTotals own{};
    if (place < params.batch) { own = params.rule.need(params.sequences[place].lengths).share; }
    PackTotals first, all;
    Scan(scratch.totals).ExclusiveScan(own, first, PackTotals{}, [](auto a, auto b) { return a + b; }, all);
    first = before + first;
    if (place < params.batch) { begin_after(params.sequences[place], first); }
    fill_entries(params.of_unit, first.units, own.units, place);
    if (params.of_query_tile) { fill_entries(params.of_query_tile, first.query_tiles, own.query_tiles, place); }
    before = before + all;
    __syncthreads();  // `scratch` is reused
  }
  if (thread == 0) { *params.totals = before; }
}

// Calls clear(row) for every row outside all sequences.
template <typename Clear>
__device__ __forceinline__ void for_rows_outside(const Lengths& lengths, int batch, Clear&& clear) {
  __shared__ int first_of[kPlanThreads], end_of[kPlanThreads];
  __shared__ int count;
  for (int base = 0; base <= batch; base += kPlanThreads) {
    __syncthreads();
    if (threadIdx.x == 0) { count = 0; }
    __syncthreads();
    const int i = base + threadIdx.x;  // the gap before sequence i
    if (i <= batch) {
      int first = 0;
      if (i > 0) {
        const Lengths::Rows previous = lengths(i - 1);
        first = previous.first + previous.length;
      }
      const int end = i < batch ? lengths.first(i) : lengths.total;
      if (first < end) {
        const int place = atomicAdd(&count, 1);
        first_of[place] = first;
        end_of[place] = end;
      }
    }
    __syncthreads();
    for (int gap = 0; gap < count; ++gap) {
      // Rows are distributed over all CTAs but the one that plans, unless it is the only one. Each gap begins with
      // another CTA, because gaps may be short.
      const int first = first_of[gap], blocks = max_int(1, gridDim.x - 1), own = max_int(0, blockIdx.x - 1);
      for (int row = first + (own + first) % blocks; row < end_of[gap]; row += blocks) { clear(row); }
    }
  }
}

__device__ __forceinline__ void clear_row(const ClearedTensor& tensor, int row) {
  char* const data = static_cast<char*>(tensor.data) + row * tensor.stride_row;
  for (int i = threadIdx.x; i < tensor.heads * tensor.vectors; i += kPlanThreads) {
    const int head = i / tensor.vectors, vector = i % tensor.vectors;
    reinterpret_cast<uint4*>(data + head * tensor.stride_head)[vector] = make_uint4(0, 0, 0, 0);
  }
}

template <typename Rule>
__device__ __forceinline__ void clear_rows_outside(const PlanParams<Rule>& params) {
  const ClearedRows& cleared = params.cleared;
  for (int of_keys = 0; of_keys < 2; ++of_keys) {
    const Lengths& lengths = of_keys ? params.k : params.q;
    if (!cleared.has_any(of_keys) || lengths.use_all_rows()) { continue; }
    for_rows_outside(lengths, params.batch, [&](int row) {
      for (const ClearedTensor& tensor : cleared.tensors) {
        if (tensor.data && tensor.of_keys == bool(of_keys)) { clear_row(tensor, row); }
      }
      if (!of_keys && cleared.softmax_lse) {
        for (int head = threadIdx.x; head < cleared.heads; head += kPlanThreads) {
          cleared.softmax_lse[int64_t(head) * lengths.total + row] = INFINITY;
        }
      }
    });
  }
}

template <typename Rule>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams<Rule> params) {
  ptx::launch_dependents();  // the dependents wait for this kernel's end
  if (blockIdx.x == 0) { plan(params); }
  if (blockIdx.x > 0 || gridDim.x == 1) {
    if (params.pages.exists()) {
      check_keys(params.pages, params.k, params.batch, max_int(0, int(blockIdx.x) - 1), max_int(1, gridDim.x - 1));
    }
    clear_rows_outside(params);
  }
}

}  // namespace dash_attn::packing
