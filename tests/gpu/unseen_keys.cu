// The backward under a mask of which the last keys are seen by no query: tests/gpu/test_unseen_keys.py.
#include "launch/launch_backward.h"
#include "launch/variant.h"

namespace {

struct TopLeft {
  static constexpr dash_attn::MaskKind kKind = dash_attn::MaskKind::kTopLeft;
};

// Of contiguous (batch 1, seqlen, heads, head_dim) bf16 tensors: as q, k, v, out, dout, dq, dk, dv.
dash_attn::BackwardArguments arguments(void* const* tensors, float* softmax_lse, void* workspace, int seqlen_q,
                                       int seqlen_k, int heads, int head_dim, float softmax_scale, int policy,
                                       int num_sms) {
  const auto view = [&](int i, int seqlen) {
    return dash_attn::TensorView{tensors[i], int64_t(seqlen) * heads * head_dim, int64_t(heads) * head_dim, head_dim};
  };
  dash_attn::BackwardArguments a{};
  a.q = view(0, seqlen_q);
  a.k = view(1, seqlen_k);
  a.v = view(2, seqlen_k);
  a.out = view(3, seqlen_q);
  a.dout = view(4, seqlen_q);
  a.dq = view(5, seqlen_q);
  a.dk = view(6, seqlen_k);
  a.dv = view(7, seqlen_k);
  a.softmax_lse = softmax_lse;
  a.workspace = workspace;
  a.dtype = dash_attn::Dtype::kBFloat16;
  a.batch = 1;
  a.seqlen_q = seqlen_q;
  a.seqlen_k = seqlen_k;
  a.heads = a.kv_heads = heads;
  a.head_dim = head_dim;
  a.softmax_scale = softmax_scale;
  a.mask = dash_attn::MaskKind::kTopLeft;
  a.num_sms = num_sms;
  a.schedule = policy;
  return a;
}

}  // namespace

extern "C" size_t workspace_bytes(int seqlen_q, int seqlen_k, int heads, int head_dim, int policy) {
  void* const none[8] = {};
  return dash_attn::plan_workspace(
             nullptr, arguments(none, nullptr, nullptr, seqlen_q, seqlen_k, heads, head_dim, 1.f, policy, 1))
      .bytes;
}

// Ends the process with what is wrong, if anything is.
extern "C" void run_backward(void* const* tensors, float* softmax_lse, void* workspace, int seqlen_q, int seqlen_k,
                             int heads, int head_dim, float softmax_scale, int policy, int num_sms,
                             cudaStream_t stream) {
  const auto a =
      arguments(tensors, softmax_lse, workspace, seqlen_q, seqlen_k, heads, head_dim, softmax_scale, policy, num_sms);
  if (head_dim == 64) {
    dash_attn::launch_backward<dash_attn::BackwardVariant<dash_attn::BFloat16, 64, TopLeft, dash_attn::Ordered>>(
        a, stream);
  } else {
    dash_attn::launch_backward<dash_attn::BackwardVariant<dash_attn::BFloat16, 128, TopLeft, dash_attn::Ordered>>(
        a, stream);
  }
}
