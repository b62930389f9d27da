// Forward and backward under a mask of which both ends move from query to query: tests/gpu/test_band.py.
#include "launch/launch_backward.h"
#include "launch/launch_forward.h"
#include "launch/variant.h"

using namespace dash_attn;

struct Problem {
  int seqlen_q, seqlen_k, heads, kv_heads, head_dim;
  float softmax_scale;
  int policy, num_sms;
};

namespace {

struct Band {
  static constexpr MaskKind kKind = MaskKind::kBand;
};

// Of contiguous (batch 1, seqlen, heads, head_dim) bf16 tensors: as q, k, v, out, dout, dq, dk, dv.
BackwardArguments arguments(const Problem& p, void* const* tensors, float* softmax_lse, void* workspace) {
  const auto view = [&](int i, int seqlen, int heads) {
    return TensorView{tensors[i], int64_t(seqlen) * heads * p.head_dim, int64_t(heads) * p.head_dim, p.head_dim};
  };
  BackwardArguments a{};
  a.q = view(0, p.seqlen_q, p.heads);
  a.k = view(1, p.seqlen_k, p.kv_heads);
  a.v = view(2, p.seqlen_k, p.kv_heads);
  a.out = view(3, p.seqlen_q, p.heads);
  a.dout = view(4, p.seqlen_q, p.heads);
  a.dq = view(5, p.seqlen_q, p.heads);
  a.dk = view(6, p.seqlen_k, p.kv_heads);
  a.dv = view(7, p.seqlen_k, p.kv_heads);
  a.softmax_lse = softmax_lse;
  a.workspace = workspace;
  a.dtype = Dtype::kBFloat16;
  a.batch = 1;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.heads = p.heads;
  a.kv_heads = p.kv_heads;
  a.head_dim = p.head_dim;
  a.softmax_scale = p.softmax_scale;
  a.mask = MaskKind::kBand;
  a.num_sms = p.num_sms;
  a.schedule = p.policy;
  return a;
}

template <int kHeadDim>
void run(const BackwardArguments& a, bool backward, cudaStream_t stream) {
  if (!backward) {
    launch_forward<ForwardVariant<BFloat16, kHeadDim, Band>>(a, stream);
  } else if (OrderFree::contains(static_cast<Policy>(a.schedule))) {
    launch_backward<BackwardVariant<BFloat16, kHeadDim, Band, OrderFree>>(a, stream);
  } else {
    launch_backward<BackwardVariant<BFloat16, kHeadDim, Band, Ordered>>(a, stream);
  }
}

}  // namespace

extern "C" size_t workspace_bytes(const Problem& problem) {
  void* const none[8] = {};
  return plan_workspace(nullptr, arguments(problem, none, nullptr, nullptr)).bytes;
}

// Ends the process with what is wrong, if anything is.
extern "C" void run_band(const Problem& problem, void* const* tensors, float* softmax_lse, void* workspace,
                         bool backward, cudaStream_t stream) {
  const BackwardArguments a = arguments(problem, tensors, softmax_lse, workspace);
  if (problem.head_dim == 64) {
    run<64>(a, backward, stream);
  } else {
    run<128>(a, backward, stream);
  }
}
