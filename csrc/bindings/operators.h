// dash_attn::forward and dash_attn::backward on any device, up to the kernels: checks, results, empty problems, scales
// of any sign, layouts that the kernels cannot address, and the policy that a schedule's name means. The kernels are
// ops too, dash_attn_C::forward and backward: CUDA's in torch_ops.cpp, the CPU's, the reference, in dash_attn/ops.py.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <limits>
#include <string_view>
#include <tuple>

#include "operand_checks.h"

namespace dash_attn {

// The op of a name, looked up once.
#define DASH_OP(name, Signature)                                                                                 \
  ([]() -> const c10::TypedOperatorHandle<Signature>& {                                                          \
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>(); \
    return op;                                                                                                   \
  }())

using ForwardKernel = void(const Tensor&, const Tensor&, const Tensor&, Tensor, Tensor, double, bool, int64_t);
using BackwardKernel = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            Tensor, Tensor, Tensor, double, bool, int64_t, int64_t);
using Outputs = std::tuple<Tensor, Tensor>;

inline bool is_empty(const Tensor& q, const Tensor& k) { return q.numel() == 0 || k.numel() == 0; }

// c' > 0 and q' with c' q' = c q, so that dq = sign * dq': the kernels are right for a positive scale only.
struct PositiveScale {
  Tensor q;
  double softmax_scale;
  double sign;

  PositiveScale(const Tensor& any_q, double any_scale) : q(any_q), softmax_scale(any_scale), sign(1) {
    if (std::abs(any_scale) < std::numeric_limits<float>::min()) {
      q = at::zeros_like(any_q);
      softmax_scale = 1;
      sign = 0;
    } else if (any_scale < 0) {
      q = any_q.neg();
      softmax_scale = -any_scale;
      sign = -1;
    }
  }
};

// Whether TMA can address the tensor: contiguous rows, 16-byte aligned base and strides.
inline bool is_addressable(const Tensor& tensor) {
  constexpr int kVectorBytes = 16;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t step = kVectorBytes / static_cast<int64_t>(tensor.element_size());
  if (strides[3] != 1 || reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kVectorBytes != 0) {
    return false;
  }
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] != 1 && (strides[i] <= 0 || strides[i] % step != 0)) { return false; }
  }
  return true;
}

inline Tensor addressable(const Tensor& tensor) {
  return is_addressable(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// A tensor that the kernels can write and that becomes the gradient in the end.
inline Tensor target_of(const Tensor& gradient) {
  return is_addressable(gradient) ? gradient : at::empty(gradient.sizes(), gradient.options());
}

inline Outputs forward(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale, bool causal,
                       SymInt sm_margin) {
  check_operands(q, k, v, softmax_scale, sm_margin);
  Tensor out = at::empty(q.sizes(), q.options());
  Tensor softmax_lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
  if (is_empty(q, k)) {
    out.zero_();
    softmax_lse.fill_(std::numeric_limits<double>::infinity());
    return {out, softmax_lse};
  }
  const PositiveScale scaled(q, softmax_scale);
  DASH_OP("dash_attn_C::forward", ForwardKernel)
      .call(addressable(scaled.q), addressable(k), addressable(v), out, softmax_lse, scaled.softmax_scale, causal,
            sm_margin.expect_int());
  return {out, softmax_lse};
}

inline Outputs forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale, bool /*causal*/,
                            SymInt sm_margin) {
  check_operands(q, k, v, softmax_scale, sm_margin);
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, q.options().dtype(at::kFloat))};
}

inline void backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                     const Tensor& softmax_lse, Tensor dq, Tensor dk, Tensor dv, double softmax_scale, bool causal,
                     std::string_view schedule, SymInt sm_margin) {
  check_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin);
  const Tensor gradients[] = {dq, dk, dv};
  constexpr const char* kGradientNames[] = {"dq", "dk", "dv"};
  for (int i = 0; i < 3; ++i) {
    check_apart_from_itself(kGradientNames[i], gradients[i]);
    check_apart(kGradientNames[i], gradients[i], "q", q);
    check_apart(kGradientNames[i], gradients[i], "k", k);
    check_apart(kGradientNames[i], gradients[i], "v", v);
    check_apart(kGradientNames[i], gradients[i], "out", out);
    check_apart(kGradientNames[i], gradients[i], "dout", dout);
    check_apart(kGradientNames[i], gradients[i], "softmax_lse", softmax_lse);
    for (int j = 0; j < i; ++j) { check_apart(kGradientNames[i], gradients[i], kGradientNames[j], gradients[j]); }
  }
  // Where one of them is saved for somebody's derivative, that it is overwritten is noticed.
  for (const Tensor& gradient : gradients) {
    if (!gradient.is_inference()) { gradient.unsafeGetTensorImpl()->bump_version(); }
  }
  if (is_empty(q, k)) {
    for (const Tensor& gradient : gradients) { gradient.zero_(); }
    return;
  }
  const Policy policy = resolve_schedule(schedule, causal, q.size(3), k.size(1));
  const PositiveScale scaled(q, softmax_scale);
  const Tensor targets[] = {target_of(dq), target_of(dk), target_of(dv)};
  DASH_OP("dash_attn_C::backward", BackwardKernel)
      .call(addressable(dout), addressable(scaled.q), addressable(k), addressable(v), addressable(out),
            softmax_lse.contiguous(), targets[0], targets[1], targets[2], scaled.softmax_scale, causal,
            static_cast<int64_t>(policy), sm_margin.expect_int());
  if (scaled.sign != 1) { targets[0].mul_(scaled.sign); }
  for (int i = 0; i < 3; ++i) {
    if (!targets[i].is_same(gradients[i])) { gradients[i].copy_(targets[i]); }
  }
}

inline void backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                          const Tensor& softmax_lse, Tensor dq, Tensor dk, Tensor dv, double softmax_scale, bool causal,
                          std::string_view schedule, SymInt sm_margin) {
  check_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin);
}

}  // namespace dash_attn
