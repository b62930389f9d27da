// dash_attn::forward and dash_attn::backward on any device, up to the kernels: checks, results, empty problems, scales
// of any sign, layouts that the kernels cannot address, and the policy that a schedule's name means. The kernels are
// ops too, dash_attn_C::forward and backward: CUDA's in torch_ops.cpp, the CPU's, the reference, in dash_attn/ops.py.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "cache_checks.h"
#include "column_checks.h"
#include "dropout_checks.h"
#include "operand_checks.h"

namespace dash_attn {

// The op of a name, looked up once.
#define DASH_OP(name, Signature)                                                                                 \
  ([]() -> const c10::TypedOperatorHandle<Signature>& {                                                          \
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>(); \
    return op;                                                                                                   \
  }())

// call_flat of an op of the kernels.
template <class Op, class... T>
void call_kernels(const Op& op, const T&... arguments) {
  try {
    call_flat(op, arguments...);
  } catch (const std::bad_alloc& error) {
    // Not if the host has run out of memory.
    if (std::string_view(error.what()).rfind("CUDA out of memory", 0) != 0) { throw; }
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

using OptionalTensor = const std::optional<Tensor>&;
using Outputs = std::tuple<Tensor, Tensor>;
// With the largest logit of every head of each sequence, fp32 (batch, heads); -inf if the head sees no key.
using OutputsAndMaxLogits = std::tuple<Tensor, Tensor, Tensor>;
template <class Result>
inline constexpr bool kHasMaxLogits = std::is_same_v<Result, OutputsAndMaxLogits>;

// The kernels' ops.
using ForwardKernelOp = FlatSignature<void(const Tensor&, const Tensor&, const Tensor&, Tensor, Tensor,
                                           const PackTensors&, const ScoreTensors&, double, double,
                                           const MaskArguments&, int64_t, const KernelDropout&, OptionalTensor,
                                           OptionalTensor)>;
using CacheKernelOp = FlatSignature<void(const Tensor&, const Tensor&, const Tensor&, Tensor, Tensor, OptionalTensor,
                                         OptionalTensor, const Cache&, const ScoreTensors&, double, double,
                                         const MaskArguments&, int64_t)>;
using AppendKernelOp =
    void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Tensor, const Tensor&, OptionalTensor,
         OptionalTensor, int64_t);
using BackwardKernelOp = FlatSignature<void(const BackwardTensors&, const PackTensors&, const ScoreTensors&,
                                            const ScoreGradients&, double, double, const MaskArguments&, int64_t,
                                            int64_t, const KernelDropout&, OptionalTensor)>;
using BitsKernelOp = FlatSignature<void(Tensor, const Tensor&, double, int64_t, int64_t, int64_t, int64_t, int64_t,
                                        int64_t, bool, int64_t, const MaskArguments&, int64_t)>;

inline bool has_queries(const Tensor& q, const PackTensors& pack) {
  return q.numel() != 0 && !(pack.exists() && pack.cu_seqlens_q->numel() == 1);
}

inline std::array<SymInt, 2> max_logits_sizes(const Tensor& q, const PackTensors& pack) {
  return {batch_size(q, pack), q.sym_size(-2)};
}

// The kernels of slopes, softcaps and dropout do not find the largest logits.
inline void check_max_logits(const Tensor& q, const ScoreArguments& scores, double dropout_p) {
  const char* const excluded = scores.alibi_slopes  ? "alibi_slopes"
                               : scores.softcap > 0 ? "softcap"
                               : dropout_p != 0     ? "dropout"
                                                    : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(!is_for_gpu(q) || !excluded, "return_max_logits must be False with ", excluded,
                              " on a GPU, got True");
}

// Whether every sum is over nothing.
inline bool is_empty(const Tensor& q, const Tensor& k, const PackTensors& pack) {
  return k.numel() == 0 || !has_queries(q, pack);
}

// Queries without any key, as a pack whose sequences have none: what their sinks give is for the kernels, which take
// one row at least.
struct WithoutKeys {
  Tensor k, v;  // one row
  PackTensors pack;
  bool is_dense;

  WithoutKeys(const Tensor& q, const Tensor& no_k, const Tensor& no_v, const PackTensors& given)
      : k(at::zeros({1, no_k.size(-2), no_k.size(-1)}, no_k.options())),
        v(at::zeros({1, no_v.size(-2), no_v.size(-1)}, no_v.options())),
        pack(given),
        is_dense(!given.exists()) {
    if (!is_dense) { return; }
    const int64_t batch = q.size(0), seqlen = q.size(1);
    pack.cu_seqlens_q = at::arange(0, (batch + 1) * seqlen, seqlen, q.options().dtype(at::kInt));
    pack.cu_seqlens_k = at::zeros({batch + 1}, q.options().dtype(at::kInt));
  }

  Tensor rows(const Tensor& of_queries) const { return is_dense ? of_queries.flatten(0, 1) : of_queries; }
  Tensor lse_rows(const Tensor& lse) const { return is_dense ? lse.transpose(0, 1).flatten(1) : lse; }
};

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
  if (strides.back() != 1 || reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kVectorBytes != 0) {
    return false;
  }
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    if (sizes[i] != 1 && (strides[i] <= 0 || strides[i] % step != 0)) { return false; }
  }
  return true;
}

inline Tensor addressable(const Tensor& tensor) {
  return is_addressable(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// Slopes as the kernels read them: the heads side by side, the sequences at any stride.
inline std::optional<Tensor> with_adjacent_heads(OptionalTensor tensor) {
  if (!tensor || tensor->size(-1) <= 1 || tensor->stride(-1) == 1) { return tensor; }
  return tensor->contiguous();
}

inline std::optional<Tensor> contiguous(OptionalTensor tensor) {
  return tensor ? std::optional<Tensor>(tensor->contiguous()) : std::nullopt;
}

inline ScoreTensors for_kernels(const ScoreTensors& scores) {
  return {contiguous(scores.sinks), with_adjacent_heads(scores.alibi_slopes)};
}

// A tensor that the kernels can write and that becomes the gradient in the end.
inline Tensor target_of(const Tensor& gradient) {
  return is_addressable(gradient) ? gradient : at::empty(gradient.sizes(), gradient.options());
}

// Dropout as the kernels are told of it. On a GPU they take bits, which are made of a state in both passes alike: so no
// layer keeps any.
inline KernelDropout for_kernels(const DropoutArguments& given, const Tensor& q, const Tensor& k,
                                    const PackTensors& pack, const MaskArguments& mask, const SymInt& sm_margin) {
  if (given.bits && reinterpret_cast<std::uintptr_t>(given.bits->const_data_ptr()) % dropout::kBitsAlignment != 0) {
    return {given.bits->clone(), std::nullopt, given.p};
  }
  if (!given.rng_state) { return given; }
  const Tensor state = given.rng_state->contiguous();
  const bool is_pack = pack.exists();
  if (!q.is_cuda()) {
    if (is_pack) {
      check_longest("max_seqlen_q", *given.max_seqlen_q, *pack.cu_seqlens_q, pack.seqused_q, q.size(0));
      check_longest("max_seqlen_k", *given.max_seqlen_k, *pack.cu_seqlens_k, pack.seqused_k, k.size(0));
    }
    return {std::nullopt, state, given.p};
  }
  // Of a pack: those that the longest sequence may have, of which there are no more than rows.
  const auto length = [&](const std::optional<SymInt>& most, int64_t rows) {
    return is_pack ? std::clamp<int64_t>(most->expect_int(), 1, rows) : rows;
  };
  const auto blocks = [](int64_t seqlen) { return int64_t{dropout::num_blocks(static_cast<int>(seqlen))}; };
  const int64_t batch = is_pack ? pack.cu_seqlens_q->size(0) - 1 : q.size(0), heads = q.size(-2);
  const int64_t seqlen_q = length(given.max_seqlen_q, q.size(-3)), seqlen_k = length(given.max_seqlen_k, k.size(-3));
  const Tensor bits =
      at::empty({batch, heads, blocks(seqlen_q), blocks(seqlen_k), dropout::kBlockBytes}, q.options().dtype(at::kByte));
  // Which of them a mask leaves out depends on the lengths of each sequence.
  const MaskArguments of_bits = is_pack ? MaskArguments{} : mask;
  call_kernels(DASH_OP("dash_attn_C::dropout_bits", BitsKernelOp), bits, state, given.p, seqlen_q, seqlen_k,
               /*first_head=*/int64_t{0}, heads, /*first_query=*/int64_t{0}, /*first_key=*/int64_t{0},
               /*of_flash_attention_2=*/false, int64_t{dropout::kDefaultRounds}, of_bits, sm_margin.expect_int());
  return {bits, std::nullopt, given.p};
}

template <class Result = Outputs>
Result forward(const Tensor& q, const Tensor& k, const Tensor& v, const PackTensors& pack, double softmax_scale,
               const MaskArguments& mask, SymInt sm_margin, const ScoreArguments& scores,
               const DropoutArguments& dropout, OptionalTensor columns) {
  check_operands(q, k, v, pack, scores, softmax_scale, mask, sm_margin);
  check_dropout(dropout, scores, q, k, pack);
  check_columns(columns, q, k, pack, mask, scores, dropout.p);
  std::optional<Tensor> max_logits;
  if constexpr (kHasMaxLogits<Result>) {
    check_max_logits(q, scores, dropout.p);
    max_logits = at::full_symint(max_logits_sizes(q, pack), -std::numeric_limits<double>::infinity(),
                          q.options().dtype(at::kFloat));
  }
  const auto result = [&](const Tensor& out, const Tensor& softmax_lse) -> Result {
    if constexpr (kHasMaxLogits<Result>) {
      return {out, softmax_lse, *max_logits};
    } else {
      return {out, softmax_lse};
    }
  };
  if (scores.sinks && k.numel() == 0 && has_queries(q, pack)) {
    const WithoutKeys call(q, k, v, pack);
    const auto [out, softmax_lse] =
        forward(call.rows(q), call.k, call.v, call.pack, softmax_scale, mask, sm_margin, scores, /*dropout=*/{},
                /*columns=*/std::nullopt);
    if (!call.is_dense) { return result(out, softmax_lse); }
    return result(out.unflatten(0, {q.size(0), q.size(1)}),
                  softmax_lse.unflatten(1, {q.size(0), q.size(1)}).transpose(0, 1).contiguous());
  }
  Tensor out = at::empty(out_sizes(q.sizes(), v.sizes()), q.options());
  const auto sizes = lse_sizes(q.sizes());
  Tensor softmax_lse = at::empty(without_batch(sizes, pack.exists()), q.options().dtype(at::kFloat));
  if (is_empty(q, k, pack)) {
    out.zero_();
    softmax_lse.fill_(std::numeric_limits<double>::infinity());
    return result(out, softmax_lse);
  }
  const PositiveScale scaled(q, softmax_scale);
  call_kernels(DASH_OP("dash_attn_C::forward", ForwardKernelOp), addressable(scaled.q), addressable(k), addressable(v),
               out, softmax_lse, pack, for_kernels(scores), scaled.softmax_scale, scores.softcap, mask,
               sm_margin.expect_int(), for_kernels(dropout, q, k, pack, mask, sm_margin), columns_for_kernels(columns),
               max_logits);
  return result(out, softmax_lse);
}

template <class Result = Outputs>
Result forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const PackTensors& pack, double softmax_scale,
                    const MaskArguments& mask, SymInt sm_margin, const ScoreArguments& scores,
                    const DropoutArguments& dropout, OptionalTensor columns) {
  check_operands(q, k, v, pack, scores, softmax_scale, mask, sm_margin);
  check_dropout(dropout, scores, q, k, pack);
  check_columns(columns, q, k, pack, mask, scores, dropout.p);
  if constexpr (kHasMaxLogits<Result>) { check_max_logits(q, scores, dropout.p); }
  const auto sizes = lse_sizes(q.sym_sizes());
  const auto of_floats = q.options().dtype(at::kFloat);
  const Tensor out = at::empty_symint(out_sizes(q.sym_sizes(), v.sym_sizes()), q.options());
  const Tensor softmax_lse = at::empty_symint(without_batch(sizes, pack.exists()), of_floats);
  if constexpr (kHasMaxLogits<Result>) {
    return {out, softmax_lse, at::empty_symint(max_logits_sizes(q, pack), of_floats)};
  } else {
    return {out, softmax_lse};
  }
}

// The forward of a variable-length batch whose keys lie in a cache: k and v have the rows of all pages. Without
// cu_seqlens_q all sequences have as many queries.
inline void check_forward_of_cache(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor cu_seqlens_q,
                                   OptionalTensor seqused_q, const Cache& cache, double softmax_scale,
                                   const MaskArguments& mask, const SymInt& sm_margin, const ScoreArguments& scores) {
  check_qkv(q, k, v, /*is_pack=*/true);
  const SymInt batch = cu_seqlens_q ? checked_batch(*cu_seqlens_q, "cu_seqlens_q") : cache.seqused_k.sym_numel();
  check_pack_tensor("cu_seqlens_q", cu_seqlens_q, "(batch + 1,)", batch + 1, q);
  check_pack_tensor("seqused_q", seqused_q, "(batch,)", batch, q);
  check_options(q, v, batch, scores, softmax_scale, mask, sm_margin);
  TORCH_CHECK_VALUE(batch >= 1 && k.sym_numel() != 0, "k must have at least one row, for one sequence, got ",
                    shape_text(k), " and a batch of ", size_text(batch));
  TORCH_CHECK_VALUE(cu_seqlens_q || q.sym_size(0) % batch == 0,
                    "without cu_seqlens_q the rows of q must be a multiple of the ", size_text(batch),
                    " sequences, got ", shape_text(q));
  check_cache(cache, q, k, batch);
}

inline Outputs forward_of_cache(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor cu_seqlens_q,
                                OptionalTensor seqused_q, const Cache& cache, double softmax_scale,
                                const MaskArguments& mask, SymInt sm_margin, const ScoreArguments& scores) {
  check_forward_of_cache(q, k, v, cu_seqlens_q, seqused_q, cache, softmax_scale, mask, sm_margin, scores);
  const Tensor out = at::empty(out_sizes(q.sizes(), v.sizes()), q.options());
  const auto sizes = lse_sizes(q.sizes());
  const Tensor softmax_lse = at::empty(without_batch(sizes, /*is_pack=*/true), q.options().dtype(at::kFloat));
  if (q.numel() == 0) {
    out.zero_();
    softmax_lse.fill_(std::numeric_limits<double>::infinity());
    return {out, softmax_lse};
  }
  const PositiveScale scaled(q, softmax_scale);
  const Cache of_kernels{contiguous(cache.block_table), cache.seqused_k, cache.page_rows, cache.page_distance};
  call_kernels(DASH_OP("dash_attn_C::forward_of_cache", CacheKernelOp), addressable(scaled.q), addressable(k),
               addressable(v), out, softmax_lse, cu_seqlens_q, seqused_q, of_kernels, for_kernels(scores),
               scaled.softmax_scale, scores.softcap, mask, sm_margin.expect_int());
  return {out, softmax_lse};
}

inline Outputs forward_of_cache_meta(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor cu_seqlens_q,
                                     OptionalTensor seqused_q, const Cache& cache, double softmax_scale,
                                     const MaskArguments& mask, SymInt sm_margin, const ScoreArguments& scores) {
  check_forward_of_cache(q, k, v, cu_seqlens_q, seqused_q, cache, softmax_scale, mask, sm_margin, scores);
  const auto sizes = lse_sizes(q.sym_sizes());
  return {at::empty_symint(out_sizes(q.sym_sizes(), v.sym_sizes()), q.options()),
          at::empty_symint(without_batch(sizes, /*is_pack=*/true), q.options().dtype(at::kFloat))};
}

// Tells autograd that the tensor is overwritten: a backward that has saved its old values then raises an error.
inline void mark_as_written(const Tensor& tensor) {
  if (!tensor.is_inference()) { tensor.unsafeGetTensorImpl()->bump_version(); }
}

// Writes new rows of k and v, (rows, kv_heads, head_dim), into a cache after the keys that its sequences have, and
// returns how many they have then. The arguments are those that dash_attn/cache_checks.py lets pass.
inline Tensor append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                     const Tensor& seqlens, OptionalTensor cu_seqlens, OptionalTensor block_table, SymInt sm_margin) {
  for (const Tensor& cache : {k_cache, v_cache}) {
    TORCH_CHECK(!cache.is_inference() || c10::InferenceMode::is_enabled(),
                "k_cache and v_cache must not be inference tensors outside of torch.inference_mode(), got one");
    mark_as_written(cache);
  }
  const Tensor ends = at::empty_like(seqlens);
  DASH_OP("dash_attn_C::append", AppendKernelOp)
      .call(k_cache, v_cache, k, v, ends, seqlens, contiguous(cu_seqlens), contiguous(block_table),
            sm_margin.expect_int());
  return ends;
}

inline Tensor append_meta(const Tensor& /*k_cache*/, const Tensor& /*v_cache*/, const Tensor& /*k*/,
                          const Tensor& /*v*/, const Tensor& seqlens, OptionalTensor /*cu_seqlens*/,
                          OptionalTensor /*block_table*/, SymInt /*sm_margin*/) {
  return at::empty_like(seqlens);
}

// What a backward writes has memory of its own.
inline void check_apart_from_others(const BackwardTensors& x, const ScoreTensors& scores,
                                    const ScoreGradients& score_gradients, const DropoutArguments& dropout,
                                    OptionalTensor columns) {
  const auto& [dsoftmax_lse, dsinks] = score_gradients;
  const std::pair<const char*, const Tensor&> gradients[] = {{"dq", x.dq}, {"dk", x.dk}, {"dv", x.dv}};
  for (const auto& [name, gradient] : gradients) {
    check_apart_from_itself(name, gradient);
    check_apart(name, gradient, "q", x.q);
    check_apart(name, gradient, "k", x.k);
    check_apart(name, gradient, "v", x.v);
    check_apart(name, gradient, "out", x.out);
    check_apart(name, gradient, "dout", x.dout);
    check_apart(name, gradient, "softmax_lse", x.softmax_lse);
    for (const auto& [other_name, other] : gradients) {
      if (&other == &gradient) { break; }
      check_apart(name, gradient, other_name, other);
    }
    if (scores.sinks) { check_apart(name, gradient, "sinks", *scores.sinks); }
    if (scores.alibi_slopes) { check_apart(name, gradient, "alibi_slopes", *scores.alibi_slopes); }
    if (dsoftmax_lse) { check_apart(name, gradient, "dsoftmax_lse", *dsoftmax_lse); }
    if (dropout.bits) { check_apart(name, gradient, "dropout_bits", *dropout.bits); }
    if (columns) { check_apart(name, gradient, "startend_row_indices", *columns); }
    if (dsinks) { check_apart("dsinks", *dsinks, name, gradient); }
  }
  if (dsinks) {
    check_apart("dsinks", *dsinks, "sinks", *scores.sinks);
    check_apart("dsinks", *dsinks, "softmax_lse", x.softmax_lse);
    if (dsoftmax_lse) { check_apart("dsinks", *dsinks, "dsoftmax_lse", *dsoftmax_lse); }
  }
}

inline void backward(const BackwardTensors& x, const PackTensors& pack, double softmax_scale, const MaskArguments& mask,
                     std::string_view schedule, SymInt sm_margin, const ScoreTensors& score_tensors,
                     const ScoreGradients& score_gradients, double softcap, const DropoutArguments& dropout,
                     OptionalTensor columns) {
  const ScoreArguments scores{score_tensors, softcap};
  check_backward(x, pack, scores, score_gradients, softmax_scale, mask, sm_margin);
  check_schedule_of_columns(columns, schedule);
  const Policy policy = resolve_schedule(schedule, mask, scores, dropout.p != 0, padded_row(x.q, x.v));
  check_dropout(dropout, scores, x.q, x.k, pack);
  check_columns(columns, x.q, x.k, pack, mask, scores, dropout.p);
  check_apart_from_others(x, scores, score_gradients, dropout, columns);
  const auto& [dsoftmax_lse, dsinks] = score_gradients;
  const Tensor gradients[] = {x.dq, x.dk, x.dv};
  for (const Tensor& gradient : gradients) { mark_as_written(gradient); }
  if (dsinks) { mark_as_written(*dsinks); }
  if (is_empty(x.q, x.k, pack)) {
    for (const Tensor& gradient : gradients) { gradient.zero_(); }
    if (!dsinks) { return; }
    if (!has_queries(x.q, pack)) {
      dsinks->zero_();
      return;
    }
    const WithoutKeys call(x.q, x.k, x.v, pack);
    const Tensor rows = call.rows(x.q);
    const std::optional<Tensor> dlse =
        dsoftmax_lse ? std::optional<Tensor>(call.lse_rows(*dsoftmax_lse)) : std::nullopt;
    backward({call.rows(x.dout), rows, call.k, call.v, call.rows(x.out), call.lse_rows(x.softmax_lse),
              at::empty_like(rows, at::MemoryFormat::Contiguous), at::empty_like(call.k), at::empty_like(call.v)},
             call.pack, softmax_scale, mask, schedule, sm_margin, scores, {dlse, dsinks}, softcap, /*dropout=*/{},
             /*columns=*/std::nullopt);
    return;
  }
  const PositiveScale scaled(x.q, softmax_scale);
  const Tensor targets[] = {target_of(x.dq), target_of(x.dk), target_of(x.dv)};
  const BackwardTensors of_kernels{addressable(x.dout), addressable(scaled.q), addressable(x.k), addressable(x.v),
                                   addressable(x.out), x.softmax_lse.contiguous(), targets[0], targets[1], targets[2]};
  call_kernels(DASH_OP("dash_attn_C::backward", BackwardKernelOp), of_kernels, pack, for_kernels(scores),
               ScoreGradients{contiguous(dsoftmax_lse), dsinks}, scaled.softmax_scale, softcap, mask,
               static_cast<int64_t>(policy), sm_margin.expect_int(),
               for_kernels(dropout, x.q, x.k, pack, mask, sm_margin), columns_for_kernels(columns));
  if (scaled.sign != 1) { targets[0].mul_(scaled.sign); }
  for (int i = 0; i < 3; ++i) {
    if (!targets[i].is_same(gradients[i])) { gradients[i].copy_(targets[i]); }
  }
}

inline void backward_meta(const BackwardTensors& x, const PackTensors& pack, double softmax_scale,
                          const MaskArguments& mask, std::string_view schedule, SymInt sm_margin,
                          const ScoreTensors& score_tensors, const ScoreGradients& score_gradients, double softcap,
                          const DropoutArguments& dropout, OptionalTensor columns) {
  const ScoreArguments scores{score_tensors, softcap};
  check_backward(x, pack, scores, score_gradients, softmax_scale, mask, sm_margin);
  check_schedule_of_columns(columns, schedule);
  resolve_schedule(schedule, mask, scores, dropout.p != 0, padded_row(x.q, x.v));
  check_dropout(dropout, scores, x.q, x.k, pack);
  check_columns(columns, x.q, x.k, pack, mask, scores, dropout.p);
}

}  // namespace dash_attn
