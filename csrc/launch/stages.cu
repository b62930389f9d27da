#include "../backward/convert.h"
#include "../backward/order_free/statistics.h"
#include "../backward/preprocess.h"
#include "../backward/sinks.h"
#include "launch.h"
#include "stages.h"
#include "variant.h"

namespace dash_attn {
namespace {

template <typename Bits>
backward::StridedView<Bits> strided_view(const TensorView& tensor) {
  return {static_cast<Bits*>(tensor.data), tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head};
}

LaunchShape grid_of(const AttentionArguments& a, int blocks, int threads, int shared_bytes) {
  return within_margin(blocks, threads, shared_bytes, a.num_sms, a.sm_margin);
}

backward::SequencesOfCall sequences_of(const BackwardPlan& plan) {
  const BackwardArguments& a = plan.call;
  return {a.sequence(), a.mask, a.batch, a.heads, a.kv_heads, plan.params.pack, plan.params.columns};
}

}  // namespace

void launch_statistics(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  backward::StatisticsParams params;
  params.k = strided_view<const uint16_t>(a.k);
  params.v = strided_view<const uint16_t>(a.v);
  params.is_bf16 = a.dtype == Dtype::kBFloat16;
  params.workspace = plan.params.workspace;
  params.call = sequences_of(plan);
  params.head_dims = a.head_dims;
  params.num_blocks = int(plan.capacity.key_chunks * a.kv_heads);
  const auto kernel =
      a.padded_head_dims().qk <= 64 ? backward::statistics_kernel<64> : backward::statistics_kernel<128>;
  launch("the statistics of order-free accumulation", kernel, params,
         grid_of(a, params.num_blocks, backward::kStatisticsThreads, 0), stream);
}

void launch_preprocess(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  const int tiles = int(plan.capacity.query_tiles * a.heads);
  backward::PreprocessParams params;
  params.out = strided_view<const uint16_t>(a.out);
  params.dout = strided_view<const uint16_t>(a.dout);
  params.is_bf16 = a.dtype == Dtype::kBFloat16;
  params.dq = plan.finishes_dq() ? strided_view<uint16_t>(a.dq) : backward::StridedView<uint16_t>{};
  params.workspace = plan.params.workspace;
  params.call = sequences_of(plan);
  params.head_dims = a.head_dims;
  params.num_blocks = tiles * plan.kernel->preprocess_blocks;
  params.num_dq_semaphores = tiles * backward::dq_parts(a.padded_head_dims().qk);
  params.num_split_semaphores = plan.num_split_semaphores;
  params.num_work_counters = plan.num_work_counters;
  params.softmax_lse = a.softmax_lse;
  params.dsoftmax_lse = a.dsoftmax_lse;
  params.lse_batch_stride = plan.params.lse_batch_stride;
  params.lse_head_stride = plan.params.lse_head_stride;
  params.kept = 1 - a.dropout.p;
  const auto kernel = with_geometry(a, [](auto geometry) {
    using Geometry = decltype(geometry);
    using Tile = backward::PreprocessTileOf<Geometry>;
    static_assert(Geometry::kWide || (Tile::kMayBeNarrow && Tile::kNarrowTiling.key == Geometry::kKey));
    return &backward::preprocess_kernel<Tile>;
  });
  const bool waits = a.has_columns() || plan.is_order_free();  // for what it needs of the kernel before it
  launch("the backward's preprocess kernel", kernel, params,
         grid_of(a, params.num_blocks, backward::kPreprocessThreads, 0), stream,
         {starts_before_previous_ends(waits && plan.starts_early)});
}

void launch_convert(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  backward::ConvertParams params;
  params.dq = strided_view<uint16_t>(a.dq);
  params.is_bf16 = a.dtype == Dtype::kBFloat16;
  params.workspace = plan.params.workspace;
  params.call = sequences_of(plan);
  params.num_blocks = int(plan.capacity.query_tiles * a.heads);
  params.head_dim = a.head_dims.qk;
  params.dq_scale = plan.params.scale_of_sums;
  params.continues = a.carried.dq_continues;
  const auto kernel = with_geometry(a, [](auto geometry) {
    using Geometry = decltype(geometry);
    using OfKernel = backward::Geometry<Geometry::kQkDim, Geometry::kQkDim>;
    static_assert(Geometry::kQuery == OfKernel::kQuery && Geometry::kKey == OfKernel::kKey);
    return &backward::convert_kernel<Geometry::kQkDim>;
  });
  launch("the conversion of dQ", kernel, params, grid_of(a, params.num_blocks, backward::kConvertThreads, 0), stream,
         {starts_before_previous_ends(plan.starts_early)});
}

void launch_sinks(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  backward::SinkParams params;
  params.sinks = a.sinks;
  params.softmax_lse = a.softmax_lse;
  params.lse_batch_stride = plan.params.lse_batch_stride;
  params.lse_head_stride = plan.params.lse_head_stride;
  params.workspace = plan.params.workspace;
  params.call = sequences_of(plan);
  params.dsinks = a.dsinks;
  params.scale = plan.params.dropout.scale;
  params.tile_rows = plan.grid.tiling.query;
  launch("the sums of the sinks' gradient", backward::sink_rows_kernel, params,
         grid_of(a, a.batch * a.heads, backward::kSinkThreads, 0), stream);
  launch("the sinks' gradient", backward::sink_sequences_kernel, params,
         grid_of(a, a.heads, backward::kSinkThreads, 0), stream);
}

}  // namespace dash_attn
