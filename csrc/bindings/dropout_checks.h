// What a call is told of dropout, and what it must be.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

#include "dropout/mask.h"
#include "operand_checks.h"

namespace dash_attn {

using KernelDropout = DropoutOf<Tensor>;

// An op with a derivative may be given both: then the bits are those of the state, which the backward makes again. A
// pack with a state has the most rows that a sequence may have.
struct DropoutArguments : KernelDropout {
  std::optional<SymInt> max_seqlen_q, max_seqlen_k;

  DropoutArguments of_forward() const {
    DropoutArguments result = *this;
    if (bits) { result.rng_state = std::nullopt; }
    return result;
  }
  DropoutArguments of_backward() const {
    DropoutArguments result = *this;
    if (rng_state) { result.bits = std::nullopt; }
    return result;
  }

  static constexpr auto kMembers = std::tuple_cat(
      KernelDropout::kMembers, std::make_tuple(&DropoutArguments::max_seqlen_q, &DropoutArguments::max_seqlen_k));
};

inline void check_dropout_bits(const Tensor& bits, const Tensor& q, const Tensor& k, const PackTensors& pack) {
  constexpr const char* kName = "dropout_bits";
  TORCH_CHECK_TYPE(bits.scalar_type() == at::kByte, kName, " must be torch.uint8, got ", dtype_text(bits));
  const auto blocks = [](const SymInt& seqlen) { return (seqlen + (dropout::kBlockRows - 1)) / dropout::kBlockRows; };
  const bool is_pack = pack.exists();
  const SymInt batch = batch_size(q, pack), heads = q.sym_size(-2);
  bool fits = bits.dim() == 5 && bits.sym_size(0) == batch && bits.sym_size(1) == heads &&
              bits.sym_size(4) == dropout::kBlockBytes;
  // The lengths of a pack are the device's to know.
  if (fits && !is_pack) {
    fits = bits.sym_size(2) == blocks(q.sym_size(1)) && bits.sym_size(3) == blocks(k.sym_size(1));
  }
  TORCH_CHECK_VALUE(fits, kName, " must have shape (batch, heads, ceil(seqlen_q / 32), ceil(seqlen_k / 32), 128) = (",
                    size_text(batch), ", ", size_text(heads), ", ",
                    is_pack ? "of the longest sequence, of the longest sequence"
                            : size_text(blocks(q.sym_size(1))) + ", " + size_text(blocks(k.sym_size(1))),
                    ", 128), got ", shape_text(bits));
  TORCH_CHECK_VALUE(bits.is_contiguous(), kName, " must be contiguous, got strides ", tuple_text(bits.sym_strides()));
  TORCH_CHECK_VALUE(bits.device() == q.device(), kName, " must be on the device of q, ", q.device().str(), ", got ",
                    bits.device().str());
}

inline void check_rng_state(const Tensor& state, const Tensor& q, const PackTensors& pack) {
  TORCH_CHECK_TYPE(state.scalar_type() == at::kLong, "rng_state must be torch.int64, got ", dtype_text(state));
  const SymInt batch = batch_size(q, pack);
  const bool of_all = state.dim() == 1 && state.sym_size(0) == 2;
  const bool of_sequences = state.dim() == 2 && state.sym_size(0) == batch && state.sym_size(1) == 2;
  TORCH_CHECK_VALUE(of_all || of_sequences, "rng_state must have shape (2,) or (batch, 2) = (", size_text(batch),
                    ", 2), got ", shape_text(state));
  TORCH_CHECK_VALUE(state.device() == q.device(), "rng_state must be on the device of q, ", q.device().str(), ", got ",
                    state.device().str());
  TORCH_CHECK_VALUE(batch <= dropout::kMaxSequences && q.sym_size(-2) <= dropout::kMaxHeads, "q must have at most ",
                    size_text(dropout::kMaxSequences), " sequences and ", size_text(dropout::kMaxHeads),
                    " heads with dropout, got ", size_text(batch), " and ", size_text(q.sym_size(-2)));
}

inline void check_max_seqlen(const char* name, const std::optional<SymInt>& most) {
  const std::optional<int64_t> known = most ? most->maybe_as_int() : std::nullopt;
  TORCH_CHECK_VALUE(most && (!known || *known >= 0), name,
                    " must be an int of at least 0 with rng_state in a variable-length batch, got ",
                    most ? size_text(*most) : "None");
}

// Of a pack on the CPU, where lengths may be read; on a GPU its plan refuses a sequence beyond the bits.
inline void check_longest(const char* name, const SymInt& most, const Tensor& cu_seqlens,
                          const std::optional<Tensor>& seqused, int64_t rows) {
  const Tensor lengths = seqused ? *seqused : cu_seqlens.diff();
  // Offsets beyond the rows have an error of their own.
  if (lengths.numel() == 0 || cu_seqlens[-1].item<int64_t>() > rows) { return; }
  const int64_t longest = lengths.max().item<int64_t>();
  TORCH_CHECK_VALUE(most >= longest, name, " must be at least the length of the longest sequence with dropout, ",
                    size_text(longest), ", got ", size_text(most));
}

inline void check_dropout(const DropoutArguments& given, const ScoreArguments& scores, const Tensor& q, const Tensor& k,
                          const PackTensors& pack) {
  if (!given.exists()) { return; }
  TORCH_CHECK_VALUE(given.p > 0 && static_cast<float>(given.p) < 1,
                    "dropout_p must be above 0 and below 1 in fp32 where dropout_bits or rng_state is given, got ",
                    number_text(given.p));
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_for_gpu(q) || (!scores.alibi_slopes && scores.softcap == 0),
      "dropout_p must be 0.0 with softcap or alibi_slopes on a GPU (no kernel combines them), got ",
      number_text(given.p));
  TORCH_CHECK_VALUE(given.bits.has_value() != given.rng_state.has_value(),
                    "dropout_bits and rng_state: exactly one must be given with dropout_p above 0, got ",
                    given.bits ? "both" : "neither");
  if (given.bits) {
    check_dropout_bits(*given.bits, q, k, pack);
  } else {
    check_rng_state(*given.rng_state, q, pack);
    if (pack.exists()) {
      check_max_seqlen("max_seqlen_q", given.max_seqlen_q);
      check_max_seqlen("max_seqlen_k", given.max_seqlen_k);
    }
  }
}

}  // namespace dash_attn
