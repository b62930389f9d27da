// Before an order-free backward: norms and largest elements of the rows of Q, K and V of each head, from which
// config/fixed_point.h derives fixed-point scales (docs/order_free.md).
//
// A block takes a chunk of rows of one head and leaves a few numbers; whoever needs a head's statistics puts its chunks
// together in a fixed order. So they are the same for every number of blocks and every neighbour, without atomic adds.
#pragma once

#include "../../config/fixed_point.h"
#include "../../device/fragment.h"
#include "../params.h"
#include "../rows.h"

namespace dash_attn::backward {

constexpr int kStatisticsThreads = 256;

template <typename Element>
struct StatisticsParams {
  StridedView<const Element> q, k, v;
  Workspace workspace;
  SequencesOfCall call;
  HeadDims head_dims;
  int num_query_blocks, num_blocks;  // of the whole call, or more; a grid of fewer takes several each
};

// What a norm computed in fp32 can be too small by, and what the products of a row can exceed it by: 2^-10 is 60 times
// it.
constexpr float kNormSlack = 1.f + 1.f / 1024;

// Eight 16-bit elements: sum of squares, and largest magnitude.
template <typename Element>
__device__ __forceinline__ void measure8(uint4 packed, float& squares, float& largest) {
  const Element* x = reinterpret_cast<const Element*>(&packed);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = float(x[i]);
    squares = fmaf(value, value, squares);
    // fmaxf would lose a NaN, which the squares keep.
    largest = fmaxf(largest, fabsf(value));
  }
}

// Over the rows that a warp has at once, of a value that all kThreads threads of a row have.
template <int kThreads>
__device__ __forceinline__ float sum_of_rows(float value) {
#pragma unroll
  for (int offset = 16; offset >= kThreads; offset /= 2) { value += __shfl_xor_sync(0xffffffff, value, offset); }
  return value;
}

// Upper bound of the norm of a row that kThreads threads share, from the sum of squares of the whole row and this
// thread's largest magnitude. Called by whole warps.
template <int kThreads, int kColumns>
__device__ __forceinline__ float norm_bound(float squares, float largest) {
  constexpr float kFewestDigits = 1.f / (1ull << 50) / (1ull << 50);
  constexpr float kNearOverflow = 1.f * (1ull << 60) * (1ull << 60);
  const bool in_range = (squares >= kFewestDigits && squares <= kNearOverflow) || squares != squares;
  float norm = sqrtf(squares);
  if (__any_sync(0xffffffff, !in_range)) {
#pragma unroll
    for (int offset = kThreads / 2; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
    }
    if (!in_range) { norm = largest * sqrtf(float(kColumns)); }
  }
  return norm * kNormSlack;
}

// The larger of two magnitudes; NaN is larger than all.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a) & 0x7fffffff, __float_as_uint(b) & 0x7fffffff));
}

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) { value = larger(value, __shfl_xor_sync(0xffffffff, value, offset)); }
  return value;
}

// Which chunk of rows of which head a block works on, and where what it finds goes.
struct Chunk {
  int batch, head, first, end;  // rows of the tensor
  int64_t place;
  int number;    // of the head's chunks
  int sequence;  // in the caller's order
};

// The statistics of a head's chunks lie one after the other, those of a sequence's heads too: from here on.
__device__ __forceinline__ int64_t first_chunk(int chunks_before, int heads, int head, int chunks) {
  return int64_t(chunks_before) * heads + int64_t(head) * chunks;
}

__device__ __forceinline__ int64_t query_chunks_of(const SequencesOfCall& call, const TileOwner& owner) {
  return first_chunk(owner.query_chunks_before, call.heads, owner.head,
                     fixed_point::num_chunks(owner.lengths.seqlen_q));
}

__device__ __forceinline__ int64_t key_chunks_of(const SequencesOfCall& call, const TileOwner& owner) {
  return first_chunk(owner.key_chunks_before, call.kv_heads, owner.head / call.group_size(),
                     fixed_point::num_chunks(owner.lengths.seqlen_k));
}

// The sequence of a pack that chunk number `chunk` of all sequences, of queries or of keys, belongs to.
__device__ __forceinline__ const PackedSequence& sequence_of_chunk(const SequencesOfCall& call,
                                                                   int PackedSequence::* first, int chunk) {
  const PackedSequence* const sequences = call.pack.sequences;
  int low = 0, high = call.batch;  // the last one whose first chunk is not behind
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sequences[middle].*first <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return sequences[low];
}

// Number `index` of the chunks of queries, or of keys; false where there are not so many.
__device__ __forceinline__ bool find_chunk(const SequencesOfCall& call, bool of_queries, int index, Chunk& chunk) {
  const int heads = of_queries ? call.heads : call.kv_heads;
  int Sequence::* const seqlen = of_queries ? &Sequence::seqlen_q : &Sequence::seqlen_k;
  Sequence lengths = call.sequence;
  int before, first_row = 0;
  if (call.pack.is_pack()) {
    const PackTotals& totals = *call.pack.totals;
    if (index >= (of_queries ? totals.query_chunks : totals.key_chunks) * heads) { return false; }
    int PackedSequence::* const first =
        of_queries ? &PackedSequence::first_query_chunk : &PackedSequence::first_key_chunk;
    const PackedSequence& sequence = sequence_of_chunk(call, first, index / heads);
    lengths = sequence.lengths;
    before = sequence.*first;
    first_row = (of_queries ? sequence.end_q : sequence.end_k) - lengths.*seqlen;
    chunk.batch = 0;
    chunk.sequence = sequence.number;
  } else {
    const int chunks = fixed_point::num_chunks(lengths.*seqlen);
    chunk.sequence = chunk.batch = index / (chunks * heads);
    before = chunk.batch * chunks;
  }
  const int chunks = fixed_point::num_chunks(lengths.*seqlen), rows = fixed_point::chunk_rows(lengths.*seqlen);
  const int within = index - before * heads;
  chunk.head = within / chunks;
  chunk.number = within % chunks;
  chunk.first = first_row + chunk.number * rows;
  chunk.end = first_row + min_int(lengths.*seqlen, (chunk.number + 1) * rows);
  chunk.place = index;
  return true;
}

template <typename Element, int kQkDim>
__device__ __forceinline__ float max_query_norm(const StatisticsParams<Element>& params, const Chunk& chunk) {
  constexpr int kThreadsPerRow = kRowThreads<kQkDim>;
  const int column = threadIdx.x % kThreadsPerRow * 8;
  float max_norm = 0.f;
#pragma unroll 4
  for (int base = chunk.first; base < chunk.end; base += kStatisticsThreads / kThreadsPerRow) {
    const int row = base + threadIdx.x / kThreadsPerRow;
    const bool inside = row < chunk.end && column < params.head_dims.qk;
    float squares = 0.f, largest = 0.f;
    measure8<Element>(load8(params.q, chunk.batch, row, chunk.head, column, inside), squares, largest);
    max_norm = larger(max_norm, norm_bound<kThreadsPerRow, kQkDim>(sum_of_row<kThreadsPerRow>(squares), largest));
  }
  return max_norm;
}

// Of eight elements of each of two rows: what measure8 says, and the sums of magnitudes and of squares of their
// difference.
struct PairMeasures {
  float squares[2], largest[2], step_magnitudes, step_squares;
};

// Both rows at once, so that the elements are converted only once and not kept.
template <typename Element>
__device__ __forceinline__ PairMeasures measure_pair(uint4 a, uint4 b) {
  const Element* const rows[2] = {reinterpret_cast<const Element*>(&a), reinterpret_cast<const Element*>(&b)};
  PairMeasures sums{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = float(rows[0][i]), y = float(rows[1][i]);
    sums.squares[0] = fmaf(x, x, sums.squares[0]);
    sums.squares[1] = fmaf(y, y, sums.squares[1]);
    sums.largest[0] = fmaxf(sums.largest[0], fabsf(x));
    sums.largest[1] = fmaxf(sums.largest[1], fabsf(y));
    sums.step_magnitudes += fabsf(x - y);
    sums.step_squares = fmaf(x - y, x - y, sums.step_squares);
  }
  return sums;
}

// Of the rows of one window, two at a time for those threads that share a row, put into `mine`. Called by whole warps.
template <typename Element, int kQkDim, int kValueDim>
__device__ __forceinline__ void measure_window(const StatisticsParams<Element>& params, const Chunk& chunk,
                                               int first_row, KeyStatistics& mine) {
  constexpr int kThreadsPerRow = kRowThreads<kQkDim>;  // of V too: they multiply what they find
  static_assert(kQkDim >= kValueDim);
  constexpr int kRowsAtOnce = 2 * 32 / kThreadsPerRow;
  const int column = threadIdx.x % kThreadsPerRow * 8;
  float k_steps = 0.f, v_steps = 0.f;
#pragma unroll
  for (int base = first_row; base < first_row + fixed_point::kWindow; base += kRowsAtOnce) {
    const int row = base + threadIdx.x % 32 / kThreadsPerRow * 2;
    uint4 k[2], v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = row + i < chunk.end;
      k[i] = load8(params.k, chunk.batch, row + i, chunk.head, column, inside && column < params.head_dims.qk);
      v[i] = load8(params.v, chunk.batch, row + i, chunk.head, column, inside && column < params.head_dims.v);
    }
    const PairMeasures of_k = measure_pair<Element>(k[0], k[1]), of_v = measure_pair<Element>(v[0], v[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float k_norm =
          norm_bound<kThreadsPerRow, kQkDim>(sum_of_row<kThreadsPerRow>(of_k.squares[i]), of_k.largest[i]);
      const float v_norm =
          norm_bound<kThreadsPerRow, kValueDim>(sum_of_row<kThreadsPerRow>(of_v.squares[i]), of_v.largest[i]);
      mine.max_norm = larger(mine.max_norm, k_norm);
      mine.max_element = larger(mine.max_element, of_k.largest[i]);
      // Of this thread's columns; the maximum over all threads is that over all columns.
      mine.max_product = larger(mine.max_product, v_norm * of_k.largest[i]);
    }
    const float v_step = sqrtf(sum_of_row<kThreadsPerRow>(of_v.step_squares));
    if (row + 1 < chunk.end) {
      k_steps += of_k.step_magnitudes;
      v_steps += v_step;
    }
  }
  const int pairs = min_int(chunk.end - first_row, fixed_point::kWindow) / 2;
  if (pairs > 0) {
    const float key_step = sum_of_row<32>(k_steps) / pairs;
    const float value_step = sum_of_rows<kThreadsPerRow>(v_steps) / pairs;
    mine.min_step_product = fminf(mine.min_step_product, key_step * value_step);
  }
}

// A warp takes a window at a time.
template <typename Element, int kQkDim, int kValueDim>
__device__ __forceinline__ KeyStatistics key_statistics(const StatisticsParams<Element>& params, const Chunk& chunk) {
  constexpr int kRows = kStatisticsThreads / 32 * fixed_point::kWindow;
  KeyStatistics mine = of_no_rows();
#pragma unroll 1
  for (int row = chunk.first + int(threadIdx.x) / 32 * fixed_point::kWindow; row < chunk.end; row += kRows) {
    measure_window<Element, kQkDim, kValueDim>(params, chunk, row, mine);
  }
  return mine;
}

__device__ __forceinline__ KeyStatistics combine(const KeyStatistics& a, const KeyStatistics& b) {
  return {larger(a.max_element, b.max_element), larger(a.max_product, b.max_product), larger(a.max_norm, b.max_norm),
          fminf(a.min_step_product, b.min_step_product)};
}

__device__ __forceinline__ KeyStatistics shuffle_xor(const KeyStatistics& x, int offset) {
  const auto other = [&](float value) { return __shfl_xor_sync(0xffffffff, value, offset); };
  return {other(x.max_element), other(x.max_product), other(x.max_norm), other(x.min_step_product)};
}

__device__ __forceinline__ KeyStatistics combine_warp(KeyStatistics x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) { x = combine(x, shuffle_xor(x, offset)); }
  return x;
}

template <typename Geometry>
__device__ __forceinline__ void measure_chunk(const StatisticsParams<typename Geometry::Element>& params,
                                              bool of_queries, int index) {
  using Element = typename Geometry::Element;
  constexpr int kWarps = kStatisticsThreads / 32;
  __shared__ KeyStatistics of_warp[kWarps];
  Chunk chunk;
  if (!find_chunk(params.call, of_queries, index, chunk)) { return; }

  KeyStatistics all = of_no_rows();
  if (of_queries) {
    all.max_norm = max_query_norm<Element, Geometry::kQkDim>(params, chunk);
  } else {
    all = key_statistics<Element, Geometry::kQkDim, Geometry::kValueDim>(params, chunk);
  }
  all = combine_warp(all);
  if (threadIdx.x % 32 == 0) { of_warp[threadIdx.x / 32] = all; }
  __syncthreads();
  if (threadIdx.x > 0) { return; }
  for (int warp = 1; warp < kWarps; ++warp) { all = combine(all, of_warp[warp]); }
  if (of_queries) {
    params.workspace.query_norms[chunk.place] = all.max_norm;
  } else {
    params.workspace.key_statistics[chunk.place] = all;
    if (chunk.number == 0) {
      params.workspace.needs_order[chunk.sequence * params.call.kv_heads + chunk.head].by_row = 0;
    }
  }
}

// Blocks: the chunks of all heads of Q, then those of K and V.
template <typename Geometry>
__global__ void __launch_bounds__(kStatisticsThreads, 4)
    statistics_kernel(const StatisticsParams<typename Geometry::Element> params) {
  ptx::launch_dependents();  // the preprocess kernel waits for what it reads
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    if (block != int(blockIdx.x)) { __syncthreads(); }  // what the warps left before has been read
    const bool of_queries = block < params.num_query_blocks;
    measure_chunk<Geometry>(params, of_queries, of_queries ? block : block - params.num_query_blocks);
  }
}

// Of this lane's chunk of a KV head, whose first is `first`; nothing where it has none.
__device__ __forceinline__ KeyStatistics chunk_key_statistics(const Workspace& workspace, int64_t first,
                                                              const Sequence& lengths) {
  const int lane = threadIdx.x % 32;
  return lane < fixed_point::num_chunks(lengths.seqlen_k) ? workspace.key_statistics[first + lane] : of_no_rows();
}

}  // namespace dash_attn::backward
