// How the differentiable ops call the forward and the backward: from q, k and v in what the caller gave, and from the
// other arguments.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "operators.h"

namespace dash_attn {

using torch::autograd::variable_list;

using ForwardOp = FlatSignature<decltype(forward<Outputs>)>;
using ForwardAndMaxLogitsOp = FlatSignature<decltype(forward<OutputsAndMaxLogits>)>;
using BackwardOp = FlatSignature<decltype(backward)>;

// What a call is told besides the tensors that have gradients.
struct Options {
  std::optional<SymInt> num_heads_q;
  double softmax_scale;
  MaskArguments mask;
  std::string schedule;
  SymInt sm_margin;
  PackTensors pack;
  std::optional<Tensor> alibi_slopes;
  double softcap;
  bool has_sinks;  // the last of the tensors that have gradients
  DropoutArguments dropout;
  std::optional<Tensor> columns;  // startend_row_indices
  bool has_max_logits = false;    // the forward's third result
};

struct Operands {
  Tensor q, k, v;
};

// Views of q, k and v in what the caller gave: three tensors, q and kv, or qkv.
inline Operands unpack(at::TensorList packed, const std::optional<SymInt>& num_heads_q) {
  if (packed.size() == 3) { return {packed[0], packed[1], packed[2]}; }
  if (packed.size() == 2) { return {packed[0], packed[1].select(-3, 0), packed[1].select(-3, 1)}; }
  const Tensor& qkv = packed[0];
  if (!num_heads_q) { return {qkv.select(-3, 0), qkv.select(-3, 1), qkv.select(-3, 2)}; }
  const SymInt& heads = *num_heads_q;
  const SymInt total = qkv.sym_size(-2), kv_heads = (total - heads) / 2;
  return {qkv.slice_symint(-2, 0, heads), qkv.slice_symint(-2, heads, heads + kv_heads),
          qkv.slice_symint(-2, heads + kv_heads, total)};
}

// Of the tensors that have gradients: q, k and v in what the caller gave, and behind them the sinks.
inline at::TensorList packed_of(at::TensorList inputs, const Options& options) {
  return inputs.slice(0, inputs.size() - (options.has_sinks ? 1 : 0));
}

inline ScoreTensors score_tensors_of(at::TensorList inputs, const Options& options) {
  return {options.has_sinks ? std::optional<Tensor>(inputs.back()) : std::nullopt, options.alibi_slopes};
}

// Whether the forward is called as flash_attn::_dash_attn_forward, which dash_attn.aliases asks for: policies of
// selective activation checkpointing look for "flash_attn" in an op's name.
inline std::atomic<bool> forward_is_flash_attns = false;

inline void name_forward(bool as_flash_attn) { forward_is_flash_attns = as_flash_attn; }

// The largest logits are undefined if the options have none.
inline OutputsAndMaxLogits call_forward(at::TensorList inputs, const Options& options) {
  const Operands operands = unpack(packed_of(inputs, options), options.num_heads_q);
  const auto call = [&](const auto& op) {
    return call_flat(op, operands.q, operands.k, operands.v, options.pack, options.softmax_scale, options.mask,
                     options.sm_margin, score_tensors_of(inputs, options), options.softcap,
                     options.dropout.of_forward(), options.columns);
  };
  if (options.has_max_logits) { return call(DASH_OP("dash_attn::forward_and_max_logits", ForwardAndMaxLogitsOp)); }
  const auto& op = forward_is_flash_attns ? DASH_OP("flash_attn::_dash_attn_forward", ForwardOp)
                                          : DASH_OP("dash_attn::forward", ForwardOp);
  auto [out, softmax_lse] = call(op);
  return {std::move(out), std::move(softmax_lse), Tensor()};
}

// What the outputs were and how the loss changes with them.
struct OutputGradients {
  Tensor dout, out, softmax_lse;
  std::optional<Tensor> dsoftmax_lse;
};

// dash_attn::backward with results: dq, dk, dv and dsinks, which is (0,) where it is not wanted.
inline std::tuple<Tensor, Tensor, Tensor, Tensor> gradients_of(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
    OptionalTensor dsoftmax_lse, const PackTensors& pack, double softmax_scale, const MaskArguments& mask,
    std::string_view schedule, SymInt sm_margin, const ScoreTensors& scores, bool wants_sinks, double softcap,
    const DropoutArguments& dropout, OptionalTensor columns) {
  const Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  std::optional<Tensor> dsinks;
  if (wants_sinks) { dsinks = at::empty_like(*scores.sinks); }
  call_flat(DASH_OP("dash_attn::backward", BackwardOp), BackwardTensors{dout, q, k, v, out, softmax_lse, dq, dk, dv},
            pack, softmax_scale, mask, schedule, sm_margin, scores, ScoreGradients{dsoftmax_lse, dsinks}, softcap,
            dropout, columns);
  return {dq, dk, dv, dsinks ? *dsinks : at::empty({0}, softmax_lse.options())};
}

// Whether a vmap has added a dimension: torch.autograd.grad's with is_grads_batched, or torch.func's.
inline bool is_batched(const Tensor& tensor) {
  return tensor.defined() &&
         tensor.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
}

// What call_backward gives where gradients of the outputs are batched. torch's vmaps call an op in a loop if the op
// returns its results, and refuse one that writes them into arguments, as dash_attn::backward does.
inline variable_list gradients_of_batch(const OutputGradients& outputs, at::TensorList inputs, const Options& options,
                                        bool wants_sinks) {
  const at::TensorList packed = packed_of(inputs, options);
  const auto& [q, k, v] = unpack(packed, options.num_heads_q);
  auto [dq, dk, dv, dsinks] =
      call_flat(DASH_OP("dash_attn::_gradients", FlatSignature<decltype(gradients_of)>), outputs.dout, q, k, v,
                outputs.out, outputs.softmax_lse, outputs.dsoftmax_lse, options.pack, options.softmax_scale,
                options.mask, options.schedule, options.sm_margin, score_tensors_of(inputs, options), wants_sinks,
                options.softcap, options.dropout.of_backward(), options.columns);
  variable_list gradients;
  if (packed.size() == 3) {
    gradients = {dq, dk, dv};
  } else if (packed.size() == 2) {
    gradients = {dq, at::stack({dk, dv}, -3)};
  } else {
    gradients = {options.num_heads_q ? at::cat({dq, dk, dv}, -2) : at::stack({dq, dk, dv}, -3)};
  }
  if (wants_sinks) { gradients.push_back(dsinks); }
  return gradients;
}

// Gradients of `inputs`, that of the sinks where it is wanted: of q, k and v each in one tensor, written through the
// views that they are read through.
inline variable_list call_backward(const OutputGradients& outputs, at::TensorList inputs, const Options& options,
                                   bool wants_sinks) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (is_batched(outputs.dout) || is_batched(outputs.dsoftmax_lse.value_or(Tensor()))) {
    return gradients_of_batch(outputs, inputs, options, wants_sinks);
  }
  const at::TensorList packed = packed_of(inputs, options);
  variable_list gradients;
  gradients.reserve(inputs.size());
  for (const Tensor& tensor : packed) { gradients.push_back(at::empty_like(tensor)); }
  const auto& [q, k, v] = unpack(packed, options.num_heads_q);
  const auto& [dq, dk, dv] = unpack(gradients, options.num_heads_q);
  const ScoreTensors scores = score_tensors_of(inputs, options);
  std::optional<Tensor> dsinks;
  if (wants_sinks) { dsinks = gradients.emplace_back(at::empty_like(*scores.sinks)); }
  call_flat(DASH_OP("dash_attn::backward", BackwardOp),
            BackwardTensors{outputs.dout, q, k, v, outputs.out, outputs.softmax_lse, dq, dk, dv}, options.pack,
            options.softmax_scale, options.mask, options.schedule, options.sm_margin, scores,
            ScoreGradients{outputs.dsoftmax_lse, dsinks}, options.softcap, options.dropout.of_backward(),
            options.columns);
  return gradients;
}

}  // namespace dash_attn
