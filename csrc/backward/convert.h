// dQ = scale * accumulator, reordered and rounded. An order-free accumulator holds integers in units of each row's
// scale. This kernel starts while the last CTAs of the main kernel run, on SMs that have none left. A block waits for
// the sum of its own tile.
//
// In each eight columns of a row a lane has two neighbouring ones, where wgmma has put them. Four lanes exchange what
// they have rounded, so that each stores 16 bytes of a row. In the transposed layout a lane has two queries' values in
// each column: matrices of 8 x 8 are transposed first, and then two lanes exchange, for 8 bytes each.
#pragma once

#include "../contract/fixed_point.h"
#include "../contract/tile_grid.h"
#include "dq_layout.h"
#include "order_free/rounding.h"
#include "order_free/scale.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::backward {

constexpr int kConvertThreads = 256;

struct ConvertParams {
  StridedView<uint16_t> dq;
  bool is_bf16;
  Workspace workspace;
  SequencesOfCall call;
  int num_blocks;  // of the whole call, one for each query tile of the workspace; a smaller grid loops over them
  int head_dim;
  float dq_scale;   // factor of the sum
  Range continues;  // the query tiles that earlier calls have added to: CarriedSums
};

// What a warp converts at a time: some quads of each lane, which become words (pairs of columns) of two rows.
template <typename Geometry>
struct ConvertTask {
  using Layout = DqLayout<Geometry>;
  static constexpr bool kTransposed = Layout::kTransposed;
  // If rows of the fragment are queries, a quad is one word of each of two rows. In the transposed layout it is both
  // words of one row.
  static constexpr int kQuads = kTransposed ? 2 : 4, kRows = 2, kWords = kQuads;
  static constexpr int kWarpsOfFragment = Layout::kThreads / 32, kGroups = Layout::kQuads / kQuads;
  static constexpr int kTasks = Layout::kFragments * kWarpsOfFragment * kGroups;  // of a tile
  static constexpr int kWarps = kConvertThreads / 32, kTasksOfWarp = (kTasks + kWarps - 1) / kWarps;
  static_assert(kGroups * kQuads == Layout::kQuads);
  static constexpr int kRowsOfLane =
      kTransposed ? 2 * kQuads : 2;  // before the exchange

  int first;  // this lane's first quad, in units of float4; the others follow at distances of Layout::kThreads

  explicit __device__ __forceinline__ ConvertTask(int task) {
    const int warp = task % kWarpsOfFragment, group = task / kWarpsOfFragment;  // over all fragments
    first = group * kQuads * Layout::kThreads + warp * 32 + threadIdx.x % 32;
  }

  __device__ __forceinline__ int quad(int index) const { return first + index * Layout::kThreads; }
  // The tile row number of row `index` of those.
  __device__ __forceinline__ int row_of_lane(int index) const {
    return kTransposed ? Layout::element(quad(index / 2), index % 2).query : Layout::element(first, 2 * index).query;
  }

  // Replaces sums of `partials` integers each by their values. `scales` are those of the tile's rows.
  __device__ __forceinline__ void to_values(float4 (&sums)[kQuads], const uint8_t* scales, int partials) const {
    float units[kRowsOfLane];
#pragma unroll
    for (int index = 0; index < kRowsOfLane; ++index) { units[index] = unit_of(scales[row_of_lane(index)]); }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float* const x = &sums[quad].x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = sum_of_units(__float_as_uint(x[i]), partials) * units[kTransposed ? 2 * quad + i % 2 : i / 2];
      }
    }
  }

  // Where the words of row `row` are stored after the exchange: a row of the tile and its first column there.
  __device__ __forceinline__ typename Layout::Element place(int row) const {
    const int lane = threadIdx.x % 32, pair = lane % 4;
    if constexpr (kTransposed) {
      const auto [query, column] = Layout::element(quad(row), 0);
      return {query - 2 * pair + lane / 4, column - lane / 4 + pair % 2 * 8 + pair / 2 * 4};
    } else {
      const auto [query, column] = Layout::element(first, 2 * row);
      return {query, column - 2 * pair + pair * 8};
    }
  }
};

// Transposes an 8 x 8 matrix of 16-bit values, each row of which four lanes hold.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  const int lane = threadIdx.x % 32, source = lane % 4 * 8 + lane / 8;
  const uint32_t low = __shfl_sync(0xffffffff, pair, source), high = __shfl_sync(0xffffffff, pair, source + 4);
  return lane / 4 % 2 == 0 ? (low & 0xffff) | high << 16 : low >> 16 | (high & 0xffff0000);
}

// Transposes the kWords words of each of kWords neighbouring lanes: lane l then has word l of each lane, in the order
// of the lanes.
template <int kWords>
__device__ __forceinline__ void exchange_words(uint32_t (&words)[kWords]) {
#pragma unroll
  for (int offset = 1; offset < kWords; offset *= 2) {
    const bool keeps_second = threadIdx.x & offset;
#pragma unroll
    for (int first = 0; first < kWords; ++first) {
      if (first & offset) { continue; }
      const int second = first + offset;
      const uint32_t other = __shfl_xor_sync(0xffffffff, keeps_second ? words[first] : words[second], offset);
      words[first] = keeps_second ? other : words[first];
      words[second] = keeps_second ? words[second] : other;
    }
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(void* row, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
    __stcs(static_cast<uint4*>(row), make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    __stcs(static_cast<uint2*>(row), make_uint2(words[0], words[1]));
  }
}

template <typename Geometry>
__device__ __forceinline__ void convert_block(const ConvertParams& params, int block) {
  using Task = ConvertTask<Geometry>;
  constexpr int kQuads = Task::kQuads, kRows = Task::kRows, kWords = Task::kWords;
  TileOwner owner;
  if (!find_owner<Geometry::kQuery>(params.call, block, owner)) { return; }

  // The accumulator is unwritten where the queries see no key, neither in this call nor, with carried sums, in earlier
  // ones.
  const int adds = adds_to_query_tile(params.call, {Geometry::kQuery, Geometry::kKey, 1}, owner);
  const bool live = adds > 0 || params.continues.contains(owner.query_tile);
  if (adds > 0 && threadIdx.x < Geometry::kDqParts) {
    const int* const semaphore = params.workspace.dq_semaphores + int64_t(block) * Geometry::kDqParts + threadIdx.x;
    while (ptx::load_acquire(semaphore) != adds) { __nanosleep(100); }
  }
  __syncthreads();
  const bool integers = !Geometry::kWide && params.workspace.is_order_free() && live &&
                        !needs_order(params.workspace, params.call, owner);
  const float4* const source =
      reinterpret_cast<const float4*>(params.workspace.dq_accumulator + int64_t(block) * Geometry::kDqTileFloats);

  float4 sums[Task::kTasksOfWarp][kQuads];
#pragma unroll
  for (int i = 0; i < Task::kTasksOfWarp; ++i) {
    const int number = i * Task::kWarps + int(threadIdx.x) / 32;
    const bool loads = live && number < Task::kTasks;
    const Task task(number);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      // Through L1, which holds no older contents: the acquire came before, and nobody reads a sum earlier.
      sums[i][quad] = loads ? __ldcs(source + task.quad(quad)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

#pragma unroll
  for (int i = 0; i < Task::kTasksOfWarp; ++i) {
    const int number = i * Task::kWarps + int(threadIdx.x) / 32;
    if (number >= Task::kTasks) { break; }
    const Task task(number);
    if (integers) { task.to_values(sums[i], params.workspace.scales + int64_t(block) * Geometry::kQuery, adds); }
    uint32_t low[kQuads], high[kQuads], words[kRows][kWords];
    with_element(params.is_bf16, [&](auto element) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4 x = sums[i][quad];
        low[quad] = pack<decltype(element)>(x.x * params.dq_scale, x.y * params.dq_scale);
        high[quad] = pack<decltype(element)>(x.z * params.dq_scale, x.w * params.dq_scale);
      }
    });
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if constexpr (Task::kTransposed) {
        words[quad][0] = transpose_matrix(low[quad]);
        words[quad][1] = transpose_matrix(high[quad]);
      } else {
        words[0][quad] = low[quad];
        words[1][quad] = high[quad];
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      exchange_words(words[row]);
      const auto [query, column] = task.place(row);
      const int position = owner.row(Geometry::kQuery) + query;
      if (position < owner.lengths.seqlen_q && column < params.head_dim) {
        store_words(params.dq.row(owner.batch, owner.first_row + position, owner.head) + column, words[row]);
      }
    }
  }
}

// As many as have registers for the sums that a block loads at once.
template <int kQkDim>
constexpr int kConvertBlocksOfSm = kQkDim == 64 || kQkDim == 128 ? 4 : 2;

// Serves all head dims of V, because the tile of Q and K does not depend on them.
template <int kQkDim>
__global__ void __launch_bounds__(kConvertThreads, kConvertBlocksOfSm<kQkDim>)
    convert_kernel(const ConvertParams params) {
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    convert_block<Geometry<kQkDim, kQkDim>>(params, block);
  }
  ptx::wait_for_previous_kernel();  // so that this kernel ends after the main kernel
}

}  // namespace dash_attn::backward
