// Runs before an order-free backward: norms, largest elements and differences of the rows of K and V of each head, from
// which contract/fixed_point.h derives fixed-point scales (docs/order_free.md).
//
// A block takes a chunk of rows of one head and writes a few numbers. Whoever needs a head's statistics combines its
// chunks in a fixed order. So they are the same for every number of blocks and all neighbours, without atomics.
#pragma once

#include "../../contract/fixed_point.h"
#include "../../device/fragment.h"
#include "../params.h"
#include "../rows.h"

namespace dash_attn::backward {

constexpr int kStatisticsThreads = 256;

struct StatisticsParams {
  StridedView<const uint16_t> k, v;
  bool is_bf16;
  Workspace workspace;
  SequencesOfCall call;
  HeadDims head_dims;
  int num_blocks;  // of the whole call, or more; a smaller grid loops over them
};

// Eight columns, or zeros.
__device__ __forceinline__ uint4 load8_if(bool exists, const uint16_t* elements) {
  return exists ? *reinterpret_cast<const uint4*>(elements) : make_uint4(0, 0, 0, 0);
}

// The rows of one head.
struct HeadRows {
  const uint16_t* first;
  int64_t stride;
  int columns;

  __device__ __forceinline__ HeadRows(const StridedView<const uint16_t>& tensor, int batch, int head, int columns)
      : first(tensor.row(batch, 0, head)), stride(tensor.stride_seqlen), columns(columns) {}

  __device__ __forceinline__ const uint16_t* row(int number) const { return first + number * stride; }
  // Of `rows` consecutive rows, the number that have a `column`: all or none.
  __device__ __forceinline__ int rows_with_column(int column, int rows) const { return column < columns ? rows : 0; }
};

// The threads that share a row: half as many as eight columns each would need, because the shuffles that reduce a row
// cost more than its elements.
template <int kHeadDim>
constexpr int kMeasuringThreads = kRowThreads<kHeadDim> / 2;

// A thread's eight columns of each half of a padded row, with zeros where there are none.
template <int kThreadsPerRow>
struct RowPart {
  uint4 halves[2];

  static __device__ __forceinline__ int first_column() { return threadIdx.x % kThreadsPerRow * 8; }

  // For consecutive rows: how many of them a thread has columns of, in each half.
  struct Limits {
    int rows[2];

    __device__ __forceinline__ Limits(const HeadRows& of, int count)
        : rows{of.rows_with_column(first_column(), count),
               of.rows_with_column(first_column() + kThreadsPerRow * 8, count)} {}
  };

  // Loads row `number` of those. `row` points to this thread's first column of it.
  __device__ __forceinline__ void load(const uint16_t* row, int number, const Limits& limits) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      halves[half] = load8_if(number < limits.rows[half], row + half * kThreadsPerRow * 8);
    }
  }
};

// Compensates the rounding errors of a norm computed in fp32 and of the products of a row: 2^-10 is 60 times their
// bound.
constexpr float kNormSlack = 1.f + 1.f / 1024;

// The largest magnitudes of the even and of the odd elements of eight. A maximum loses NaN, but the squares keep it.
template <typename Element>
__device__ __forceinline__ uint32_t largest8(uint4 x) {
  return larger_of_pairs<Element>(larger_of_pairs<Element>(x.x, x.y), larger_of_pairs<Element>(x.z, x.w));
}
template <typename Element>
__device__ __forceinline__ float largest_of_pair(uint32_t packed) {
  const float2 pair = unpack<Element>(packed);
  return fmaxf(fabsf(pair.x), fabsf(pair.y));
}

template <typename Element, int kThreads>
__device__ __forceinline__ float largest_of(const RowPart<kThreads>& part) {
  return largest_of_pair<Element>(
      larger_of_pairs<Element>(largest8<Element>(part.halves[0]), largest8<Element>(part.halves[1])));
}

// The sum of the magnitudes of the difference of two neighbouring rows of K.
template <typename Element, int kThreads>
__device__ __forceinline__ float step_of_keys(const RowPart<kThreads> (&rows)[2]) {
  float sum = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Floats8<Element> x(rows[0].halves[half]), y(rows[1].halves[half]);
#pragma unroll
    for (int i = 0; i < 8; ++i) { sum += fabsf(x[i] - y[i]); }
  }
  return sum;
}

// The sums of squares of two neighbouring rows of V and of their difference.
struct PairOfValues {
  float squares[2], step;
};
template <typename Element, int kThreads>
__device__ __forceinline__ PairOfValues measure_values(const RowPart<kThreads> (&rows)[2]) {
  PairOfValues sums{};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Floats8<Element> x(rows[0].halves[half]), y(rows[1].halves[half]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums.squares[0] = fmaf(x[i], x[i], sums.squares[0]);
      sums.squares[1] = fmaf(y[i], y[i], sums.squares[1]);
      const float step = x[i] - y[i];
      sums.step = fmaf(step, step, sums.step);
    }
  }
  return sums;
}

// Combines kValues values of each of the kThreads threads of a row: thread t of the row gets the result for value t %
// kValues. Called by whole warps.
template <int kThreads, int kValues, typename Operation>
__device__ __forceinline__ float across_row(float (&values)[kValues], Operation operation) {
  static_assert((kValues & (kValues - 1)) == 0 && kValues <= kThreads);
#pragma unroll
  for (int offset = 1; offset < kThreads; offset *= 2) {
    if (offset >= kValues) {
      values[0] = operation(values[0], __shfl_xor_sync(0xffffffff, values[0], offset));
      continue;
    }
    const bool keeps_odd = threadIdx.x & offset;
#pragma unroll
    for (int i = 0; i < kValues / 2 / offset; ++i) {
      const float even = values[2 * i], odd = values[2 * i + 1];
      const float other = __shfl_xor_sync(0xffffffff, keeps_odd ? even : odd, offset);
      values[i] = operation(keeps_odd ? odd : even, other);
    }
  }
  return values[0];
}
template <int kThreads, int kValues>
__device__ __forceinline__ float sum_across_row(float (&values)[kValues]) {
  return across_row<kThreads>(values, [](float a, float b) { return a + b; });
}

// An upper bound of the norm of a row, from its sum of squares. If that has left fp32's range, the bound follows from
// the row's largest element, for which the row is read again.
__device__ __forceinline__ float norm_bound(float squares, const uint16_t* row, int columns, bool is_bf16) {
  constexpr float kFewestDigits = 1.f / (1ull << 50) / (1ull << 50);
  constexpr float kNearOverflow = 1.f * (1ull << 60) * (1ull << 60);
  const bool in_range = (squares >= kFewestDigits && squares <= kNearOverflow) || squares != squares;
  float norm = ptx::sqrt_approx(squares);
  if (!in_range) {
    with_element(is_bf16, [&](auto element) {
      using Element = decltype(element);
      uint32_t largest = 0;
#pragma unroll 1
      for (int column = 0; column < columns; column += 8) {
        const uint4 elements = *reinterpret_cast<const uint4*>(row + column);
        largest = larger_of_pairs<Element>(largest, largest8<Element>(elements));
      }
      norm = largest_of_pair<Element>(largest) * ptx::sqrt_approx(float(columns));
    });
  }
  return norm * kNormSlack;
}

// The magnitude as an integer. Integers keep the order of magnitudes, and NaN is larger than all.
__device__ __forceinline__ uint32_t magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffff; }

__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(magnitude_bits(a), magnitude_bits(b)));
}

__device__ __forceinline__ float largest_of_warp(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffff, magnitude_bits(value)));
}

// The chunk of rows of a KV head that a block works on, and where its result is stored.
struct Chunk {
  int batch, kv_head, first, end;  // rows of the tensor
  int64_t place;
  int number;    // of the head's chunks
  int sequence;  // in the caller's order
};

// The place of a head's first chunk. The statistics of its chunks are consecutive, as are those of a sequence's heads.
__device__ __forceinline__ int64_t first_chunk(const SequencesOfCall& call, const TileOwner& owner) {
  return int64_t(owner.key_chunks_before) * call.kv_heads +
         int64_t(owner.head / call.group_size()) * fixed_point::num_chunks(owner.lengths.seqlen_k);
}

// The sequence of a pack that chunk number `chunk` over all sequences belongs to.
__device__ __forceinline__ const PackedSequence& sequence_of_chunk(const SequencesOfCall& call, int chunk) {
  const PackedSequence* const sequences = call.pack.sequences;
  int low = 0, high = call.batch;  // finds the last sequence whose first chunk is at or before `chunk`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sequences[middle].first_key_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return sequences[low];
}

// Finds chunk number `index`; returns false if there are fewer chunks.
__device__ __forceinline__ bool find_chunk(const SequencesOfCall& call, int index, Chunk& chunk) {
  int seqlen = call.sequence.seqlen_k, before, first_row = 0;
  if (call.pack.is_pack()) {
    if (index >= call.pack.totals->key_chunks * call.kv_heads) { return false; }
    const PackedSequence& sequence = sequence_of_chunk(call, index / call.kv_heads);
    seqlen = sequence.lengths.seqlen_k;
    before = sequence.first_key_chunk;
    first_row = sequence.end_k - seqlen;
    chunk.batch = 0;
    chunk.sequence = sequence.number;
  } else {
    const int chunks = fixed_point::num_chunks(seqlen);
    chunk.sequence = chunk.batch = index / (chunks * call.kv_heads);
    before = chunk.batch * chunks;
  }
  const int chunks = fixed_point::num_chunks(seqlen), rows = fixed_point::chunk_rows(seqlen);
  const int within = index - before * call.kv_heads;
  chunk.kv_head = within / chunks;
  chunk.number = within % chunks;
  chunk.first = first_row + chunk.number * rows;
  chunk.end = first_row + min_int(seqlen, (chunk.number + 1) * rows);
  chunk.place = index;
  return true;
}

// A thread's part of the rows of K and V that a warp measures at once: a whole window, or two neighbouring ones, each
// by half of the warp. A thread handles two neighbouring rows at a time.
template <int kHeadDim>
struct KeyWindows {
  static constexpr int kThreadsPerRow = kMeasuringThreads<kHeadDim>;  // also of V
  static constexpr int kRows = 2 * 32 / kThreadsPerRow;
  static constexpr int kWindows = kRows / fixed_point::kWindow;
  static_assert(kWindows * fixed_point::kWindow == kRows);
  static constexpr int kLanesOfWindow = 32 / kWindows;
  using Part = RowPart<kThreadsPerRow>;
  Part k[2], v[2];

  static __device__ __forceinline__ int first_of_thread(int first_row) {
    return first_row + threadIdx.x % 32 / kThreadsPerRow * 2;
  }

  __device__ __forceinline__ void load(const HeadRows& keys, const HeadRows& values, int first_row, int end) {
    const int first = first_of_thread(first_row);
    const uint16_t *key = keys.row(first) + Part::first_column(), *value = values.row(first) + Part::first_column();
    const typename Part::Limits of_keys(keys, end - first), of_values(values, end - first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      k[i].load(key + i * keys.stride, i, of_keys);
      v[i].load(value + i * values.stride, i, of_values);
    }
  }
};

// Adds the windows from `first_row` on to `mine`. Called by whole warps.
template <int kHeadDim>
__device__ __forceinline__ void measure_windows(const HeadRows& keys, const HeadRows& values, bool is_bf16,
                                                int first_row, int end, KeyStatistics& mine) {
  using Rows = KeyWindows<kHeadDim>;
  constexpr int kThreadsPerRow = Rows::kThreadsPerRow;
  Rows windows;
  windows.load(keys, values, first_row, end);
  const int thread = threadIdx.x % kThreadsPerRow, first_of_thread = Rows::first_of_thread(first_row);
  PairOfValues v;
  float largest[2], key_step;
  with_element(is_bf16, [&](auto element) {
    using Element = decltype(element);
    v = measure_values<Element>(windows.v);
#pragma unroll
    for (int i = 0; i < 2; ++i) { largest[i] = largest_of<Element>(windows.k[i]); }
    key_step = step_of_keys<Element>(windows.k);
  });
  const bool are_two = first_of_thread + 1 < end;
  float of_pair[1] = {are_two ? v.step : 0.f};
  // Each thread gets one key: the squares of its row of V and the largest element of its row of K.
  const float of_value = sum_across_row<kThreadsPerRow>(v.squares);
  const float of_key = across_row<kThreadsPerRow>(largest, [](float a, float b) { return fmaxf(a, b); });
  const int row = first_of_thread + thread % 2;
  mine.max_element = larger(mine.max_element, of_key);
  if (row < end) {
    const float norm = norm_bound(of_value, values.row(row), values.columns, is_bf16);
    mine.max_product = larger(mine.max_product, norm * of_key);
  }
  const float value_step = ptx::sqrt_approx(sum_across_row<kThreadsPerRow>(of_pair));
  // For the thread's window: the steps of K, then those of V, with each pair counted once.
  float steps[2] = {are_two ? key_step : 0.f, thread == 0 ? value_step : 0.f};
  const int window_row = first_row + threadIdx.x % 32 / Rows::kLanesOfWindow * fixed_point::kWindow;
  const int pairs = min_int(end - window_row, fixed_point::kWindow) / 2;
  const float mean = __fdividef(sum_across_row<Rows::kLanesOfWindow>(steps), pairs);
  const float product = mean * __shfl_xor_sync(0xffffffff, mean, 1);
  if (pairs > 0) { mine.min_step_product = fminf(mine.min_step_product, product); }
}

template <int kHeadDim>
__device__ __forceinline__ KeyStatistics key_statistics(const StatisticsParams& params, const Chunk& chunk) {
  constexpr int kRowsOfWarp = KeyWindows<kHeadDim>::kRows;
  const HeadRows keys(params.k, chunk.batch, chunk.kv_head, params.head_dims.qk);
  const HeadRows values(params.v, chunk.batch, chunk.kv_head, params.head_dims.v);
  KeyStatistics mine = of_no_rows();
#pragma unroll 1
  for (int row = chunk.first + int(threadIdx.x) / 32 * kRowsOfWarp; row < chunk.end;
       row += kStatisticsThreads / 32 * kRowsOfWarp) {
    measure_windows<kHeadDim>(keys, values, params.is_bf16, row, chunk.end, mine);
  }
  return mine;
}

// Combines the statistics of a warp's lanes, for all of them. In this order NaN is larger than infinity and so never
// the minimum.
__device__ __forceinline__ KeyStatistics combine_warp(const KeyStatistics& x) {
  return {largest_of_warp(x.max_element), largest_of_warp(x.max_product),
          __uint_as_float(__reduce_min_sync(0xffffffff, magnitude_bits(x.min_step_product)))};
}

template <int kHeadDim>
__device__ __forceinline__ void measure_chunk(const StatisticsParams& params, int index) {
  constexpr int kWarps = kStatisticsThreads / 32;
  __shared__ KeyStatistics of_warp[kWarps];
  Chunk chunk;
  if (!find_chunk(params.call, index, chunk)) { return; }

  KeyStatistics all = combine_warp(key_statistics<kHeadDim>(params, chunk));
  if (threadIdx.x % 32 == 0) { of_warp[threadIdx.x / 32] = all; }
  __syncthreads();
  if (threadIdx.x >= 32) { return; }
  all = combine_warp(threadIdx.x < kWarps ? of_warp[threadIdx.x] : of_no_rows());
  if (threadIdx.x > 0) { return; }
  params.workspace.key_statistics[chunk.place] = all;
  if (chunk.number == 0) { params.workspace.needs_order[chunk.sequence * params.call.kv_heads + chunk.kv_head] = 0; }
}

// As many as have registers for the rows that they measure at once. While some wait for their rows, others compute.
constexpr int kStatisticsBlocksOfSm = 4;

// For heads of up to kHeadDim columns.
template <int kHeadDim>
__global__ void __launch_bounds__(kStatisticsThreads, kStatisticsBlocksOfSm)
    statistics_kernel(const StatisticsParams params) {
  ptx::launch_dependents();  // the preprocess kernel itself waits for what it reads
  if (blockIdx.x == 0 && threadIdx.x == 0) { *params.workspace.any_needs_order = *params.workspace.any_marks = 0; }
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    if (block != int(blockIdx.x)) { __syncthreads(); }  // the shared results of the previous block have been read
    measure_chunk<kHeadDim>(params, block);
  }
}

// The statistics of this lane's chunk of a KV head whose first chunk is `first`, or of no rows if the lane has none.
__device__ __forceinline__ KeyStatistics chunk_key_statistics(const Workspace& workspace, int64_t first,
                                                              const Sequence& lengths) {
  const int lane = threadIdx.x % 32;
  return lane < fixed_point::num_chunks(lengths.seqlen_k) ? workspace.key_statistics[first + lane] : of_no_rows();
}

}  // namespace dash_attn::backward
