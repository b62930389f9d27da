// What the ops' tensors and numbers must be. Each message names the argument, what is allowed and what was given; a
// wrong kind of thing is a TypeError in Python, a wrong value or shape a ValueError. Sizes are symbolic under
// torch.compile.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "contract/choice.h"
#include "contract/tile_shapes.h"
#include "flat_arguments.h"
#include "op_records.h"
#include "placement/sequences.h"

namespace dash_attn {

using at::Tensor;
using c10::SymInt;

constexpr int kHeadDimMultiple = 8;  // 16 bytes: what the kernels' loads step by
constexpr double kLeastScaleOfSlopes = 1e-30;
// Tile counts and ends are 32-bit in the kernels.
constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1;

// As Python prints it.
inline std::string size_text(const SymInt& size) {
  const auto known = size.maybe_as_int();
  return known ? std::to_string(*known) : size.toSymNode()->str();
}

// As Python prints a tuple.
inline std::string tuple_text(c10::SymIntArrayRef values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) { text += (i ? ", " : "") + size_text(values[i]); }
  return text + (values.size() == 1 ? ",)" : ")");
}

inline std::string shape_text(const Tensor& tensor) { return tuple_text(tensor.sym_sizes()); }

inline std::string dtype_text(const Tensor& tensor) {
  return c10::str("torch.", c10::getDtypeNames(tensor.scalar_type()).first);
}

// The shortest text that is read back as the same number, as in Python.
inline std::string number_text(double value) {
  std::array<char, 32> text;
  return std::string(text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr);
}

// As ops take them.
template <>
inline constexpr bool kPassedByValue<SymInt> = true;
template <>
inline constexpr bool kPassedByValue<std::optional<SymInt>> = true;

using PackTensors = PackTensorsOf<Tensor>;
using Cache = CacheOf<Tensor>;
using ScoreTensors = ScoreTensorsOf<Tensor>;  // sinks: of the functions any float dtype, of the ops fp32

// What a call changes scores by, and the logits that its sums have beside them.
struct ScoreArguments : ScoreTensors {
  double softcap = 0;

  bool exist() const { return sinks || alibi_slopes || softcap != 0; }

  static constexpr auto kMembers =
      std::make_tuple(&ScoreArguments::sinks, &ScoreArguments::alibi_slopes, &ScoreArguments::softcap);
};

// What the caller calls them.
struct PackNames {
  const char *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
};
inline constexpr PackNames kPackNames = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"};

// The start of a tensor's shape.
inline const char* lengths_text(bool is_pack) { return is_pack ? "(total, " : "(batch, seqlen, "; }

// Whether the tensor is on a GPU or, as a FakeTensor of torch.compile, stands for one that is. In a meta kernel the
// device of a FakeTensor is meta, but its dispatch keys still name the other device.
inline bool is_for_gpu(const Tensor& tensor) {
  return tensor.key_set().has_backend(c10::BackendComponent::CUDABit);
}

// `inner`: the `inner_rank` dimensions after the lengths.
inline void check_tensor(const char* name, const Tensor& tensor, const char* inner, int64_t inner_rank, bool is_pack) {
  const int64_t length_rank = is_pack ? 1 : 2;
  TORCH_CHECK_VALUE(tensor.dim() == length_rank + inner_rank, name, " must have shape ", lengths_text(is_pack), inner,
                    ", got ", size_text(tensor.dim()), " dimensions: ", shape_text(tensor));
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kBFloat16 || dtype == at::kHalf, name, " must be torch.bfloat16 or torch.float16, got ",
                   dtype_text(tensor));
  const auto device = tensor.device();
  TORCH_CHECK_VALUE(device.is_cuda() || device.is_cpu() || device.is_meta(), name,
                    " must be on a CUDA, CPU or meta device, got ", device.str());
  // A symbolic length is checked when the graph runs: a bound here would narrow what torch.export may vary.
  const auto seqlen = tensor.sym_size(length_rank - 1).maybe_as_int();
  TORCH_CHECK_VALUE(!seqlen || *seqlen <= kMaxSeqlen, name, " must have a ", is_pack ? "total" : "seqlen",
                    " of at most ", size_text(kMaxSeqlen), ", got ", size_text(*seqlen));
}

inline void check_same(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, " must have the dtype of ", like_name, ", ",
                   dtype_text(like), ", got ", dtype_text(tensor));
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, " must be on the device of ", like_name, ", ",
                    like.device().str(), ", got ", tensor.device().str());
}

inline void check_head_dim(const char* name, const Tensor& tensor) {
  const SymInt head_dim = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= kMaxHeadDim, name, " must have a head_dim from 1 to ",
                    size_text(kMaxHeadDim), ", got ", size_text(head_dim));
}

// Batch, heads and head_dim of keys against those of q; `tensor` is k, or kv in one tensor.
inline void check_kv_shape(const char* name, const Tensor& tensor, const Tensor& q, bool is_pack) {
  TORCH_CHECK_VALUE(is_pack || tensor.sym_size(0) == q.sym_size(0), name, " must have the batch size of q, ",
                    size_text(q.sym_size(0)), ", got ", size_text(tensor.sym_size(0)));
  TORCH_CHECK_VALUE(tensor.sym_size(-1) == q.sym_size(-1), name, " must have the head_dim of q, ",
                    size_text(q.sym_size(-1)), ", got ", size_text(tensor.sym_size(-1)));
  const SymInt heads = q.sym_size(-2), kv_heads = tensor.sym_size(-2);
  TORCH_CHECK_VALUE(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0, name,
                    " must have a number of heads that divides the ", size_text(heads), " heads of q, got ",
                    size_text(kv_heads));
}

inline void check_pack_tensor(const char* name, const std::optional<Tensor>& given, const char* shape,
                              const SymInt& size, const Tensor& q) {
  if (!given) { return; }
  const Tensor& tensor = *given;
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, " must be torch.int32, got ", dtype_text(tensor));
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == size, name, " must have shape ", shape, " = (",
                    size_text(size), ",), got ", shape_text(tensor));
  TORCH_CHECK_VALUE(tensor.sym_stride(0) == 1 || size <= 1, name, " must be contiguous, got strides ",
                    tuple_text(tensor.sym_strides()));
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, " must be on the device of q, ", q.device().str(), ", got ",
                    tensor.device().str());
}

// Whether both offsets are there. Without them there are no lengths either.
inline bool checked_is_pack(const PackTensors& pack, const PackNames& names = kPackNames) {
  const bool is_pack = pack.exists();
  TORCH_CHECK_VALUE(is_pack == pack.cu_seqlens_k.has_value(), names.cu_seqlens_q, " and ", names.cu_seqlens_k,
                    " must be given both or neither, got ", is_pack ? names.cu_seqlens_q : names.cu_seqlens_k,
                    " alone");
  TORCH_CHECK_VALUE(is_pack || !pack.seqused_q, names.seqused_q, " must be None where ", names.cu_seqlens_q,
                    " is, got a tensor");
  TORCH_CHECK_VALUE(is_pack || !pack.seqused_k, names.seqused_k, " must be None where ", names.cu_seqlens_k,
                    " is, got a tensor");
  return is_pack;
}

inline SymInt batch_size(const Tensor& q, const PackTensors& pack) {
  return pack.exists() ? pack.cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0);
}

// How many sequences offsets are for.
inline SymInt checked_batch(const Tensor& offsets, const char* name) {
  // Where only the device knows how many sequences there are, a compiled graph checks the number when it runs.
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.sym_size(0).sym_ge(1).expect_true(__FILE__, __LINE__), name,
                    " must have shape (batch + 1,), got ", shape_text(offsets));
  return offsets.sym_size(0) - 1;
}

// Shapes, not values: those are the device's, and reading them would wait for it.
inline void check_pack(const PackTensors& pack, const Tensor& q, const PackNames& names = kPackNames) {
  const auto& first = pack.cu_seqlens_q;
  if (!first) { return; }
  const SymInt batch = checked_batch(*first, names.cu_seqlens_q), offsets = first->sym_size(0);
  check_pack_tensor(names.cu_seqlens_q, first, "(batch + 1,)", offsets, q);
  check_pack_tensor(names.cu_seqlens_k, pack.cu_seqlens_k, "(batch + 1,)", offsets, q);
  check_pack_tensor(names.seqused_q, pack.seqused_q, "(batch,)", batch, q);
  check_pack_tensor(names.seqused_k, pack.seqused_k, "(batch,)", batch, q);
}

inline void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, bool is_pack) {
  constexpr const char* kInner = "heads, head_dim)";
  check_tensor("q", q, kInner, 2, is_pack);
  check_tensor("k", k, kInner, 2, is_pack);
  check_tensor("v", v, kInner, 2, is_pack);
  check_same("k", k, "q", q);
  check_same("v", v, "q", q);
  check_head_dim("q", q);
  check_kv_shape("k", k, q, is_pack);
  check_head_dim("v", v);
  TORCH_CHECK_VALUE(v.sym_sizes().slice(0, v.dim() - 1) == k.sym_sizes().slice(0, k.dim() - 1),
                    "v must have the shape of k except for the head_dim, ", shape_text(k), ", got ", shape_text(v));
}

inline void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, const PackTensors& pack) {
  check_qkv(q, k, v, checked_is_pack(pack));
  check_pack(pack, q);
}

inline void check_kvpacked(const Tensor& q, const Tensor& kv, const PackTensors& pack) {
  constexpr const char* kInner = "2, kv_heads, head_dim)";
  const bool is_pack = checked_is_pack(pack);
  check_tensor("q", q, "heads, head_dim)", 2, is_pack);
  check_tensor("kv", kv, kInner, 3, is_pack);
  TORCH_CHECK_VALUE(kv.sym_size(-3) == 2, "kv must have shape ", lengths_text(is_pack), kInner,
                    ", with 2 for keys and values, got ", size_text(kv.sym_size(-3)), " in its place: ",
                    shape_text(kv));
  check_same("kv", kv, "q", q);
  check_head_dim("q", q);
  check_kv_shape("kv", kv, q, is_pack);
  check_pack(pack, q);
}

// `pack` has the same tensors for queries and keys.
inline void check_qkvpacked(const Tensor& qkv, const std::optional<SymInt>& num_heads_q, const PackTensors& pack) {
  constexpr PackNames kNames = {"cu_seqlens", "cu_seqlens", "seqused", "seqused"};
  const bool is_pack = checked_is_pack(pack, kNames);
  if (!num_heads_q) {
    constexpr const char* kInner = "3, heads, head_dim)";
    check_tensor("qkv", qkv, kInner, 3, is_pack);
    check_head_dim("qkv", qkv);
    TORCH_CHECK_VALUE(qkv.sym_size(-3) == 3, "qkv must have shape ", lengths_text(is_pack), kInner,
                      ", with 3 for queries, keys and values, got ", size_text(qkv.sym_size(-3)), " in its place: ",
                      shape_text(qkv));
    TORCH_CHECK_VALUE(qkv.sym_size(-2) >= 1, "qkv must have at least one head, got ", shape_text(qkv));
  } else {
    check_tensor("qkv", qkv, "num_heads_q + 2 * kv_heads, head_dim)", 2, is_pack);
    check_head_dim("qkv", qkv);
    const SymInt heads = qkv.sym_size(-2), rest = heads - *num_heads_q;
    TORCH_CHECK_VALUE(
        *num_heads_q >= 1 && rest >= 2 && rest % 2 == 0 && *num_heads_q % (rest / 2) == 0,
        "num_heads_q must be a positive multiple of kv_heads with num_heads_q + 2 * kv_heads equal to the ",
        size_text(heads), " heads of qkv, got ", size_text(*num_heads_q));
  }
  check_pack(pack, qkv, kNames);
}

constexpr double kLog2E = 1.4426950408889634;

inline bool is_finite_in_fp32(double value) { return std::isfinite(static_cast<float>(value)); }

// The kernels take the scale times log2(e), in fp32.
inline void check_softmax_scale(double softmax_scale) {
  TORCH_CHECK_VALUE(std::isfinite(softmax_scale), "softmax_scale must be a finite number or None, got ",
                    number_text(softmax_scale));
  TORCH_CHECK_VALUE(is_finite_in_fp32(static_cast<double>(static_cast<float>(softmax_scale)) * kLog2E),
                    "softmax_scale * log2(e) must be finite in fp32, got softmax_scale=", number_text(softmax_scale));
}

// The kernels take the cap times log2(e), and the scale divided by it, in fp32.
inline void check_softcap(double softcap, double softmax_scale) {
  TORCH_CHECK_VALUE(std::isfinite(softcap) && softcap >= 0,
                    "softcap must be a finite number of at least 0 or None, got ", number_text(softcap));
  if (softcap == 0) { return; }
  const bool in_range = static_cast<float>(softcap) >= std::numeric_limits<float>::min() &&
                        is_finite_in_fp32(softcap * kLog2E) && is_finite_in_fp32(softmax_scale / softcap);
  TORCH_CHECK_VALUE(in_range, "softcap * log2(e) and softmax_scale / softcap must be finite in fp32, got softcap=",
                    number_text(softcap), " and softmax_scale=", number_text(softmax_scale));
}

// (heads,) on q's device, of any float dtype.
inline void check_sinks(const char* name, const Tensor& sinks, const Tensor& q) {
  const SymInt heads = q.sym_size(-2);
  TORCH_CHECK_TYPE(sinks.is_floating_point(), name, " must be of a floating-point dtype, got ", dtype_text(sinks));
  TORCH_CHECK_VALUE(sinks.dim() == 1 && sinks.sym_size(0) == heads, name, " must be of shape (heads,) = (",
                    size_text(heads), ",), got ", shape_text(sinks));
  TORCH_CHECK_VALUE(sinks.device() == q.device(), name, " must be on the device of q, ", q.device().str(), ", got ",
                    sinks.device().str());
}

inline void check_fp32(const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, name, " must be torch.float32, got ", dtype_text(tensor));
}

inline void check_alibi_slopes(const Tensor& slopes, const Tensor& q, const SymInt& batch) {
  check_fp32("alibi_slopes", slopes);
  const SymInt heads = q.sym_size(-2);
  const bool of_heads = slopes.dim() == 1 && slopes.sym_size(0) == heads;
  const bool of_sequences = slopes.dim() == 2 && slopes.sym_size(0) == batch && slopes.sym_size(1) == heads;
  TORCH_CHECK_VALUE(of_heads || of_sequences, "alibi_slopes must have shape (heads,) = (", size_text(heads),
                    ",) or (batch, heads) = (", size_text(batch), ", ", size_text(heads), "), got ",
                    shape_text(slopes));
  TORCH_CHECK_VALUE(slopes.device() == q.device(), "alibi_slopes must be on the device of q, ", q.device().str(),
                    ", got ", slopes.device().str());
}

// `sinks_name`: what the caller calls them.
inline void check_scores(const ScoreArguments& scores, const char* sinks_name, const Tensor& q, const SymInt& batch,
                         double softmax_scale) {
  check_softcap(scores.softcap, softmax_scale);
  if (scores.sinks) { check_sinks(sinks_name, *scores.sinks, q); }
  if (!scores.alibi_slopes) { return; }
  check_alibi_slopes(*scores.alibi_slopes, q, batch);
  TORCH_CHECK_VALUE(softmax_scale == 0 || std::fabs(softmax_scale) >= kLeastScaleOfSlopes,
                    "softmax_scale must be 0 or at least ", number_text(kLeastScaleOfSlopes),
                    " in magnitude with alibi_slopes, which are divided by it, got ", number_text(softmax_scale));
  TORCH_CHECK_NOT_IMPLEMENTED(
      scores.softcap == 0, "softcap and alibi_slopes must not be given together (no kernel has both), got softcap=",
      number_text(scores.softcap), " and alibi_slopes of shape ", shape_text(*scores.alibi_slopes));
}

inline void check_sm_margin(const SymInt& sm_margin) {
  TORCH_CHECK_VALUE(sm_margin >= 0, "sm_margin must be at least 0 and less than the SMs of the GPU, got ",
                    size_text(sm_margin));
}

inline void check_mask(const MaskArguments& mask) {
  TORCH_CHECK_VALUE(mask.window.attention_chunk >= 0, "attention_chunk must be at least 0, got ",
                    size_text(mask.window.attention_chunk));
}

// The row of the tile table that serves tensors of these head dims; none while one of them is not known.
inline HeadDims padded_row(const Tensor& q, const Tensor& v) {
  const auto qk_dim = q.sym_size(-1).maybe_as_int(), v_dim = v.sym_size(-1).maybe_as_int();
  if (!qk_dim || !v_dim || *qk_dim > kMaxHeadDim || *v_dim > kMaxHeadDim) { return {}; }
  return padded_head_dims(static_cast<int>(*qk_dim), static_cast<int>(*v_dim));
}

// The policy that a schedule's name means for this problem.
inline Policy resolve_schedule(std::string_view schedule, const MaskArguments& mask, const ScoreArguments& scores,
                               bool drops, HeadDims padded) {
  const CallKind call{mask.rule().kind, padded, scores.alibi_slopes || scores.softcap != 0, drops};
  const std::optional<Policy> policy = chosen_policy(schedule, call);
  TORCH_CHECK_VALUE(policy.has_value(), refused_schedule(schedule, call));
  return *policy;
}

inline void check_head_dim_multiple(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.sym_size(-1) % kHeadDimMultiple == 0, name, " must have a head_dim that is a multiple of ",
                    size_text(kHeadDimMultiple), ", got ", size_text(tensor.sym_size(-1)));
}

// All that an op checks besides what check_qkv does.
inline void check_options(const Tensor& q, const Tensor& v, const SymInt& batch, const ScoreArguments& scores,
                          double softmax_scale, const MaskArguments& mask, const SymInt& sm_margin) {
  check_head_dim_multiple("q", q);
  check_head_dim_multiple("v", v);
  check_softmax_scale(softmax_scale);
  check_scores(scores, "sinks", q, batch, softmax_scale);
  if (scores.sinks) { check_fp32("sinks", *scores.sinks); }
  check_mask(mask);
  check_sm_margin(sm_margin);
}

inline void check_operands(const Tensor& q, const Tensor& k, const Tensor& v, const PackTensors& pack,
                           const ScoreArguments& scores, double softmax_scale, const MaskArguments& mask,
                           const SymInt& sm_margin) {
  check_qkv(q, k, v, pack);
  check_options(q, v, batch_size(q, pack), scores, softmax_scale, mask, sm_margin);
}

inline void check_like(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == like.sym_sizes(), name, " must have the shape of ", like_name, ", ",
                    shape_text(like), ", got ", shape_text(tensor));
  check_same(name, tensor, like_name, like);
}

// The output's: those of q, with v's head_dim.
template <class Size>
c10::SmallVector<Size, 4> out_sizes(at::ArrayRef<Size> q, at::ArrayRef<Size> v) {
  c10::SmallVector<Size, 4> sizes(q.begin(), q.end());
  sizes.back() = v.back();
  return sizes;
}

// `tensor`: the output or its gradient.
inline void check_out(const char* name, const Tensor& tensor, const Tensor& q, const Tensor& v) {
  const auto expected = out_sizes(q.sym_sizes(), v.sym_sizes());
  TORCH_CHECK_VALUE(tensor.sym_sizes() == c10::SymIntArrayRef(expected), name,
                    " must have the shape of q with the head_dim of v, ", tuple_text(expected), ", got ",
                    shape_text(tensor));
  check_same(name, tensor, "q", q);
}

inline void check_writable(const char* name, const Tensor& gradient) {
  const auto sizes = gradient.sym_sizes(), strides = gradient.sym_strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK_VALUE(strides[i] != 0 || sizes[i] <= 1, name,
                      " must have one memory location per element, got strides ", tuple_text(strides));
  }
}

// Sizes of the log-sum-exp: without the first in a pack, which has no batch.
template <class Size>
std::array<Size, 3> lse_sizes(at::ArrayRef<Size> q) {
  const size_t rank = q.size();
  return {q[0], q[rank - 2], q[rank - 3]};
}

template <class Size>
at::ArrayRef<Size> without_batch(const std::array<Size, 3>& sizes, bool is_pack) {
  return at::ArrayRef<Size>(sizes).slice(is_pack ? 1 : 0);
}

// `softmax_lse`: the log-sum-exp or its gradient.
inline void check_softmax_lse(const char* name, const Tensor& softmax_lse, const Tensor& q, bool is_pack) {
  const std::array<SymInt, 3> sizes = lse_sizes(q.sym_sizes());
  const c10::SymIntArrayRef expected = without_batch(sizes, is_pack);
  TORCH_CHECK_VALUE(softmax_lse.sym_sizes() == expected, name, " must have shape ",
                    is_pack ? "(heads, total_q)" : "(batch, heads, seqlen_q)", " = ", tuple_text(expected), ", got ",
                    shape_text(softmax_lse));
  check_fp32(name, softmax_lse);
  TORCH_CHECK_VALUE(softmax_lse.device() == q.device(), name, " must be on the device of q, ", q.device().str(),
                    ", got ", softmax_lse.device().str());
}

// What a backward is given of sinks and of the log-sum-exp's gradient, and writes.
struct ScoreGradients {
  std::optional<Tensor> dsoftmax_lse, dsinks;

  static constexpr auto kMembers = std::make_tuple(&ScoreGradients::dsoftmax_lse, &ScoreGradients::dsinks);
};

inline void check_score_gradients(const ScoreGradients& gradients, const ScoreArguments& scores, const Tensor& q,
                                  bool is_pack) {
  if (gradients.dsoftmax_lse) { check_softmax_lse("dsoftmax_lse", *gradients.dsoftmax_lse, q, is_pack); }
  if (!gradients.dsinks) { return; }
  TORCH_CHECK_VALUE(scores.sinks, "dsinks must be None where sinks is, got a tensor");
  check_sinks("dsinks", *gradients.dsinks, q);
  check_fp32("dsinks", *gradients.dsinks);
  TORCH_CHECK_VALUE(gradients.dsinks->sym_stride(0) == 1 || gradients.dsinks->sym_size(0) <= 1,
                    "dsinks must be contiguous, got strides ", tuple_text(gradients.dsinks->sym_strides()));
}

// What a backward reads and writes.
struct BackwardTensors {
  Tensor dout, q, k, v, out, softmax_lse;
  Tensor dq, dk, dv;  // written

  static constexpr auto kMembers =
      std::make_tuple(&BackwardTensors::dout, &BackwardTensors::q, &BackwardTensors::k, &BackwardTensors::v,
                      &BackwardTensors::out, &BackwardTensors::softmax_lse, &BackwardTensors::dq, &BackwardTensors::dk,
                      &BackwardTensors::dv);
};

inline void check_backward(const BackwardTensors& x, const PackTensors& pack, const ScoreArguments& scores,
                           const ScoreGradients& score_gradients, double softmax_scale, const MaskArguments& mask,
                           const SymInt& sm_margin) {
  check_operands(x.q, x.k, x.v, pack, scores, softmax_scale, mask, sm_margin);
  check_out("dout", x.dout, x.q, x.v);
  check_out("out", x.out, x.q, x.v);
  check_like("dq", x.dq, "q", x.q);
  check_like("dk", x.dk, "k", x.k);
  check_like("dv", x.dv, "v", x.v);
  check_writable("dq", x.dq);
  check_writable("dk", x.dk);
  check_writable("dv", x.dv);
  check_softmax_lse("softmax_lse", x.softmax_lse, x.q, pack.exists());
  check_score_gradients(score_gradients, scores, x.q, pack.exists());
}

// No two elements of what is written may share a place: along the dimensions, from the smallest stride on, each step
// goes past all that the smaller ones reach.
inline void check_apart_from_itself(const char* name, const Tensor& written) {
  std::array<std::pair<int64_t, int64_t>, 4> dimensions{};  // stride, size
  for (int i = 0; i < written.dim(); ++i) { dimensions[i] = {written.stride(i), written.size(i)}; }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 1;
  for (const auto& [stride, size] : dimensions) {
    if (size <= 1) { continue; }
    TORCH_CHECK_VALUE(stride >= reach, name, " must have one memory location per element, got strides ",
                      tuple_text(written.sym_strides()));
    reach += (size - 1) * stride;
  }
}

// What is written must be apart from all else. Exact for dense tensors; of others only equal starts are noticed.
inline void check_apart(const char* name, const Tensor& written, const char* other_name, const Tensor& other) {
  const auto status = at::get_overlap_status(written, other);
  const bool overlap = status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial ||
                       (written.numel() > 0 && written.const_data_ptr() == other.const_data_ptr());
  TORCH_CHECK_VALUE(!overlap, name, " must not share memory with ", other_name);
}

}  // namespace dash_attn
