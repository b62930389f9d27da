#include "../backward/convert.h"
#include "../backward/order_free/statistics.h"
#include "../backward/preprocess.h"
#include "launch.h"
#include "stages.h"
#include "variant.h"
#include "workspace.h"

namespace dash_attn {
namespace {

template <typename Element>
backward::StridedView<Element> strided_view(const TensorView& tensor) {
  return {static_cast<Element*>(tensor.data), tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head};
}

bool is_order_free(const BackwardArguments& a) {
  return accumulation(static_cast<Policy>(a.schedule)) == Accumulation::kOrderFree;
}

// Where SMs are to be left to others, a block has an SM to itself, and there are no more blocks than SMs to use.
LaunchShape grid_of(const AttentionArguments& a, int blocks, int threads, int shared_bytes) {
  constexpr int kAloneOnSm = kSharedMemoryLimit / 2 + 1024;
  if (a.sm_margin == 0) { return {unsigned(blocks), threads, shared_bytes}; }
  return {unsigned(min_int(blocks, a.num_sms)), threads, max_int(shared_bytes, kAloneOnSm)};
}

}  // namespace

void launch_statistics(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream) {
  with_geometry(a, [&](auto geometry) {
    using Geometry = decltype(geometry);
    using Element = typename Geometry::Element;
    backward::StatisticsParams<Element> params;
    params.q = strided_view<const Element>(a.q);
    params.k = strided_view<const Element>(a.k);
    params.v = strided_view<const Element>(a.v);
    params.workspace = workspace;
    params.batch = a.batch;
    params.heads = a.heads;
    params.kv_heads = a.kv_heads;
    params.seqlen_q = a.seqlen_q;
    params.seqlen_k = a.seqlen_k;
    params.head_dim = a.head_dim;
    params.chunks_per_head = max_int(backward::num_chunks(a.seqlen_q), backward::num_chunks(a.seqlen_k));
    params.num_blocks = a.batch * (a.heads + a.kv_heads) * params.chunks_per_head;
    launch("the statistics of order-free accumulation", backward::statistics_kernel<Element, Geometry::kHeadDim>,
           params, grid_of(a, params.num_blocks, backward::kStatisticsThreads, 0), stream);
  });
}

void launch_preprocess(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream) {
  with_geometry(a, [&](auto geometry) {
    using Geometry = decltype(geometry);
    using Element = typename Geometry::Element;
    const TileGrid grid = backward_grid(a);
    backward::PreprocessParams<Element> params;
    params.out = strided_view<const Element>(a.out);
    params.dout = strided_view<const Element>(a.dout);
    params.workspace = workspace;
    params.heads = a.heads;
    params.seqlen_q = a.seqlen_q;
    params.padded_seqlen_q = grid.query_tiles() * Geometry::kQuery;
    params.head_dim = a.head_dim;
    params.blocks_per_head = ceil_div(params.padded_seqlen_q, backward::kPreprocessRows<Geometry::kHeadDim>);
    params.num_blocks = a.batch * a.heads * params.blocks_per_head;
    params.num_dq_semaphores = a.batch * a.heads * grid.query_tiles();
    params.num_split_semaphores = int(num_split_semaphores(a));
    params.clear_dq = accumulation(static_cast<Policy>(a.schedule)) != Accumulation::kOrdered;
    params.scale = {grid.mask, a.group_size(), a.head_dim, a.softmax_scale};
    const auto kernel = is_order_free(a) ? backward::preprocess_kernel<Element, Geometry::kHeadDim, true>
                                         : backward::preprocess_kernel<Element, Geometry::kHeadDim, false>;
    launch("the backward's preprocess kernel", kernel, params,
           grid_of(a, params.num_blocks, backward::kPreprocessThreads, 0), stream,
           {starts_before_previous_ends(is_order_free(a) && a.sm_margin == 0)});
  });
}

void launch_convert(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream) {
  with_geometry(a, [&](auto geometry) {
    using Geometry = decltype(geometry);
    backward::ConvertParams<typename Geometry::Element> params;
    params.dq = strided_view<typename Geometry::Element>(a.dq);
    params.workspace = workspace;
    const TileGrid grid = backward_grid(a);
    params.mask = grid.mask;
    params.query_tiles = grid.query_tiles();
    params.num_blocks = a.batch * a.heads * params.query_tiles;
    params.heads = a.heads;
    params.group_size = a.group_size();
    params.head_dim = a.head_dim;
    params.softmax_scale = a.softmax_scale;
    const auto kernel =
        is_order_free(a) ? backward::convert_kernel<Geometry, true> : backward::convert_kernel<Geometry, false>;
    launch("the conversion of dQ", kernel, params,
           grid_of(a, params.num_blocks, backward::kConvertThreads, backward::ConvertTile<Geometry>::kBytes), stream,
           {starts_before_previous_ends(a.sm_margin == 0)});
  });
}

}  // namespace dash_attn
