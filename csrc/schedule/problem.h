// Tile counts and mask ranges of one attention problem: everything an order may depend on.
// Integer-only and trivially copyable (it is a kernel parameter): no CUDA, CuTe or torch.
#pragma once

#include <type_traits>

#include "../host_device.h"

namespace dash_attn {

DASH_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DASH_HOST_DEVICE constexpr int min_int(int a, int b) { return a < b ? a : b; }
DASH_HOST_DEVICE constexpr int max_int(int a, int b) { return a > b ? a : b; }

// Build it with make_problem, which fills the derived fields.
struct Problem {
  int batch;
  int kv_heads;
  int queries_per_kv;  // query heads that share one KV head
  int seqlen_q;
  int seqlen_k;
  int tile_q;        // queries in a tile
  int tile_k;        // keys in a tile
  int cta_group;     // C: CTAs of a cluster, each taking one KV tile of a claim
  bool causal;       // query i sees the keys j <= i + seqlen_k - seqlen_q (bottom right)
  int head_section;  // (batch, KV head, split)s whose claims are interleaved; changes who runs when, never an order
  int head_splits;   // parts that the query heads of a KV head are cut into, each with claims of its own: head_splits.h

  // Derived.
  int query_tiles;
  int kv_tiles;
  int diagonal;           // seqlen_k - seqlen_q
  int queries_per_claim;  // query heads of a split

  DASH_HOST_DEVICE constexpr int num_query_tiles() const { return query_tiles; }
  DASH_HOST_DEVICE constexpr int num_kv_tiles() const { return kv_tiles; }

  // First query tile with a row that sees a key of KV tile `kv`. The last query sees every key, so one always exists.
  DASH_HOST_DEVICE constexpr int first_query_tile(int kv) const {
    return causal ? max_int(0, kv * tile_k - diagonal) / tile_q : 0;
  }

  // The live query tiles of KV tile `kv` are the suffix [first_query_tile(kv), num_query_tiles()).
  DASH_HOST_DEVICE constexpr int live_query_tiles(int kv) const { return query_tiles - first_query_tile(kv); }

  // The KV tiles that contribute to query tile `q` are the prefix [0, live_kv_tiles(q)); none when q's rows see no key.
  DASH_HOST_DEVICE constexpr int live_kv_tiles(int q) const {
    if (!causal) return kv_tiles;
    int const last_key = min_int((q + 1) * tile_q, seqlen_q) - 1 + diagonal;
    return last_key < 0 ? 0 : last_key / tile_k + 1;
  }
};

static_assert(std::is_trivially_copyable_v<Problem> && std::is_standard_layout_v<Problem>);

// Lengths and tile sizes count from 1; a length plus a tile must stay below 2^31. head_splits divides queries_per_kv.
constexpr Problem make_problem(int batch, int kv_heads, int queries_per_kv, int seqlen_q, int seqlen_k, int tile_q,
                               int tile_k, int cta_group, bool causal, int head_section = 1, int head_splits = 1) {
  return Problem{batch,
                 kv_heads,
                 queries_per_kv,
                 seqlen_q,
                 seqlen_k,
                 tile_q,
                 tile_k,
                 cta_group,
                 causal,
                 head_section,
                 head_splits,
                 ceil_div(seqlen_q, tile_q),
                 ceil_div(seqlen_k, tile_k),
                 seqlen_k - seqlen_q,
                 queries_per_kv / head_splits};
}

}  // namespace dash_attn
