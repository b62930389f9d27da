// Host side of one variant of the backward: descriptors, parameters and the three launches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../backward/convert.h"
#include "../backward/kernel.h"
#include "../backward/preprocess.h"
#include "../backward/statistics.h"
#include "../schedule/sections.h"
#include "backward.h"
#include "check.h"
#include "launch.h"
#include "tensor_map.h"
#include "workspace.h"

namespace dash_attn {

template <typename Element>
backward::StridedView<Element> strided_view(const TensorView& tensor) {
  return {static_cast<Element*>(tensor.data), tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head};
}

template <typename Config>
Problem make_problem(const BackwardArguments& a) {
  constexpr int kSectionToBeDecided = 1;
  Problem problem =
      make_problem(a.batch, a.kv_heads, a.heads / a.kv_heads, a.seqlen_q, a.seqlen_k, Config::kQuery, Config::kKey,
                   Config::kClusterSize, Config::kCausal, kSectionToBeDecided, head_splits(a, Config::kTile));
  problem.head_section = head_section(Config::kPolicy, problem, Config::kHeadDim);
  return problem;
}

template <typename Config>
void launch_statistics(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream) {
  using Element = typename Config::Element;
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
  const unsigned blocks = unsigned(a.batch) * (a.heads + a.kv_heads) * params.chunks_per_head;
  backward::statistics_kernel<Element, Config::kHeadDim><<<blocks, backward::kStatisticsThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launching the statistics of order-free accumulation");
}

template <typename Config>
void launch_preprocess(const BackwardArguments& a, const Problem& problem, const backward::Workspace& workspace,
                       cudaStream_t stream) {
  using Element = typename Config::Element;
  backward::PreprocessParams<Element> params;
  params.out = strided_view<const Element>(a.out);
  params.dout = strided_view<const Element>(a.dout);
  params.workspace = workspace;
  params.heads = a.heads;
  params.seqlen_q = a.seqlen_q;
  params.padded_seqlen_q = problem.query_tiles * Config::kQuery;
  params.head_dim = a.head_dim;
  params.blocks_per_head = ceil_div(params.padded_seqlen_q, backward::kPreprocessRows<Config::kHeadDim>);
  params.num_turns = a.batch * a.heads * problem.query_tiles;
  params.num_carry_turns = int(num_carry_turns(a, Config::kTile));
  params.problem = problem;
  params.softmax_scale = a.softmax_scale;
  const unsigned blocks = unsigned(a.batch) * a.heads * params.blocks_per_head;
  backward::preprocess_kernel<Element, Config::kHeadDim, Config::kAccumulation>
      <<<blocks, backward::kPreprocessThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launching the backward's preprocess kernel");
}

// Programmatic dependent launch: see ptx::launch_dependents and ptx::wait_for_previous_kernel.
inline cudaLaunchAttribute starts_before_previous_ends() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <typename Config>
void launch_main(const BackwardArguments& a, const Problem& problem, const backward::Workspace& workspace,
                 cudaStream_t stream) {
  const auto query_map = [&](const TensorView& t) {
    return make_tensor_map(t, a.dtype, a.batch, a.seqlen_q, a.heads, a.head_dim, Config::kQuery);
  };
  const auto key_map = [&](const TensorView& t, int rows) {
    return make_tensor_map(t, a.dtype, a.batch, a.seqlen_k, a.kv_heads, a.head_dim, rows);
  };
  backward::KernelParams params;
  params.q = query_map(a.q);
  params.dout = query_map(a.dout);
  params.k = key_map(a.k, Config::kKey);
  params.v = key_map(a.v, Config::kKey);
  params.dk = key_map(a.dk, kWarpgroupRows);
  params.dv = key_map(a.dv, kWarpgroupRows);
  params.softmax_lse = a.softmax_lse;
  params.problem = problem;
  params.workspace = workspace;
  params.num_claims = int(num_claims<Config::kPolicy>(problem));
  params.softmax_scale = a.softmax_scale;
  params.softmax_scale_log2 = float(a.softmax_scale * M_LOG2E);

  const int clusters = min_int(params.num_claims, a.num_sms / Config::kClusterSize);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kClusterSize, 1, 1};
  launch("the backward kernel", backward::backward_kernel<Config>, params,
         {unsigned(clusters * Config::kClusterSize), Config::kThreads, sizeof(backward::SharedStorage<Config>)}, stream,
         {starts_before_previous_ends(), cluster});
}

template <typename Config>
void launch_convert(const BackwardArguments& a, const Problem& problem, const backward::Workspace& workspace,
                    cudaStream_t stream) {
  backward::ConvertParams<typename Config::Element> params;
  params.dq = strided_view<typename Config::Element>(a.dq);
  params.workspace = workspace;
  params.problem = problem;
  params.heads = a.heads;
  params.head_dim = a.head_dim;
  params.softmax_scale = a.softmax_scale;
  const unsigned blocks = unsigned(a.batch) * a.heads * problem.query_tiles;
  launch("the conversion of dQ", backward::convert_kernel<Config>, params,
         {blocks, backward::kConvertThreads, backward::ConvertTile<Config>::kBytes}, stream,
         {starts_before_previous_ends()});
}

// What the kernels count in 32 and 16 bits, and what a cluster needs. Before anything is launched.
template <typename Config>
void check_launchable(const BackwardArguments& a, const Problem& problem) {
  const int64_t heads = int64_t(a.batch) * a.heads;
  const int64_t rows = ceil_div(problem.query_tiles * Config::kQuery, backward::kPreprocessRows<Config::kHeadDim>);
  if (heads * std::max<int64_t>(rows, problem.query_tiles) > INT32_MAX ||
      num_claims<Config::kPolicy>(problem) > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(std::max(a.seqlen_q, a.seqlen_k)) +
                             " makes more than 2^31 tiles");
  }
  if (a.num_sms < Config::kClusterSize) {
    throw std::runtime_error("dash_attn: sm_margin leaves " + std::to_string(a.num_sms) + " SM, schedule " +
                             kPolicyNames[static_cast<int>(Config::kPolicy)] + " runs clusters of " +
                             std::to_string(Config::kClusterSize) + ": leave at least as many");
  }
}

// One call of the backward. Explicitly instantiated, a variant a line, by the translation units that setup.py writes.
template <typename Config>
void launch_backward(const BackwardArguments& a, cudaStream_t stream) {
  const Problem problem = make_problem<Config>(a);
  check_launchable<Config>(a, problem);
  const backward::Workspace workspace = plan_workspace(a.workspace, Config::kTile, a).arrays;
  if constexpr (Config::kOrderFree) { launch_statistics<Config>(a, workspace, stream); }
  launch_preprocess<Config>(a, problem, workspace, stream);
  launch_main<Config>(a, problem, workspace, stream);
  launch_convert<Config>(a, problem, workspace, stream);
}

}  // namespace dash_attn
