// Arguments of ops that belong together (flat_arguments.h), for both of torch's C++ APIs: `Tensor` is at::Tensor or the
// stable ABI's. Between the ops' schemas (autograd.cpp) and the kernels, an argument is named only where it is checked
// and where it gets its meaning.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "contract/mask.h"

namespace dash_attn {

// Which keys a query sees, as FlashAttention's arguments say it; mask_rule (csrc/contract/mask.h) gives them their
// meaning.
struct WindowArguments {
  int64_t left = -1, right = -1;  // keys before and after the query's own; negative: no bound
  int64_t attention_chunk = 0;    // 0: no chunks

  static constexpr auto kMembers =
      std::make_tuple(&WindowArguments::left, &WindowArguments::right, &WindowArguments::attention_chunk);

  bool is_default() const {
    return std::apply([&](auto... m) { return (... && (this->*m == WindowArguments{}.*m)); }, kMembers);
  }

  // The members, as autograd saves them for the backward.
  std::vector<int64_t> numbers() const {
    return std::apply([&](auto... m) { return std::vector<int64_t>{this->*m...}; }, kMembers);
  }
  static WindowArguments of(const std::vector<int64_t>& numbers) {
    WindowArguments window;
    auto next = numbers.begin();
    std::apply([&](auto... m) { (..., (window.*m = *next++)); }, kMembers);
    return window;
  }
};

struct MaskArguments {
  bool causal = false;
  WindowArguments window;

  MaskRule rule() const { return mask_rule(causal, window.left, window.right, window.attention_chunk); }

  static constexpr auto kMembers = std::make_tuple(&MaskArguments::causal, &MaskArguments::window);
};

// Where the sequences of a pack are in its rows. A dense batch has none of these.
template <class Tensor>
struct PackTensorsOf {
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;

  bool exists() const { return cu_seqlens_q.has_value(); }

  static constexpr auto kMembers = std::make_tuple(&PackTensorsOf::cu_seqlens_q, &PackTensorsOf::cu_seqlens_k,
                                                   &PackTensorsOf::seqused_q, &PackTensorsOf::seqused_k);
};

// Where the keys of a batch lie in a cache (csrc/placement/sequences.h), and how many each sequence has. Without a
// table, sequence i has page i.
template <class Tensor>
struct CacheOf {
  std::optional<Tensor> block_table;  // int32 (batch, max_pages)
  Tensor seqused_k;                   // int32 (batch,)
  int64_t page_rows, page_distance;

  static constexpr auto kMembers = std::make_tuple(&CacheOf::block_table, &CacheOf::seqused_k, &CacheOf::page_rows,
                                                   &CacheOf::page_distance);
};

// Logits beside a row's scores, and what is subtracted from scores.
template <class Tensor>
struct ScoreTensorsOf {
  std::optional<Tensor> sinks, alibi_slopes;

  static constexpr auto kMembers = std::make_tuple(&ScoreTensorsOf::sinks, &ScoreTensorsOf::alibi_slopes);
};

// The bits that say which probabilities are kept (csrc/dropout/mask.h), or the state that the bits are made of; neither
// where p is 0.
template <class Tensor>
struct DropoutOf {
  std::optional<Tensor> bits, rng_state;
  double p = 0;

  bool exists() const { return p != 0 || bits || rng_state; }

  static constexpr auto kMembers = std::make_tuple(&DropoutOf::bits, &DropoutOf::rng_state, &DropoutOf::p);
};

}  // namespace dash_attn
