// dash_attn._autograd: the ops of dash_attn, and the derivative of those that the public functions call. It needs all
// of torch's C++ API, and so is compiled for one torch; the kernels (torch_ops.cpp) need its stable ABI alone.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "operators.h"

namespace dash_attn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ForwardOp = Outputs(const Tensor&, const Tensor&, const Tensor&, double, bool, SymInt);
using BackwardOp = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        Tensor, Tensor, Tensor, double, bool, std::string_view, SymInt);

// What a call is told besides its tensors.
struct Options {
  std::optional<SymInt> num_heads_q;
  double softmax_scale;
  bool causal;
  std::string schedule;
  SymInt sm_margin;
};

struct Operands {
  Tensor q, k, v;
};

// Views of q, k and v in what the caller gave: three tensors, q and kv, or qkv.
Operands unpack(at::TensorList packed, const std::optional<SymInt>& num_heads_q) {
  if (packed.size() == 3) { return {packed[0], packed[1], packed[2]}; }
  if (packed.size() == 2) { return {packed[0], packed[1].select(2, 0), packed[1].select(2, 1)}; }
  const Tensor& qkv = packed[0];
  if (!num_heads_q) { return {qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2)}; }
  const SymInt& heads = *num_heads_q;
  const SymInt total = qkv.sym_size(2), kv_heads = (total - heads) / 2;
  return {qkv.slice_symint(2, 0, heads), qkv.slice_symint(2, heads, heads + kv_heads),
          qkv.slice_symint(2, heads + kv_heads, total)};
}

Outputs call_forward(at::TensorList packed, const Options& options) {
  const Operands operands = unpack(packed, options.num_heads_q);
  return DASH_OP("dash_attn::forward", ForwardOp)
      .call(operands.q, operands.k, operands.v, options.softmax_scale, options.causal, options.sm_margin);
}

// Gradients of `packed`, each in one tensor, written through the views that q, k and v are read through.
variable_list call_backward(const Tensor& dout, const Tensor& out, const Tensor& softmax_lse, at::TensorList packed,
                            const Options& options) {
  at::AutoDispatchBelowADInplaceOrView guard;
  variable_list gradients;
  gradients.reserve(packed.size());
  for (const Tensor& tensor : packed) { gradients.push_back(at::empty_like(tensor)); }
  const Operands operands = unpack(packed, options.num_heads_q);
  const Operands targets = unpack(gradients, options.num_heads_q);
  DASH_OP("dash_attn::backward", BackwardOp)
      .call(dout, operands.q, operands.k, operands.v, out, softmax_lse, targets.q, targets.k, targets.v,
            options.softmax_scale, options.causal, options.schedule, options.sm_margin);
  return gradients;
}

// call_backward such that differentiating its result raises instead of treating it as constant.
struct Gradients : torch::autograd::Function<Gradients> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* /*context*/, const Tensor& dout, const Tensor& out,
                               const Tensor& softmax_lse, at::TensorList packed, const Options& options) {
    return call_backward(dout, out, softmax_lse, packed, options);
  }

  static variable_list backward(AutogradContext* /*context*/, variable_list /*gradients*/) {
    TORCH_CHECK(false, "attention must be differentiated at most once, got a second differentiation of dash_attn");
  }
};

// The log-sum-exp leaves through a reference, not as a result: it has no derivative.
struct Attention : torch::autograd::Function<Attention> {
  static constexpr bool is_traceable = true;
  static constexpr int kOptions = 2;  // forward's arguments that are not tensors

  static Tensor forward(AutogradContext* context, at::TensorList packed, const Options& options, Tensor* softmax_lse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_forward(packed, options);
    variable_list saved(packed.begin(), packed.end());
    saved.push_back(out);
    saved.push_back(lse);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    auto& data = context->saved_data;
    data["num_heads_q"] = options.num_heads_q ? at::IValue(*options.num_heads_q) : at::IValue();
    data["softmax_scale"] = options.softmax_scale;
    data["causal"] = options.causal;
    data["schedule"] = options.schedule;
    data["sm_margin"] = options.sm_margin;
    *softmax_lse = std::move(lse);
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list douts) {
    variable_list saved = context->get_saved_variables();
    const size_t count = saved.size() - 2;
    const Tensor& dout = douts[0];
    if (!dout.defined()) { return variable_list(count + kOptions); }
    auto& data = context->saved_data;
    const at::IValue& num_heads_q = data["num_heads_q"];
    const Options options{num_heads_q.isNone() ? std::nullopt : std::optional<SymInt>(num_heads_q.toSymInt()),
                          data["softmax_scale"].toDouble(), data["causal"].toBool(), data["schedule"].toStringRef(),
                          data["sm_margin"].toSymInt()};
    const Tensor &out = saved[count], &softmax_lse = saved[count + 1];
    const at::TensorList packed(saved.data(), count);
    // With create_graph the gradients may be differentiated again.
    variable_list gradients = at::GradMode::is_enabled() ? Gradients::apply(dout, out, softmax_lse, packed, options)
                                                         : call_backward(dout, out, softmax_lse, packed, options);
    gradients.resize(count + kOptions);
    return gradients;
  }
};

// Attention of what the caller gave, once that is known to be right.
Outputs attention(variable_list packed, std::optional<SymInt> num_heads_q, std::optional<double> softmax_scale,
                  bool causal, std::string_view schedule, SymInt sm_margin) {
  check_schedule(schedule, causal);
  const SymInt head_dim = packed[0].sym_size(-1);
  Options options{std::move(num_heads_q),
                  softmax_scale ? *softmax_scale : std::pow(head_dim.guard_int(__FILE__, __LINE__), -0.5), causal,
                  std::string(schedule), std::move(sm_margin)};
  // Zeros change neither scores nor outputs, and their gradients are cut off again.
  const SymInt excess = head_dim % kHeadDimMultiple;
  const bool pad = excess != 0;
  if (pad) {
    for (Tensor& tensor : packed) { tensor = at::constant_pad_nd_symint(tensor, {0, kHeadDimMultiple - excess}); }
  }
  bool differentiable = false;
  if (at::GradMode::is_enabled()) {
    for (const Tensor& tensor : packed) {
      // A tangent has no derivative either: Attention says so.
      differentiable = differentiable || tensor.requires_grad() || tensor._fw_grad(/*level=*/0).defined();
    }
  }
  Tensor out, softmax_lse;
  if (differentiable) {
    out = Attention::apply(at::TensorList(packed), options, &softmax_lse);
  } else {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, softmax_lse) = call_forward(packed, options);
  }
  if (pad) { out = out.slice_symint(-1, 0, head_dim); }
  return {std::move(out), std::move(softmax_lse)};
}

Outputs attention_qkv(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> softmax_scale,
                      bool causal, std::string_view schedule, SymInt sm_margin) {
  check_qkv(q, k, v);
  return attention({q, k, v}, std::nullopt, softmax_scale, causal, schedule, std::move(sm_margin));
}

Outputs attention_kvpacked(const Tensor& q, const Tensor& kv, std::optional<double> softmax_scale, bool causal,
                           std::string_view schedule, SymInt sm_margin) {
  check_kvpacked(q, kv);
  return attention({q, kv}, std::nullopt, softmax_scale, causal, schedule, std::move(sm_margin));
}

Outputs attention_qkvpacked(const Tensor& qkv, std::optional<SymInt> num_heads_q, std::optional<double> softmax_scale,
                            bool causal, std::string_view schedule, SymInt sm_margin) {
  check_qkvpacked(qkv, num_heads_q);
  return attention({qkv}, std::move(num_heads_q), softmax_scale, causal, schedule, std::move(sm_margin));
}

}  // namespace
}  // namespace dash_attn

TORCH_LIBRARY(dash_attn, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, SymInt sm_margin=0) -> (Tensor out, "
      "Tensor softmax_lse)",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!) dq, "
      "Tensor(a7!) dk, Tensor(a8!) dv, float softmax_scale, bool causal, str schedule, SymInt sm_margin) -> ()",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, str schedule, SymInt sm_margin) -> "
      "(Tensor out, Tensor softmax_lse)");
  library.def(
      "attention_kvpacked(Tensor q, Tensor kv, float? softmax_scale, bool causal, str schedule, SymInt sm_margin) -> "
      "(Tensor out, Tensor softmax_lse)");
  library.def(
      "attention_qkvpacked(Tensor qkv, SymInt? num_heads_q, float? softmax_scale, bool causal, str schedule, SymInt "
      "sm_margin) -> (Tensor out, Tensor softmax_lse)");
}

TORCH_LIBRARY_IMPL(dash_attn, CPU, library) {
  library.impl("forward", &dash_attn::forward);
  library.impl("backward", &dash_attn::backward);
}

TORCH_LIBRARY_IMPL(dash_attn, CUDA, library) {
  library.impl("forward", &dash_attn::forward);
  library.impl("backward", &dash_attn::backward);
}

TORCH_LIBRARY_IMPL(dash_attn, Meta, library) {
  library.impl("forward", &dash_attn::forward_meta);
  library.impl("backward", &dash_attn::backward_meta);
}

// Differentiating through these two raises: what has a derivative is what follows.
TORCH_LIBRARY_IMPL(dash_attn, Autograd, library) {
  library.impl("forward", torch::autograd::autogradNotImplementedFallback());
  library.impl("backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(dash_attn, CompositeImplicitAutograd, library) {
  library.impl("attention", &dash_attn::attention_qkv);
  library.impl("attention_kvpacked", &dash_attn::attention_kvpacked);
  library.impl("attention_qkvpacked", &dash_attn::attention_qkvpacked);
}

// The kernels. They write what they are given and check only what would harm: `dash_attn` calls them rightly.
TORCH_LIBRARY(dash_attn_C, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) softmax_lse, float softmax_scale, bool causal, "
      "int sm_margin) -> ()");
  library.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, float softmax_scale, bool causal, int schedule, int sm_margin) -> ()");
}
