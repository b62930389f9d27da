// Which elements of a tile are visible. Which tiles are live at all is decided in schedule/problem.h.
#pragma once

namespace dash_attn {

template <bool kCausal>
struct Mask {
  int seqlen_k;
  int last_minus_first;  // seqlen_k - seqlen_q: query i sees keys up to i + this (bottom-right alignment)

  // Is any element of the tile invisible? Query rows past the end need no mask: their LSE is +inf.
  __device__ __forceinline__ bool needs_masking(int first_query, int first_key, int keys) const {
    const bool past_end = first_key + keys > seqlen_k;
    return kCausal ? past_end || first_key + keys - 1 > first_query + last_minus_first : past_end;
  }

  // The keys that a query sees are the first so many; none where the number is not positive.
  __device__ __forceinline__ int visible_keys(int query) const {
    return kCausal ? min(seqlen_k, query + last_minus_first + 1) : seqlen_k;
  }

  __device__ __forceinline__ bool visible(int query, int key) const {
    return kCausal ? key < seqlen_k && key <= query + last_minus_first : key < seqlen_k;
  }
};

}  // namespace dash_attn
