// Writes new keys and values into a cache, in place, after the keys that each sequence has, and says how many it has
// then. Like torch, the kernel ends all work of the process on the device where a length or an entry of the table is
// wrong, and writes nothing outside of the cache.
#pragma once

#include <cstdint>
#include <cstdio>

#include "params.h"

namespace dash_attn::cache {

constexpr int kAppendThreads = 128;

enum class Wrong { kOffsets, kLength, kPage };

// One function for each text, because an argument of printf would take local memory.
template <Wrong kWhat>
__device__ __noinline__ void refuse() {
  if constexpr (kWhat == Wrong::kOffsets) {
    printf("dash_attn: cu_seqlens_k_new must hold non-decreasing offsets from 0 to the rows of k\n");
  } else if constexpr (kWhat == Wrong::kLength) {
    printf("dash_attn: cache_seqlens must be at least 0 and leave room for the new keys\n");
  } else {
    printf("dash_attn: block_table and cache_batch_idx must name blocks of the cache wherever a key is written\n");
  }
  __trap();
}

struct AppendedSequence {
  int first, count, length;

  // Padding of the batch, whose length is minus `count`: it has no keys and receives none.
  __device__ bool takes_none() const { return length < 0; }
};

__device__ __forceinline__ AppendedSequence sequence_at(const AppendParams& params, int number) {
  const int* const offsets = params.cu_seqlens;
  const int first = offsets ? offsets[number] : number * params.step;
  const int end = offsets ? offsets[number + 1] : first + params.step;
  if (first < 0 || first > end || end > params.rows) { refuse<Wrong::kOffsets>(); }
  const int length = params.seqlens[number], count = end - first;
  const bool takes_none = params.pages.exists() && length == -count;
  if (!takes_none && (length < 0 || length > params.pages.capacity() - count)) { refuse<Wrong::kLength>(); }
  return {first, count, length};
}

// The last sequence that begins at the row or before it.
__device__ __forceinline__ int sequence_of(const AppendParams& params, int row) {
  if (!params.cu_seqlens) { return row / params.step; }
  int first = 0;
  for (int end = params.batch; end - first > 1;) {
    const int middle = (first + end) / 2;
    (params.cu_seqlens[middle] <= row ? first : end) = middle;
  }
  return first;
}

__device__ __forceinline__ int page_of(const AppendParams& params, int sequence, int place) {
  const PageTable& table = params.pages;
  const int page = table.exists() ? table.page(sequence, place / table.page_rows) : sequence;
  if (unsigned(page) >= unsigned(table.num_pages)) { refuse<Wrong::kPage>(); }
  return page;
}

template <typename Unit>
__device__ __forceinline__ void copy_row(const AppendedRows& x, int heads, int row, int page, int page_row) {
  const Unit* const from = static_cast<const Unit*>(x.rows) + row * x.of_row;
  Unit* const to = static_cast<Unit*>(x.cache) + page * x.of_page + page_row * x.of_page_row;
  for (int i = threadIdx.x; i < heads * x.units; i += kAppendThreads) {
    const int head = i / x.units, unit = i % x.units;
    to[head * x.of_cache_head + unit * x.of_cache_unit] = from[head * x.of_head + unit * x.of_unit];
  }
}

// Unit: what a thread moves at a time.
template <typename Unit>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(const __grid_constant__ AppendParams params) {
  for (int i = blockIdx.x * kAppendThreads + threadIdx.x; i < params.batch; i += gridDim.x * kAppendThreads) {
    const AppendedSequence sequence = sequence_at(params, i);
    params.ends[i] = sequence.length + sequence.count;
  }
  for (int row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int number = sequence_of(params, row);
    const AppendedSequence sequence = sequence_at(params, number);
    const int offset = row - sequence.first;
    if (offset < 0 || offset >= sequence.count || sequence.takes_none()) { continue; }
    const int place = sequence.length + offset, page = page_of(params, number, place);
    const int page_row = place % params.pages.page_rows;
    copy_row<Unit>(params.k, params.heads, row, page, page_row);
    copy_row<Unit>(params.v, params.heads, row, page, page_row);
  }
}

}  // namespace dash_attn::cache
