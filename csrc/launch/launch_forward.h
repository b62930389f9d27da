// Host side of one variant of the forward: descriptors, the work, the launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../forward/kernel.h"
#include "arguments.h"
#include "forward_work.h"
#include "launch.h"
#include "scores.h"
#include "stages.h"
#include "tensor_map.h"

namespace dash_attn {

// One call of the forward. Explicitly instantiated, a variant a line, by the translation units that setup.py writes.
template <typename Variant>
void launch_forward(const ForwardArguments& a, cudaStream_t stream) {
  forward::KernelParams params;
  params.scheduler = make_forward_scheduler(a);
  const ForwardWorkspace workspace = plan_workspace(a.workspace, a, params.scheduler);
  const auto query_map = [&](const TensorView& t, int head_dim) {
    return make_tensor_map(t, a.dtype, a.query_rows(), a.heads, head_dim,
                           {Variant::Swizzle::kColumns, 1 << params.scheduler.group_shift,
                            kWarpgroupRows >> params.scheduler.group_shift});
  };
  const auto key_map = [&](const TensorView& t, int head_dim) {
    return make_tensor_map(t, a.dtype, a.key_rows(), a.kv_heads, head_dim,
                           {Variant::Swizzle::kColumns, 1, Variant::kKey});
  };
  params.q = query_map(a.q, a.head_dims.qk);
  params.out = query_map(a.out, a.head_dims.v);
  params.k = key_map(a.k, a.head_dims.qk);
  params.v = key_map(a.v, a.head_dims.v);
  params.softmax_lse = a.softmax_lse;
  params.lse_head_stride = a.seqlen_q;
  params.window = a.mask.window;
  params.pack = workspace.pack.view();
  params.tiles_taken = workspace.tiles_taken;
  params.score = make_score_params(a);
  params.sinks = a.sinks;
  params.dropout = make_bits_view(a);

  const unsigned ctas = std::min(params.scheduler.num_tiles, a.num_sms);
  if (a.is_pack()) {
    launch_forward_plan(a, workspace, stream);
  } else if (params.tiles_taken) {
    check_cuda(cudaMemsetAsync(params.tiles_taken, 0, sizeof(int), stream), "clearing the count of tiles");
  }
  launch("the forward kernel", forward::forward_kernel<Variant>, params,
         {ctas, Variant::kThreads, sizeof(forward::SharedStorage<Variant>)}, stream);
}

}  // namespace dash_attn
