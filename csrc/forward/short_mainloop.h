// The consumer of short query tiles, which have rows for one warpgroup: decoding, and calls with few rows. The sums are
// those of mainloop.h, in the same order, and so are their bits. No other warpgroup's products fill the time in which
// this one computes, so the scores of a KV tile are computed while the previous tile's are exponentiated:
//
//   tensor cores:   | P(j+1) V(j+1)     S(j-1)                                 |
//   threads:        | wait for S(j)   reference, P(j) | wait for P V | O *= correction(j) if any, round P(j) |
//
// The threads then take about as long as the tensor cores. A thread has two rows of the tile. In decoding, the second
// one often does not exist and is left out.
#pragma once

#include "mainloop.h"

namespace dash_attn::forward {

template <typename Variant>
class ShortConsumer : Consumer<Variant> {
  using Base = Consumer<Variant>;
  using typename Base::Output;
  using typename Base::PackedScores;
  using typename Base::Rows;
  using typename Base::Scores;
  using typename Base::Softmax;
  static_assert(Variant::kConsumers == 1 && !Variant::kHasColumns && Variant::Score::serves(ScoreKind::kPlain));
  static_assert(!Variant::kOutputInValues);

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    for (;; this->q_ = this->q_.next()) {
      const int end = this->next_tile();
      if (end == kNoMoreTiles) { return; }
      const Sequence sequence = this->sequence_of_tile();
      const Rows rows(this->params_, sequence, end, 0, this->loaded_tiles(sequence, end), {});
      Output out;
      Softmax softmax(this->params_.score);
      clear(out);
      if (rows.kv.count > 0) {
        const int positions = rows.last_position(this->params_) + 1 - rows.first_position;
        if (positions << this->params_.scheduler.group_shift <= kRowsOfFirst) {
          walk<1>(out, softmax, rows);
        } else {
          walk<kRowsPerThread>(out, softmax, rows);
        }
      }
      this->store(out, softmax, rows, this->q_);
    }
  }

 private:
  static constexpr int kRowsOfFirst = 8;  // the tile's rows that are a thread's first row

  // Walks the KV tiles of the rows from the last to the first. The rows see every key before the first tile that is not
  // seen whole: calls with other masks have no short tiles.
  template <int kRows>
  __device__ __forceinline__ void walk(Output& out, Softmax& softmax, const Rows& rows) {
    PackedScores p;
    Scores s, ahead;
    const int whole_end = rows.kv_seen_whole(this->params_).end();
    int kv_tile = rows.kv.end() - 1;
    begin<kRows>(p, softmax, rows, s, kv_tile >= whole_end);
    if (kv_tile > rows.kv.first) {
      this->wait_for_k();
      this->issue_s(s);
      while (true) {
        step_ahead<kRows>(out, p, softmax, rows, s, ahead, --kv_tile, whole_end);
        if (kv_tile == rows.kv.first) {
          wait_products<0>();
          fence_operand(ahead);
          break;
        }
        step_ahead<kRows>(out, p, softmax, rows, ahead, s, --kv_tile, whole_end);
        if (kv_tile == rows.kv.first) {
          wait_products<0>();
          fence_operand(s);
          break;
        }
      }
      arrive_once(this->shared_.k_empty[this->k_.slot()]);
      this->k_ = this->k_.next();
    }
    this->issue_out(out, p);
    this->complete_out(out, p);
  }

  template <int kRows>
  __device__ __forceinline__ void begin(PackedScores& p, Softmax& softmax, const Rows& rows, Scores& s, bool masked) {
    this->wait_for_k();
    this->issue_s(s);
    wait_products<0>();
    this->release_k(s);
    if (masked) { hide_keys_after<kRows>(s, rows, this->params_, rows.kv.end() - 1, this->thread_); }
    softmax.start(s);
    softmax.template subtract_reference<kRows>(s);
    softmax.template exponentiate<kRows>(s, false, {});
    softmax.set_limits(false);
    this->shared_.v_full[this->v_.slot()].wait(this->v_.parity());
    pack_slices<typename Base::Element>(p, s);
  }

  // `s`: the products of the rows with the keys of a KV tile, which are being computed. `ahead` becomes those with the
  // next one, if there is one. KV tiles from `whole_end` on are masked.
  template <int kRows>
  __device__ __forceinline__ void step_ahead(Output& out, PackedScores& p, Softmax& softmax, const Rows& rows,
                                             Scores& s, Scores& ahead, int kv_tile, int whole_end) {
    const bool has_next = kv_tile > rows.kv.first;
    this->issue_out(out, p);
    const auto k = this->k_;
    if (has_next) {
      this->k_ = k.next();
      this->wait_for_k();
    }
    // Without a next tile, S of this K is computed again, because ptxas serializes conditional products.
    this->issue_s(ahead);
    wait_products<2>();
    fence_operand(s);
    if (has_next) { arrive_once(this->shared_.k_empty[k.slot()]); }
    if (kv_tile >= whole_end) { hide_keys_after<kRows>(s, rows, this->params_, kv_tile, this->thread_); }
    RowStatistic correction;
    const bool corrects = softmax.template follow<kRows>(s, correction, false);
    softmax.template subtract_reference<kRows>(s);
    softmax.template exponentiate<kRows>(s, corrects, correction);
    fence_operand(s);
    this->wait_for_next_v();  // ends the basic block: ptxas would move the exponentials past the wait for products
    this->template complete_out<1>(out, p);
    if (__builtin_expect(corrects, false)) { correct_rows(out, correction); }
    pack_slices<typename Base::Element>(p, s);
  }
};

}  // namespace dash_attn::forward
