// What the ops' tensors and numbers must be. Each message names the argument, what is allowed and what was given; a
// wrong kind of thing is a TypeError in Python, a wrong value or shape a ValueError. Sizes are symbolic under
// torch.compile.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "config/tile_shapes.h"
#include "schedule/automatic.h"
#include "schedule/policy.h"

namespace dash_attn {

using at::Tensor;
using c10::SymInt;

constexpr int kMaxHeadDim = 128;
constexpr int kHeadDimMultiple = 8;  // 16 bytes: what the kernels' loads step by
// Tile counts and ends are 32-bit in the kernels.
constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1;

// As Python prints a tuple.
inline std::string tuple_text(c10::SymIntArrayRef values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) { text += c10::str(i ? ", " : "", values[i]); }
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

inline void check_tensor(const char* name, const Tensor& tensor, const char* expected, int64_t rank) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, name, " must have shape ", expected, ", got ", tensor.dim(),
                    " dimensions: ", shape_text(tensor));
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kBFloat16 || dtype == at::kHalf, name, " must be torch.bfloat16 or torch.float16, got ",
                   dtype_text(tensor));
  const auto device = tensor.device();
  TORCH_CHECK_VALUE(device.is_cuda() || device.is_cpu() || device.is_meta(), name,
                    " must be on a CUDA, CPU or meta device, got ", device.str());
  // A symbolic length is checked when the graph runs: a bound here would narrow what torch.export may vary.
  const auto seqlen = tensor.sym_size(1).maybe_as_int();
  TORCH_CHECK_VALUE(!seqlen || *seqlen <= kMaxSeqlen, name, " must have a seqlen of at most ", kMaxSeqlen, ", got ",
                    *seqlen);
}

inline void check_same(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, " must have the dtype of ", like_name, ", ",
                   dtype_text(like), ", got ", dtype_text(tensor));
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, " must be on the device of ", like_name, ", ",
                    like.device().str(), ", got ", tensor.device().str());
}

inline void check_head_dim(const char* name, const Tensor& tensor) {
  const SymInt head_dim = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= kMaxHeadDim, name, " must have a head_dim from 1 to ", kMaxHeadDim,
                    ", got ", head_dim);
}

// Batch, heads and head_dim of keys and values against those of q; `tensor` is k, or kv in one tensor.
inline void check_kv_shape(const char* name, const Tensor& tensor, const Tensor& q) {
  TORCH_CHECK_VALUE(tensor.sym_size(0) == q.sym_size(0), name, " must have the batch size of q, ", q.sym_size(0),
                    ", got ", tensor.sym_size(0));
  TORCH_CHECK_VALUE(tensor.sym_size(-1) == q.sym_size(3), name, " must have the head_dim of q, ", q.sym_size(3),
                    ", got ", tensor.sym_size(-1));
  const SymInt heads = q.sym_size(2), kv_heads = tensor.sym_size(-2);
  TORCH_CHECK_VALUE(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0, name,
                    " must have a number of heads that divides the ", heads, " heads of q, got ", kv_heads);
}

inline void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v) {
  constexpr const char* kExpected = "(batch, seqlen, heads, head_dim)";
  check_tensor("q", q, kExpected, 4);
  check_tensor("k", k, kExpected, 4);
  check_tensor("v", v, kExpected, 4);
  check_same("k", k, "q", q);
  check_same("v", v, "q", q);
  check_head_dim("q", q);
  check_kv_shape("k", k, q);
  TORCH_CHECK_VALUE(v.sym_sizes() == k.sym_sizes(), "v must have the shape of k, ", shape_text(k), ", got ",
                    shape_text(v));
}

inline void check_kvpacked(const Tensor& q, const Tensor& kv) {
  constexpr const char* kExpected = "(batch, seqlen, 2, kv_heads, head_dim)";
  check_tensor("q", q, "(batch, seqlen, heads, head_dim)", 4);
  check_tensor("kv", kv, kExpected, 5);
  TORCH_CHECK_VALUE(kv.sym_size(2) == 2, "kv must have shape ", kExpected, ", got ", shape_text(kv));
  check_same("kv", kv, "q", q);
  check_head_dim("q", q);
  check_kv_shape("kv", kv, q);
}

inline void check_qkvpacked(const Tensor& qkv, const std::optional<SymInt>& num_heads_q) {
  if (!num_heads_q) {
    constexpr const char* kExpected = "(batch, seqlen, 3, heads, head_dim)";
    check_tensor("qkv", qkv, kExpected, 5);
    check_head_dim("qkv", qkv);
    TORCH_CHECK_VALUE(qkv.sym_size(2) == 3 && qkv.sym_size(3) >= 1, "qkv must have shape ", kExpected,
                      " with at least one head, got ", shape_text(qkv));
    return;
  }
  check_tensor("qkv", qkv, "(batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)", 4);
  check_head_dim("qkv", qkv);
  const SymInt rest = qkv.sym_size(2) - *num_heads_q;
  TORCH_CHECK_VALUE(*num_heads_q >= 1 && rest >= 2 && rest % 2 == 0 && *num_heads_q % (rest / 2) == 0,
                    "num_heads_q must be a positive multiple of kv_heads with num_heads_q + 2 * kv_heads equal to the ",
                    qkv.sym_size(2), " heads of qkv, got ", *num_heads_q);
}

// The kernels take the scale times log2(e), in fp32.
inline void check_softmax_scale(double softmax_scale) {
  TORCH_CHECK_VALUE(std::isfinite(softmax_scale), "softmax_scale must be a finite number or None, got ",
                    number_text(softmax_scale));
  constexpr double kLog2E = 1.4426950408889634;
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(static_cast<double>(static_cast<float>(softmax_scale)) * kLog2E)),
                    "softmax_scale * log2(e) must be finite in fp32, got softmax_scale=", number_text(softmax_scale));
}

inline void check_sm_margin(const SymInt& sm_margin) {
  TORCH_CHECK_VALUE(sm_margin >= 0, "sm_margin must be at least 0 and less than the SMs of the GPU, got ", sm_margin);
}

// The policy that a schedule's name means for this problem.
inline Policy resolve_schedule(std::string_view schedule, bool causal, int64_t head_dim, int64_t seqlen_k) {
  const MaskKind mask = mask_kind(causal);
  if (schedule == "auto") {
    return automatic_policy(mask, padded_head_dim(static_cast<int>(head_dim)), static_cast<int>(seqlen_k));
  }
  for (int i = 0; i < kNumDeterministicPolicies; ++i) {
    if (schedule == kPolicyNames[i] && fits(static_cast<Policy>(i), mask)) { return static_cast<Policy>(i); }
  }
  std::string allowed = "'auto'";
  for (int i = 0; i < kNumDeterministicPolicies; ++i) {
    if (fits(static_cast<Policy>(i), mask)) { allowed += c10::str(", '", kPolicyNames[i], "'"); }
  }
  TORCH_CHECK_VALUE(false, "schedule must be one of ", allowed, " when causal=", causal ? "True" : "False", ", got '",
                    schedule, "'");
}

inline void check_schedule(std::string_view schedule, bool causal) { resolve_schedule(schedule, causal, 1, 1); }

inline void check_operands(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale,
                           const SymInt& sm_margin) {
  check_qkv(q, k, v);
  TORCH_CHECK_VALUE(q.sym_size(3) % kHeadDimMultiple == 0, "q must have a head_dim that is a multiple of ",
                    kHeadDimMultiple, ", got ", q.sym_size(3));
  check_softmax_scale(softmax_scale);
  check_sm_margin(sm_margin);
}

inline void check_like(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == like.sym_sizes(), name, " must have the shape of ", like_name, ", ",
                    shape_text(like), ", got ", shape_text(tensor));
  check_same(name, tensor, like_name, like);
}

inline void check_writable(const char* name, const Tensor& gradient) {
  const auto sizes = gradient.sym_sizes(), strides = gradient.sym_strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK_VALUE(strides[i] != 0 || sizes[i] <= 1, name,
                      " must have one memory location per element, got strides ", tuple_text(strides));
  }
}

inline void check_softmax_lse(const Tensor& softmax_lse, const Tensor& q) {
  const std::array<SymInt, 3> expected = {q.sym_size(0), q.sym_size(2), q.sym_size(1)};
  TORCH_CHECK_VALUE(softmax_lse.sym_sizes() == c10::SymIntArrayRef(expected),
                    "softmax_lse must have shape (batch, heads, seqlen_q) = ", tuple_text(expected), ", got ",
                    shape_text(softmax_lse));
  TORCH_CHECK_TYPE(softmax_lse.scalar_type() == at::kFloat, "softmax_lse must be torch.float32, got ",
                   dtype_text(softmax_lse));
  TORCH_CHECK_VALUE(softmax_lse.device() == q.device(), "softmax_lse must be on the device of q, ", q.device().str(),
                    ", got ", softmax_lse.device().str());
}

inline void check_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                           const Tensor& softmax_lse, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                           double softmax_scale, bool causal, std::string_view schedule, const SymInt& sm_margin) {
  check_operands(q, k, v, softmax_scale, sm_margin);
  check_like("dout", dout, "q", q);
  check_like("out", out, "q", q);
  check_like("dq", dq, "q", q);
  check_like("dk", dk, "k", k);
  check_like("dv", dv, "v", v);
  check_writable("dq", dq);
  check_writable("dk", dk);
  check_writable("dv", dv);
  check_softmax_lse(softmax_lse, q);
  check_schedule(schedule, causal);
}

// No two elements of what is written may share a place: along the dimensions, from the smallest stride on, each step
// goes past all that the smaller ones reach.
inline void check_apart_from_itself(const char* name, const Tensor& written) {
  std::array<std::pair<int64_t, int64_t>, 4> dimensions;  // stride, size
  for (int i = 0; i < 4; ++i) { dimensions[i] = {written.stride(i), written.size(i)}; }
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
