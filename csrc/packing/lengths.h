// The lengths of sequences and the tables of pages that a caller gives on the device, and their checks. A check that
// fails ends all work of this process on the device, as torch does for a wrong value on the device.
#pragma once

#include <cstdint>
#include <cstdio>

#include "../placement/sequences.h"

namespace dash_attn::packing {

// Prints a message, once for the threads of a warp that are here together, and ends the process's work on the device.
template <typename Print>
__device__ __forceinline__ void stop_with(Print&& print) {
  const unsigned here = __activemask();
  if (int(threadIdx.x) % 32 == __ffs(here) - 1) { print(); }
  __syncwarp(here);
  __trap();
}

// The lengths of queries or of keys, as the caller gives them.
struct Lengths {
  bool of_keys;
  const int* cu_seqlens;  // or null: sequence i has the `longest` rows from row i * step on
  const int* seqused;     // or null: all rows are used
  int total;
  int longest;  // the longest that a sequence may be: with dropout there are bits for that many rows
  int step;

  struct Rows {
    int first, length;
  };

  __device__ int first(int i) const { return cu_seqlens ? cu_seqlens[i] : i * step; }

  __device__ Rows operator()(int i) const {
    const int first = this->first(i), end = cu_seqlens ? cu_seqlens[i + 1] : first + longest;
    const int length = seqused ? seqused[i] : end - first;
    if (first < 0 || first > end || end > total || length < 0 || length > end - first || length > longest) { refuse(); }
    return {first, length};
  }

  // Whether the host knows that every row belongs to a sequence.
  __device__ bool use_all_rows() const { return !cu_seqlens && !seqused && step == longest; }

  // Numbers in the message would take local memory.
  __device__ __noinline__ void refuse() const {
    if (of_keys) {
      stop_with([] {
        printf(
            "dash_attn: cu_seqlens_k must begin at 0 or more, not decrease and not exceed the rows of k, and seqused_k "
            "(cache_seqlens) must be at least 0 and at most a sequence's place; with dropout no sequence must have "
            "more keys than max_seqlen_k says, or dropout_bits has bits for\n");
      });
    } else {
      stop_with([] {
        printf(
            "dash_attn: cu_seqlens_q must begin at 0 or more, not decrease and not exceed the rows of q, and seqused_q "
            "must be at least 0 and at most a sequence's place; with dropout no sequence must have more queries than "
            "max_seqlen_q says, or dropout_bits has bits for\n");
      });
    }
  }
};

__device__ __noinline__ inline void refuse_page() {
  stop_with([] { printf("dash_attn: block_table must name blocks of the cache wherever a sequence has keys\n"); });
}

// Checks the lengths of the sequences first, first + step, ... of `batch`, and the entries of the table, if there is
// one, that a pass follows for these sequences. The threads of a CTA share the entries.
__device__ __forceinline__ void check_keys(const PageTable& table, const Lengths& keys, int batch, int first,
                                           int step) {
  for (int i = first; i < batch; i += step) {
    const int length = keys(i).length, pages = table.exists() ? ceil_div(length, table.page_rows) : 0;
    for (int page = int(threadIdx.x); page < pages; page += int(blockDim.x)) {
      if (unsigned(table.page(i, page)) >= unsigned(table.num_pages)) { refuse_page(); }
    }
  }
}

}  // namespace dash_attn::packing
