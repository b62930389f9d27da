// A call on random inputs, as NAME=VALUE options describe it:
//
//   dtype=bf16|fp16 mask=full|causal|window left= right= chunk= batch= seqlen_q= seqlen_k= heads= kv_heads= head_dim=
//   value_head_dim= pack=Q:K,Q:K,...  sinks=1 softcap= slopes=1 dropout= scale=
//   finishes_dq=0|1: whether who adds last makes dQ; short_tiles=1: short query tiles wherever they are possible
//   sms=N,... seed=N,...: the machines, one after the other, which must find the same bits
//   infinite_key=, infinite_keys=, infinite_sign=1: keys of sequence 0 whose scores are all -inf, or +inf;
//   nan_value=, nan_values=: values that are NaN; nan_query=: a query whose head 0 is NaN;
//   climb=, climb_keys=, climb_from=: products that are less by `climb` with every `climb_keys` keys, from `climb_from`
//   on, and the opposite in every other `climb_rows` rows; climb_alone=1: and nothing else
//   columns=random|documents|prefix|nothing per_key=1|2|4 mask_heads= document=: a mask by key columns; documents
//   have so many rows, and a prefix is seen by all others
//
// Inputs do not depend on the machine.
#pragma once

#include <cmath>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "bindings/host_pack_plan.h"
#include "device/elements.h"
#include "dropout/mask.h"
#include "launch/tensor_map.cu"
#include "launch/workspace.h"
#include "machine.h"
#include "tensor_of_map.h"

inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* found) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode =
      [](CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
         const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
        auto* const tensor = new TensorOfMap{};  // as long as the program
        tensor->data = static_cast<char*>(data);
        for (cuuint32_t d = 0; d < rank; ++d) {
          tensor->sizes[d] = sizes[d];
          tensor->strides[d] = d == 0 ? 2 : strides[d - 1];
          tensor->box[d] = box[d];
        }
        tensor->swizzle_rows = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 8 : 4;
        map->tensor = tensor;
        return CUDA_SUCCESS;
      };
  *function = reinterpret_cast<void*>(encode);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

namespace emulator {

using namespace dash_attn;

extern const HeadDims kRow;  // of the table of tiles, which the kernels are for

using Options = std::map<std::string, std::string>;

inline Options read_options(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    options[argument.substr(0, argument.find('='))] = argument.substr(argument.find('=') + 1);
  }
  return options;
}

// What the program `TheCall` does, for the options' dtype.
template <template <typename> typename TheCall>
void run(int count, char** arguments) {
  const Options options = read_options(count, arguments);
  const auto dtype = options.find("dtype");
  if (dtype != options.end() && dtype->second == "fp16") {
    TheCall<fp16>(options).run();
  } else {
    TheCall<bf16>(options).run();
  }
}

// Memory as the workspace wants it.
class Workspace {
 public:
  void* take(size_t bytes) {
    constexpr size_t kAlignment = 128;
    constexpr uint32_t kNanAndLarge = 0x7fd55555;  // shows in a sum of floats, and of integers
    memory_.assign((bytes + kAlignment) / sizeof(uint32_t) + 1, kNanAndLarge);
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.data()) + kAlignment - 1) / kAlignment *
                                   kAlignment);
  }

 private:
  std::vector<uint32_t> memory_;
};

// FNV-1a of the bits of arrays.
class Digest {
 public:
  template <typename T>
  Digest& add(const std::vector<T>& array) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(array.data());
    for (size_t i = 0; i < array.size() * sizeof(T); ++i) { value_ = (value_ ^ bytes[i]) * 1099511628211u; }
    return *this;
  }
  std::string text() const {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(value_));
    return digits;
  }

 private:
  uint64_t value_ = 1469598103934665603u;
};

// Sums of head dims, which are multiples of eight.
using Eight = double __attribute__((vector_size(64)));

inline Eight eight(const double* numbers) {
  Eight found;
  std::memcpy(&found, numbers, sizeof(found));
  return found;
}

inline double product(const double* a, const double* b, int count) {
  Eight sum = {};
  for (int i = 0; i < count; i += 8) { sum += eight(a + i) * eight(b + i); }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

inline void add(double* sums, double factor, const double* numbers, int count) {
  for (int i = 0; i < count; i += 8) {
    const Eight sum = eight(sums + i) + factor * eight(numbers + i);
    std::memcpy(sums + i, &sum, sizeof(sum));
  }
}

template <typename Element>
std::vector<double> doubles(const std::vector<Element>& elements) {
  std::vector<double> found;
  for (Element x : elements) { found.push_back(float(x)); }
  return found;
}

// The inputs and outputs of a forward, and what a query sees of them.
template <typename Element>
class Call {
 public:
  explicit Call(const Options& options) : options_(options), random_(7) {}

 protected:
  double number(const char* name, double otherwise) const {
    const auto found = options_.find(name);
    return found == options_.end() ? otherwise : std::stod(found->second);
  }
  std::string text(const char* name, const char* otherwise) const {
    const auto found = options_.find(name);
    return found == options_.end() ? otherwise : found->second;
  }

  std::vector<int> numbers(const char* name, const char* otherwise) const {
    std::vector<int> found;
    std::istringstream stream(text(name, otherwise));
    for (std::string item; std::getline(stream, item, ',');) { found.push_back(std::stoi(item)); }
    return found;
  }

  // Launches on each machine. What the first one finds is checked; the others must find the same bits.
  template <typename Launch, typename Bits, typename Check>
  void on_machines(AttentionArguments& a, Launch&& launch, Bits&& bits, Check&& check) {
    const std::vector<int> sms = numbers("sms", "4"), seeds = numbers("seed", "0");
    if (seeds.empty() || (sms.size() != 1 && sms.size() != seeds.size())) { fail("sms= does not go with seed="); }
    std::string expected;
    for (size_t i = 0; i < seeds.size(); ++i) {
      a.num_sms = sms[i % sms.size()];
      Machine on(seeds[i]);
      machine = &on;
      machine_text = ", on " + std::to_string(a.num_sms) + " SMs with seed " + std::to_string(seeds[i]);
      launch();
      const std::string found = bits();
      if (found != expected) { check(); }
      if (i > 0 && found != expected) { fail("the bits are not those of the first machine"); }
      expected = found;
    }
    std::fputs(expected.c_str(), stdout);
  }

  void prepare(AttentionArguments& a) {
    if (const int choice = int(number("finishes_dq", -1)); choice >= 0) { finishes_dq = choice == 1; }
    has_short_tiles = number("short_tiles", 0) != 0;
    const std::string pack = text("pack", "");
    a.heads = int(number("heads", 1));
    a.kv_heads = int(number("kv_heads", a.heads));
    a.head_dims = {int(number("head_dim", kRow.qk)), int(number("value_head_dim", kRow.v))};
    a.dtype = std::is_same_v<Element, bf16> ? Dtype::kBFloat16 : Dtype::kFloat16;
    if (pack.empty()) {
      a.batch = int(number("batch", 1));
      a.seqlen_q = int(number("seqlen_q", 100));
      a.seqlen_k = int(number("seqlen_k", a.seqlen_q));
      lengths_.assign(a.batch, {a.seqlen_q, a.seqlen_k});
    } else {
      std::istringstream stream(pack);
      for (std::string item; std::getline(stream, item, ',');) {
        const size_t colon = item.find(':');
        lengths_.push_back({std::stoi(item), std::stoi(item.substr(colon + 1))});
      }
      a.batch = int(lengths_.size());
      for (const Sequence& s : lengths_) {
        cu_q_.push_back(cu_q_.back() + s.seqlen_q);
        cu_k_.push_back(cu_k_.back() + s.seqlen_k);
      }
      a.seqlen_q = cu_q_.back();
      a.seqlen_k = cu_k_.back();
      a.pack = {cu_q_.data(), cu_k_.data(), nullptr, nullptr};
    }
    const int batch_of_rows = pack.empty() ? a.batch : 1;
    const int rows_q = batch_of_rows * a.seqlen_q, rows_k = batch_of_rows * a.seqlen_k;
    fill(q_, a.q, rows_q, a.seqlen_q, a.heads, a.head_dims.qk);
    fill(k_, a.k, rows_k, a.seqlen_k, a.kv_heads, a.head_dims.qk);
    fill(v_, a.v, rows_k, a.seqlen_k, a.kv_heads, a.head_dims.v);
    fill(out_, a.out, rows_q, a.seqlen_q, a.heads, a.head_dims.v);
    const int infinite = int(number("infinite_key", 0)), nan = int(number("nan_value", 0));
    const int infinite_end = infinite + int(number("infinite_keys", 0)), nan_end = nan + int(number("nan_values", 0));
    const float infinity = number("infinite_sign", -1) > 0 ? INFINITY : -INFINITY;
    if (infinite_end > infinite) {
      for (size_t i = 0; i < q_.size(); i += a.head_dims.qk) { q_[i] = Element(1.f); }
    }
    for (int key = infinite; key < infinite_end; ++key) {
      for (int h = 0; h < a.kv_heads; ++h) {
        Element* row = k_.data() + (size_t(key) * a.kv_heads + h) * a.head_dims.qk;
        for (int d = 0; d < a.head_dims.qk; ++d) { row[d] = Element(d == 0 ? infinity : 0.f); }
      }
    }
    if (const int climb_keys = int(number("climb_keys", 0)); climb_keys > 0) {
      const int rows = int(number("climb_rows", 0));
      if (number("climb_alone", 0) != 0) { std::fill(q_.begin(), q_.end(), Element(0.f)); }
      for (size_t i = 0; i < q_.size(); i += a.head_dims.qk) {
        const int query = int(i / a.head_dims.qk) / a.heads;
        q_[i] = Element(rows > 0 && query / rows % 2 == 1 ? -1.f : 1.f);
      }
      for (size_t i = 0; i < k_.size(); i += a.head_dims.qk) {
        const int key = int(i / a.head_dims.qk) / a.kv_heads;
        k_[i] = Element(float(number("climb_from", 0) - number("climb", 0) * (key / climb_keys)));
      }
    }
    if (const int head = int(number("tiny_head", -1)); head >= 0) {  // so tiny that dQ has no units
      for (size_t i = 0; i < v_.size(); ++i) {
        if (int(i / a.head_dims.v % a.kv_heads) == head) { v_[i] = Element(float(v_[i]) * 1e-32f); }
      }
    }
    const int value_row = a.kv_heads * a.head_dims.v;
    for (int i = nan * value_row; i < nan_end * value_row; ++i) { v_[i] = Element(NAN); }
    nan_keys_ = {nan, nan_end - nan};
    if (nan_query() >= 0) { q_[size_t(nan_query()) * a.heads * a.head_dims.qk] = Element(NAN); }
    exact_q_ = doubles(q_), exact_k_ = doubles(k_), exact_v_ = doubles(v_);
    lse_.resize(size_t(rows_q) * a.heads);
    a.softmax_lse = lse_.data();
    a.softmax_scale = float(number("scale", 1 / std::sqrt(a.head_dims.qk)));
    make_columns(a);
    const std::string mask = text("mask", "full");
    a.mask = mask_rule(mask == "causal", mask == "window" ? int(number("left", -1)) : -1,
                        mask == "window" ? int(number("right", -1)) : -1, int(number("chunk", 0)));
    a.softcap = float(number("softcap", 0));
    std::normal_distribution<float> normal;
    for (int h = 0; h < a.heads; ++h) {
      sinks_.push_back(normal(random_));
      slopes_.push_back(std::exp2(-float(h) - 1));
    }
    if (number("sinks", 0) != 0) { a.sinks = sinks_.data(); }
    if (number("slopes", 0) != 0) { a.alibi_slopes = slopes_.data(); }
    if (const double p = number("dropout", 0); p > 0) {
      int longest_q = 0, longest_k = 0;
      for (const Sequence& s : lengths_) {
        longest_q = max_int(longest_q, s.seqlen_q);
        longest_k = max_int(longest_k, s.seqlen_k);
      }
      a.dropout = {nullptr, dropout::num_blocks(longest_q), dropout::num_blocks(longest_k), float(p)};
      bits_.resize(size_t(a.batch) * a.heads * a.dropout.query_blocks * a.dropout.key_blocks *
                   dropout::kBlockBytes);
      std::bernoulli_distribution keeps(1 - p);
      for (uint8_t& byte : bits_) {
        for (int i = 0; i < 8; ++i) { byte = uint8_t(2 * byte + keeps(random_)); }
      }
      a.dropout.bits = bits_.data();
      emulator::readable = {bits_.data(), bits_.data() + bits_.size()};
    }
  }

  int nan_query() const { return int(number("nan_query", -1)); }

  void make_columns(AttentionArguments& a) {
    const std::string kind = text("columns", "");
    if (kind.empty()) { return; }
    ColumnMask& columns = a.columns;
    columns.causal = text("mask", "full") == "causal";
    columns.per_key = int(number("per_key", columns.causal ? 1 : 2));
    const int heads = int(number("mask_heads", 1)), per_key = columns.per_key;
    const int64_t rows_k = a.seqlen_k;  // of a sequence, or of the pack
    columns.head_stride = heads == 1 ? 0 : rows_k * per_key;
    columns.batch_stride = a.is_pack() ? 0 : heads * rows_k * per_key;
    std::mt19937 random(11);
    const auto below = [&](int end) { return int(random() % unsigned(max_int(1, end))); };
    for (int s = 0; s < (a.is_pack() ? 1 : a.batch); ++s) {
      for (int h = 0; h < heads; ++h) {
        for (const Sequence& lengths : a.is_pack() ? lengths_ : std::vector<Sequence>{lengths_[s]}) {
          const int document = int(number("document", 100)) + h, q = lengths.seqlen_q;
          for (int key = 0; key < lengths.seqlen_k; ++key) {
            const int first = key / document * document, end = first + document;
            for (int i = 0; i < per_key; ++i) {
              // First and end of an interval in turn, or the first of one and the end of another.
              const bool is_first = i % 2 == 0;
              const int of_document = i == 0 ? end : per_key == 2 && !columns.causal ? first : i == 1 ? q : 0;
              const int of_nothing = per_key == 1 || (per_key == 2 && !columns.causal && is_first) ? q : 0;
              // Random ones that differ from tile to tile much, and little within one.
              const int of_tile = key / 70, near = (of_tile * 7919 + 131 * h + 977 * i) % max_int(1, 2 * q) - q / 4;
              const bool is_seen_by_all = kind == "nothing" || (kind == "prefix" && key < document);
              bounds_.push_back(is_seen_by_all        ? of_nothing
                                : kind != "random"    ? of_document
                                                      : near + below(20) + (is_first ? 0 : below(q / 2)));
            }
          }
        }
      }
    }
    columns.bounds = bounds_.data();
  }

  // Whether columns hide a key of a sequence, whose rows of keys begin at first_k, from a query.
  bool hidden(const AttentionArguments& a, int sequence, int kv_head, int query, int key, int first_k) const {
    if (!a.has_columns()) { return false; }
    const int* bounds = a.columns.bounds + sequence * a.columns.batch_stride + kv_head * a.columns.head_stride +
                        int64_t{a.is_pack() ? first_k + key : key} * a.columns.per_key;
    const auto within = [&](int first, int end) { return first <= query && query < end; };
    switch (a.columns.per_key) {
      case 1:
        return bounds[0] <= query;
      case 2:
        return a.columns.causal ? within(bounds[0], bounds[1]) : bounds[0] <= query || query < bounds[1];
      default:
        return within(bounds[0], bounds[1]) || within(bounds[2], bounds[3]);
    }
  }

  void fill(std::vector<Element>& data, TensorView& view, int rows, int seqlen, int heads, int dim) {
    std::normal_distribution<float> normal;
    data.resize(size_t(rows) * heads * dim);
    for (Element& x : data) { x = Element(normal(random_)); }
    view = {data.data(), int64_t{seqlen} * heads * dim, int64_t{heads} * dim, dim};
  }

  bool kept(const AttentionArguments& a, int sequence, int head, int query, int key) const {
    const DropoutTensor& d = a.dropout;
    const auto [word, bit] = dropout::place_of(query % dropout::kBlockRows, key % dropout::kBlockRows);
    const size_t line = ((size_t(sequence) * a.heads + head) * d.query_blocks + query / dropout::kBlockRows) *
                            d.key_blocks + key / dropout::kBlockRows;
    uint32_t value;
    std::memcpy(&value, bits_.data() + line * dropout::kBlockBytes + 4 * word, 4);
    return value >> bit & 1;
  }


  struct Row {
    Range keys;
    std::vector<double> scores;  // of `keys`
    double largest, sum;         // of them and the sink; of their exponentials, those over that of the largest

    bool sees_nothing(const AttentionArguments& a) const { return scores.empty() && !a.sinks; }
    double lse(const AttentionArguments& a) const { return sees_nothing(a) ? INFINITY : largest + std::log(sum); }
  };

  // Of a query, whose row of the tensors is row_q, of a sequence whose first key is row first_k.
  Row row_of(const AttentionArguments& a, int sequence, int head, int query, int row_q, int first_k) const {
    const int dim = a.head_dims.qk, kv_head = head / a.group_size();
    const double* q = exact_q_.data() + (size_t(row_q) * a.heads + head) * dim;
    const int own = query + lengths_[sequence].seqlen_k - lengths_[sequence].seqlen_q;
    Row row{mask_of(a.mask, lengths_[sequence]).keys_of(query), {}, a.sinks ? a.sinks[head] : -INFINITY, 0};
    bool sees_any = false;
    for (int key = row.keys.first; key < row.keys.end(); ++key) {
      double score = product(q, exact_k_.data() + (size_t(first_k + key) * a.kv_heads + kv_head) * dim, dim);
      score *= a.softmax_scale;
      if (a.softcap > 0) { score = a.softcap * std::tanh(score / a.softcap); }
      if (a.alibi_slopes) { score -= slopes_[head] * std::abs(own - key); }
      if (hidden(a, sequence, kv_head, query, key, first_k)) {
        score = -INFINITY;
      } else {
        sees_any = true;
      }
      row.scores.push_back(score);
      row.largest = std::max(row.largest, score);
    }
    if (!sees_any) {
      row.scores.clear();
      row.keys.count = 0;
    }
    row.sum = a.sinks ? std::exp(a.sinks[head] - row.largest) : 0;
    for (double score : row.scores) { row.sum += std::exp(score - row.largest); }
    return row;
  }

  // Calls f(sequence, head, query, row of the query, row of the sequence's first key, its LSE) for every query.
  template <typename F>
  void for_queries(const AttentionArguments& a, F&& f) {
    int first_q = 0, first_k = 0;
    for (int s = 0; s < a.batch; ++s) {
      for (int h = 0; h < a.heads; ++h) {
        for (int i = 0; i < lengths_[s].seqlen_q; ++i) {
          const size_t lse_place =
              a.is_pack() ? size_t(h) * a.seqlen_q + first_q + i : (size_t(s) * a.heads + h) * a.seqlen_q + i;
          f(s, h, i, first_q + i, first_k, lse_[lse_place]);
        }
      }
      first_q += lengths_[s].seqlen_q;
      first_k += lengths_[s].seqlen_k;
    }
  }

  const Options& options_;
  std::mt19937 random_;
  std::vector<Sequence> lengths_;
  std::vector<int> cu_q_{0}, cu_k_{0};
  Range nan_keys_{};
  std::vector<Element> q_, k_, v_, out_;
  std::vector<double> exact_q_, exact_k_, exact_v_;
  std::vector<float> lse_, sinks_, slopes_;
  std::vector<int> bounds_;
  std::vector<uint8_t> bits_;
};

// What packing/plan.h does, but for rows that are of no sequence.
template <typename Rule>
void plan_pack_of(const AttentionArguments& a, const Rule& rule, const PackArrays& arrays) {
  std::vector<Sequence> sequences;
  for (int i = 0; i < a.batch; ++i) {
    const int *q = a.pack.cu_seqlens_q + i, *k = a.pack.cu_seqlens_k + i;
    sequences.push_back({a.pack.cu_seqlens_q ? q[1] - q[0] : a.pack.rows_q,
                         a.pack.cu_seqlens_k ? k[1] - k[0] : a.pack.seqused_k[i]});
  }
  const PackPlan plan = plan_pack(rule, sequences);
  std::copy(plan.sequences.begin(), plan.sequences.end(), arrays.sequences);
  std::copy(plan.of_unit.begin(), plan.of_unit.end(), arrays.of_unit);
  std::copy(plan.of_query_tile.begin(), plan.of_query_tile.end(), arrays.of_query_tile);
  *arrays.totals = plan.totals;
}

}  // namespace emulator
