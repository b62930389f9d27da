// What startend_row_indices must be. For each key, the tensor gives query rows that do not see the key, in addition to
// those from which the mask hides it (docs/masks.md has the rule).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "operand_checks.h"

namespace dash_attn {

// (batch, 1 or kv_heads, seqlen_k, bounds), without the batch in a variable-length batch.
inline void check_columns_shape(const Tensor& columns, const Tensor& k, bool is_pack) {
  const int64_t rank = is_pack ? 3 : 4;
  const SymInt kv_heads = k.sym_size(-2), rows = k.sym_size(-3);
  const bool fits = columns.dim() == rank && (is_pack || columns.sym_size(0) == k.sym_size(0)) &&
                    (columns.sym_size(-3) == 1 || columns.sym_size(-3) == kv_heads) && columns.sym_size(-2) == rows;
  TORCH_CHECK_VALUE(fits, "startend_row_indices must have shape ",
                    is_pack ? "(1 or kv_heads, total_k, n) = ("
                            : "(batch, 1 or kv_heads, seqlen_k, n) = (" + size_text(k.sym_size(0)) + ", ",
                    "1 or ", size_text(kv_heads), ", ", size_text(rows), ", n), got ", shape_text(columns));
}

inline void check_columns(const std::optional<Tensor>& given, const Tensor& q, const Tensor& k, const PackTensors& pack,
                          const MaskArguments& mask, const ScoreArguments& scores, double dropout_p) {
  if (!given) { return; }
  const Tensor& columns = *given;
  TORCH_CHECK_TYPE(columns.scalar_type() == at::kInt, "startend_row_indices must be torch.int32, got ",
                   dtype_text(columns));
  TORCH_CHECK_VALUE(columns.device() == q.device(), "startend_row_indices must be on the device of q, ",
                    q.device().str(), ", got ", columns.device().str());
  check_columns_shape(columns, k, pack.exists());
  const SymInt bounds = columns.sym_size(-1);
  TORCH_CHECK_VALUE(mask.causal ? bounds == 1 || bounds == 2 : bounds == 2 || bounds == 4,
                    "startend_row_indices must have a last dimension of ", mask.causal ? "1 or 2" : "2 or 4",
                    " with causal=", mask.causal ? "True" : "False", ", got ", size_text(bounds));
  TORCH_CHECK_NOT_IMPLEMENTED(dropout_p == 0, "dropout_p must be 0.0 with startend_row_indices, got ",
                              number_text(dropout_p));
  TORCH_CHECK_NOT_IMPLEMENTED(scores.softcap == 0, "softcap must be 0.0 with startend_row_indices, got ",
                              number_text(scores.softcap));
  TORCH_CHECK_NOT_IMPLEMENTED(!scores.alibi_slopes,
                              "alibi_slopes must be None with startend_row_indices, got a tensor of shape ",
                              shape_text(*scores.alibi_slopes));
}

inline void check_schedule_of_columns(const std::optional<Tensor>& columns, std::string_view schedule) {
  TORCH_CHECK_NOT_IMPLEMENTED(!columns || schedule == "auto" || schedule == "descending",
                              "schedule must be 'auto' or 'descending' with startend_row_indices, got '", schedule,
                              "'");
}

// As the kernels read it: the bounds of a key side by side, and the keys one after the other.
inline std::optional<Tensor> columns_for_kernels(const std::optional<Tensor>& given) {
  if (!given) { return given; }
  const int64_t bounds = given->size(-1);
  const bool fits = (bounds == 1 || given->stride(-1) == 1) && (given->size(-2) <= 1 || given->stride(-2) == bounds);
  return fits ? given : given->clone(at::MemoryFormat::Contiguous);
}

}  // namespace dash_attn
