// `forward NAME=VALUE...` runs one call (call.h) of the forward on the host, linked with forward_kernels.cpp, and
// holds output and LSE against sums in double. Only rows that see a key of their KV tiles may show values that are
// NaN. Prints a digest of their bits, or what is wrong.
//
// With page_rows=N the keys of a pack lie in pages of N rows, and with table=0 each sequence has one page and there is
// no table. With step=1 all sequences have equally many queries, and the call has rows_q instead of cu_seqlens_q. It
// must do without a plan if all its tiles run at once. With wrong=1 lengths and entries of such a call lie outside of
// the cache, and its results are compared with those of the nearest numbers within.
//
// With max_logits=1 the kernel for masks by key columns serves the call and also finds the largest logit of each
// head and sequence, and a digest of these follows.
#include <algorithm>
#include <numeric>

#include "call.h"
#include "launch/column_plan.cu"
#include "launch/forward_plan.cu"

using namespace dash_attn;

namespace {

template <typename Element>
class ForwardCall : emulator::Call<Element> {
 public:
  using Base = emulator::Call<Element>;
  using Base::Base;

  void run() {
    this->prepare(a_);
    if (const int rows = int(this->number("page_rows", 0))) { put_into_pages(rows); }
    if (this->number("max_logits", 0) != 0) {
      largest_.resize(size_t(a_.batch) * a_.heads);
      expected_largest_.assign(largest_.size(), -INFINITY);
      a_.max_logits = largest_.data();
    }
    if (this->number("wrong", 0) != 0) {
      this->on_machines(a_, [&] { compare_wrong_numbers(); }, [&] { return digest(); }, [] {});
    } else {
      this->on_machines(a_, [&] { launch(); }, [&] { return digest(); }, [&] { check(); });
    }
  }

 private:
  void launch() {
    std::fill(this->out_.begin(), this->out_.end(), Element(NAN));
    std::fill(this->lse_.begin(), this->lse_.end(), NAN);
    std::fill(largest_.begin(), largest_.end(), -INFINITY);
    emulator::Workspace workspace;
    run_forward(a_, [&](int64_t bytes) { return workspace.take(bytes); }, nullptr);
  }

  std::string digest() const {
    std::string text = emulator::Digest().add(this->out_).add(this->lse_).text() + "\n";
    return largest_.empty() ? text : text + emulator::Digest().add(largest_).text() + "\n";
  }

  // Puts the keys and values of a pack into pages apart from each other, in no order, or, without a table, into the one
  // page that each sequence has. The rest is NaN.
  void put_into_pages(int page_rows) {
    const bool has_table = this->number("table", 1) != 0;
    const int distance = page_rows + 3;
    int most = 1, count = has_table ? 0 : a_.batch;
    for (const Sequence& s : this->lengths_) {
      const int pages = ceil_div(s.seqlen_k, page_rows);
      most = max_int(most, pages);
      if (has_table) { count += pages; }
    }
    std::vector<int> free(count);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), this->random_);
    constexpr int kNoPage = 1 << 29;
    table_.assign(size_t(a_.batch) * most, kNoPage);
    k_pages_.assign(size_t(count) * distance * a_.k.stride_seqlen, Element(NAN));
    v_pages_.assign(size_t(count) * distance * a_.v.stride_seqlen, Element(NAN));
    int first_k = 0;
    for (int i = 0; i < a_.batch; ++i) {
      const int keys = this->lengths_[i].seqlen_k;
      seqused_k_.push_back(keys);
      for (int key = 0; key < keys; ++key) {
        int& page = table_[size_t(i) * most + key / page_rows];
        if (!has_table) {
          page = i;
        } else if (key % page_rows == 0) {
          page = free.back();
          free.pop_back();
        }
        const size_t row = size_t(page) * distance + key % page_rows;
        const auto move = [&](std::vector<Element>& pages, const std::vector<Element>& rows, int64_t stride) {
          std::copy_n(rows.begin() + (first_k + key) * stride, stride, pages.begin() + row * stride);
        };
        move(k_pages_, this->k_, a_.k.stride_seqlen);
        move(v_pages_, this->v_, a_.v.stride_seqlen);
      }
      first_k += keys;
    }
    a_.k.data = k_pages_.data();
    a_.v.data = v_pages_.data();
    a_.seqlen_k = count * distance;
    a_.pack.cu_seqlens_k = nullptr;
    a_.pack.seqused_k = seqused_k_.data();
    a_.pages = {has_table ? table_.data() : nullptr, most, Divisor(page_rows), distance, count};
    if (this->number("step", 0) != 0) {
      a_.pack.rows_q = this->lengths_[0].seqlen_q;
      a_.pack.cu_seqlens_q = nullptr;
    }
  }

  // Numbers outside of the cache have the results of the nearest ones within.
  void compare_wrong_numbers() {
    for (auto* pages : {&k_pages_, &v_pages_}) {
      for (size_t i = 0; i < pages->size(); ++i) { (*pages)[i] = Element(float(i * 7 % 31) / 16 - 1); }
    }
    const int capacity = a_.pages.capacity(), last = a_.pages.num_pages - 1;
    const auto set = [](std::vector<int>& numbers, const std::vector<int>& values) {
      for (size_t i = 0; i < numbers.size(); ++i) { numbers[i] = values[i % values.size()]; }
    };
    set(seqused_k_, {capacity, 0, capacity});
    set(table_, {0, last, last, 0});
    launch();
    const std::string expected = digest();
    set(seqused_k_, {capacity + 1, -5, INT32_MAX});
    set(table_, {-1, last + 1, INT32_MAX, INT32_MIN});
    launch();
    if (digest() != expected) { emulator::fail("numbers outside of the cache have other results than the nearest"); }
  }

  void check() {
    this->for_queries(a_, [&](int sequence, int head, int query, int row_q, int first_k, float lse) {
      check_row(sequence, head, query, row_q, first_k, lse);
    });
    check_largest();
  }

  void check_largest() const {
    for (size_t i = 0; i < largest_.size(); ++i) {
      const double expected = expected_largest_[i] == INFINITY ? NAN : expected_largest_[i], found = largest_[i];
      if (expected == found || (std::isnan(expected) && std::isnan(found)) ||
          std::abs(expected - found) <= 1e-4 * std::max(1.0, std::abs(expected))) {
        continue;
      }
      emulator::fail("the largest logit of sequence " + std::to_string(i / a_.heads) + ", head " +
                     std::to_string(i % a_.heads) + " is " + std::to_string(found) + " for " +
                     std::to_string(expected));
    }
  }

  // NaN stays.
  void expect_logits(int sequence, int head, const std::vector<double>& logits) {
    if (expected_largest_.empty()) { return; }
    double& largest = expected_largest_[size_t(sequence) * a_.heads + head];
    for (double logit : logits) {
      if (std::isnan(logit) || logit > largest) { largest = logit; }
    }
  }

  void check_row(int sequence, int head, int query, int row_q, int first_k, float lse) {
    const int value_dim = a_.head_dims.v, kv_head = head / a_.group_size();
    const typename Base::Row row = this->row_of(a_, sequence, head, query, row_q, first_k);
    expect_logits(sequence, head, row.scores);
    const Element* out = this->out_.data() + (size_t(row_q) * a_.heads + head) * value_dim;
    const auto wrong = [&](const std::string& what, double expected, double found) {
      if (expected == found || std::abs(expected - found) <= 0.02 * std::max(1.0, std::abs(expected))) { return; }
      emulator::fail(what + " of sequence " + std::to_string(sequence) + ", head " + std::to_string(head) +
                     ", query " + std::to_string(query) + " is " + std::to_string(found) + " for " +
                     std::to_string(expected));
    };
    if (row_q == this->nan_query() && head == 0 && !row.scores.empty()) {
      if (!std::isnan(lse) || !std::isnan(float(out[0]))) { emulator::fail("the row of a NaN query is a number"); }
      return;
    }
    if (!row.scores.empty() && row.largest == -INFINITY) {
      wrong("the log-sum-exp", -INFINITY, lse);
      if (!std::isnan(float(out[0]))) {
        emulator::fail("the output of a row whose scores are all -inf is a number");
      }
      return;
    }
    if (row.largest == INFINITY) {
      if (!std::isnan(lse) || !std::isnan(float(out[0]))) { emulator::fail("a row with a score of +inf is a number"); }
      return;
    }
    wrong("the log-sum-exp", row.lse(a_), lse);
    if (may_be_nan(sequence, kv_head, query, row.keys, first_k)) { return; }
    std::vector<double> expected(value_dim);
    for (size_t i = 0; i < row.scores.size(); ++i) {
      const int key = row.keys.first + int(i);
      if (row.scores[i] == -INFINITY || (a_.drops() && !this->kept(a_, sequence, head, query, key))) { continue; }
      const double p = std::exp(row.scores[i] - row.largest) / row.sum * (a_.drops() ? 1 / (1 - a_.dropout.p) : 1);
      const size_t place = size_t(first_k + key) * a_.kv_heads + kv_head;
      emulator::add(expected.data(), p, this->exact_v_.data() + place * value_dim, value_dim);
    }
    for (int d = 0; d < value_dim; ++d) { wrong("column " + std::to_string(d), expected[d], float(out[d])); }
  }

  // Whether values that are NaN may spoil a query, which sees some of `keys`. Under a mask by key columns they may if
  // the first of their KV tiles is between the first and the last that a query of the block of 64 sees.
  bool may_be_nan(int sequence, int kv_head, int query, const Range& keys, int first_k) const {
    const int tile_rows = forward_tile_shape(emulator::kRow).key;
    if (this->nan_keys_.count == 0) { return false; }
    const int nan_tile = this->nan_keys_.first / tile_rows;
    if (!a_.has_columns()) { return keys.end() > nan_tile * tile_rows; }
    const Sequence& lengths = this->lengths_[sequence];
    const int first = query / kPartRows * kPartRows, end = min_int(first + kPartRows, lengths.seqlen_q);
    int first_tile = kUnbounded, last_tile = -1;
    for (int q = first; q < end; ++q) {
      const Range seen = mask_of(a_.mask, lengths).keys_of(q);
      for (int key = seen.first; key < seen.end(); ++key) {
        if (this->hidden(a_, sequence, kv_head, q, key, first_k)) { continue; }
        first_tile = min_int(first_tile, key / tile_rows);
        last_tile = max_int(last_tile, key / tile_rows);
      }
    }
    return first_tile <= nan_tile && nan_tile <= last_tile;
  }

  ForwardArguments a_{};
  std::vector<int> table_, seqused_k_;
  std::vector<Element> k_pages_, v_pages_;
  std::vector<float> largest_;
  std::vector<double> expected_largest_;
};

}  // namespace

namespace dash_attn {

void require_self_check() {}

void launch_pack_plan(const ForwardPlan& plan, cudaStream_t) {
  if (plan.call.pack.rows_q > 0 && plan.kernel->serves_steps[plan.call.pages.exists()] &&
      num_tiles(plan.params.scheduler) <= plan.call.num_sms) {
    emulator::fail("a step whose tiles all run at once has a plan");
  }
  emulator::plan_pack_of(plan.call, plan.pack_rule, plan.pack);
  if (plan.call.reads_cache()) {
    for (int i = 0; i < plan.call.batch; ++i) {
      PackedSequence& s = plan.pack.sequences[i];
      s.end_k = s.number * plan.call.pages.page_distance + s.lengths.seqlen_k;
    }
  }
  *plan.params.tiles_taken = 0;
}

void launch_cache_check(const ForwardPlan& plan, cudaStream_t) {
  if (plan.ctas != num_tiles(plan.params.scheduler)) { emulator::fail("a step without a plan has no CTA for a tile"); }
}

}  // namespace dash_attn

int main(int count, char** arguments) { emulator::run<ForwardCall>(count, arguments); }
