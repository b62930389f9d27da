// The forward kernels of csrc/ for one row of the table of tiles, EMULATED_DIMS, on the host: `forward NAME=VALUE...`
// runs one call on random inputs and holds output and LSE against sums in double. Prints a digest of their bits, or
// what is wrong.
//
//   dtype=bf16|fp16 mask=full|causal|window left= right= chunk= batch= seqlen_q= seqlen_k= heads= kv_heads= head_dim=
//   value_head_dim= pack=Q:K,Q:K,...  sinks=1 softcap= slopes=1 dropout= scale= sms=  seed=
//   infinite_key=, infinite_keys=: keys of sequence 0 whose scores are all -inf; nan_value=, nan_values=: values that
//   are NaN, which only rows that see a key of their KV tiles may show
//
// `seed` is the machine's; inputs do not depend on it.
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "launch/launch_forward.h"
#include "launch/tensor_map.cu"
#include "launch/variant.h"
#include "model/pack_plan.h"

using namespace dash_attn;

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
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

namespace {

using Options = std::map<std::string, std::string>;

template <typename Element>
class Call {
 public:
  explicit Call(const Options& options) : options_(options), random_(7) {}

  void run() {
    using Dims = EMULATED_DIMS;
    prepare(Dims::kDims);
    emulator::Machine machine(number("seed", 0));
    emulator::machine = &machine;
    a_.mask = served_mask(score_kind(a_), a_.padded_head_dims(), a_.mask);
    workspace_.resize(plan_workspace(nullptr, a_, make_forward_scheduler(a_)).bytes + 128);
    a_.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace_.data()) + 127) / 128 * 128);
    bool found = false;
    const auto serve = [&]<typename Mask, typename Score>(Mask, Score) {
      if (a_.mask.kind != Mask::kKind || score_kind(a_) != Score::Score::kKind) { return; }
      using Dtype = std::conditional_t<std::is_same_v<Element, cutlass::bfloat16_t>, BFloat16, Float16>;
      launch_forward<ForwardVariant<Dtype, Dims, Mask, Score>>(a_, nullptr);
      found = true;
    };
    serve(Full{}, Plain{});
    serve(Causal{}, Plain{});
    serve(Windowed{}, Plain{});
    serve(Windowed{}, Softcap{});
    serve(Windowed{}, Alibi{});
    serve(Windowed{}, Dropout{});
    constexpr int kDim = Dims::kDims.qk;
    if constexpr (kDim == 64 || kDim == 128) {
      serve(Full{}, Dropout{});
      serve(Causal{}, Dropout{});
    }
    if constexpr (kDim == 96 || kDim == 128 || kDim == 256) { serve(Causal{}, Softcap{}); }
    if (!found) { emulator::fail("no kernel serves this"); }
    check();
  }

 private:
  double number(const char* name, double otherwise) const {
    const auto found = options_.find(name);
    return found == options_.end() ? otherwise : std::stod(found->second);
  }
  std::string text(const char* name, const char* otherwise) const {
    const auto found = options_.find(name);
    return found == options_.end() ? otherwise : found->second;
  }

  void prepare(HeadDims dims) {
    const std::string pack = text("pack", "");
    a_.heads = int(number("heads", 1));
    a_.kv_heads = int(number("kv_heads", a_.heads));
    a_.head_dims = {int(number("head_dim", dims.qk)), int(number("value_head_dim", dims.v))};
    a_.dtype = std::is_same_v<Element, cutlass::bfloat16_t> ? Dtype::kBFloat16 : Dtype::kFloat16;
    if (pack.empty()) {
      a_.batch = int(number("batch", 1));
      a_.seqlen_q = int(number("seqlen_q", 100));
      a_.seqlen_k = int(number("seqlen_k", a_.seqlen_q));
      lengths_.assign(a_.batch, {a_.seqlen_q, a_.seqlen_k});
    } else {
      std::istringstream stream(pack);
      for (std::string item; std::getline(stream, item, ',');) {
        const size_t colon = item.find(':');
        lengths_.push_back({std::stoi(item), std::stoi(item.substr(colon + 1))});
      }
      a_.batch = int(lengths_.size());
      for (const Sequence& s : lengths_) {
        cu_q_.push_back(cu_q_.back() + s.seqlen_q);
        cu_k_.push_back(cu_k_.back() + s.seqlen_k);
      }
      a_.seqlen_q = cu_q_.back();
      a_.seqlen_k = cu_k_.back();
      a_.pack = {cu_q_.data(), cu_k_.data(), nullptr, nullptr};
    }
    const int batch_of_rows = pack.empty() ? a_.batch : 1;
    const int rows_q = batch_of_rows * a_.seqlen_q, rows_k = batch_of_rows * a_.seqlen_k;
    fill(q_, a_.q, rows_q, a_.seqlen_q, a_.heads, a_.head_dims.qk);
    fill(k_, a_.k, rows_k, a_.seqlen_k, a_.kv_heads, a_.head_dims.qk);
    fill(v_, a_.v, rows_k, a_.seqlen_k, a_.kv_heads, a_.head_dims.v);
    fill(out_, a_.out, rows_q, a_.seqlen_q, a_.heads, a_.head_dims.v);
    for (Element& x : out_) { x = Element(NAN); }
    const int infinite = int(number("infinite_key", 0)), nan = int(number("nan_value", 0));
    const int infinite_end = infinite + int(number("infinite_keys", 0)), nan_end = nan + int(number("nan_values", 0));
    if (infinite_end > infinite) {
      for (size_t i = 0; i < q_.size(); i += a_.head_dims.qk) { q_[i] = Element(1.f); }
    }
    for (int key = infinite; key < infinite_end; ++key) {
      for (int h = 0; h < a_.kv_heads; ++h) {
        Element* row = k_.data() + (size_t(key) * a_.kv_heads + h) * a_.head_dims.qk;
        for (int d = 0; d < a_.head_dims.qk; ++d) { row[d] = Element(d == 0 ? -INFINITY : 0.f); }
      }
    }
    const int value_row = a_.kv_heads * a_.head_dims.v;
    for (int i = nan * value_row; i < nan_end * value_row; ++i) { v_[i] = Element(NAN); }
    nan_keys_ = {nan, nan_end - nan};
    lse_.assign(size_t(rows_q) * a_.heads, NAN);
    a_.softmax_lse = lse_.data();
    a_.softmax_scale = float(number("scale", 1 / std::sqrt(a_.head_dims.qk)));
    const std::string mask = text("mask", "full");
    a_.mask = mask_rule(mask == "causal", mask == "window" ? int(number("left", -1)) : -1,
                        mask == "window" ? int(number("right", -1)) : -1, int(number("chunk", 0)));
    a_.num_sms = int(number("sms", 4));
    a_.softcap = float(number("softcap", 0));
    std::normal_distribution<float> normal;
    for (int h = 0; h < a_.heads; ++h) {
      sinks_.push_back(normal(random_));
      slopes_.push_back(std::exp2(-float(h) - 1));
    }
    if (number("sinks", 0) != 0) { a_.sinks = sinks_.data(); }
    if (number("slopes", 0) != 0) { a_.alibi_slopes = slopes_.data(); }
    if (const double p = number("dropout", 0); p > 0) {
      int longest_q = 0, longest_k = 0;
      for (const Sequence& s : lengths_) {
        longest_q = max_int(longest_q, s.seqlen_q);
        longest_k = max_int(longest_k, s.seqlen_k);
      }
      a_.dropout = {nullptr, dropout::num_blocks(longest_q), dropout::num_blocks(longest_k), float(p)};
      bits_.resize(size_t(a_.batch) * a_.heads * a_.dropout.query_blocks * a_.dropout.key_blocks *
                   dropout::kBlockBytes);
      std::bernoulli_distribution keeps(1 - p);
      for (uint8_t& byte : bits_) {
        for (int i = 0; i < 8; ++i) { byte = uint8_t(2 * byte + keeps(random_)); }
      }
      a_.dropout.bits = bits_.data();
    }
  }

  void fill(std::vector<Element>& data, TensorView& view, int rows, int seqlen, int heads, int dim) {
    std::normal_distribution<float> normal;
    data.resize(size_t(rows) * heads * dim);
    for (Element& x : data) { x = Element(normal(random_)); }
    view = {data.data(), int64_t{seqlen} * heads * dim, int64_t{heads} * dim, dim};
  }

  bool kept(int sequence, int head, int query, int key) const {
    const DropoutTensor& d = a_.dropout;
    const auto [word, bit] = dropout::place_of(query % dropout::kBlockRows, key % dropout::kBlockRows);
    const size_t line = ((size_t(sequence) * a_.heads + head) * d.query_blocks + query / dropout::kBlockRows) *
                            d.key_blocks + key / dropout::kBlockRows;
    uint32_t value;
    std::memcpy(&value, bits_.data() + line * dropout::kBlockBytes + 4 * word, 4);
    return value >> bit & 1;
  }

  void check() {
    int first_q = 0, first_k = 0;
    const bool is_pack = a_.is_pack();
    for (int s = 0; s < a_.batch; ++s) {
      const Mask mask = mask_of(a_.mask, lengths_[s]);
      for (int h = 0; h < a_.heads; ++h) {
        for (int i = 0; i < lengths_[s].seqlen_q; ++i) {
          const size_t lse_place =
              is_pack ? size_t(h) * a_.seqlen_q + first_q + i : (size_t(s) * a_.heads + h) * a_.seqlen_q + i;
          check_row(s, h, i, first_q + i, first_k, mask.keys_of(i), lse_[lse_place]);
        }
      }
      first_q += lengths_[s].seqlen_q;
      first_k += lengths_[s].seqlen_k;
    }
    uint64_t digest = 1469598103934665603u;  // FNV-1a
    const auto add = [&](const void* data, size_t bytes) {
      for (size_t i = 0; i < bytes; ++i) { digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u; }
    };
    add(out_.data(), out_.size() * sizeof(Element));
    add(lse_.data(), lse_.size() * sizeof(float));
    std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  }

  void check_row(int sequence, int head, int query, int row_q, int first_k, Range keys, float lse) const {
    const int dim = a_.head_dims.qk, value_dim = a_.head_dims.v, kv_head = head / a_.group_size();
    const Element* q = q_.data() + (size_t(row_q) * a_.heads + head) * dim;
    const int own = query + lengths_[sequence].seqlen_k - lengths_[sequence].seqlen_q;
    std::vector<double> scores;
    double largest = a_.sinks ? a_.sinks[head] : -INFINITY;
    for (int key = keys.first; key < keys.end(); ++key) {
      const Element* k = k_.data() + (size_t(first_k + key) * a_.kv_heads + kv_head) * dim;
      double score = 0;
      for (int d = 0; d < dim; ++d) { score += double(float(q[d])) * float(k[d]); }
      score *= a_.softmax_scale;
      if (a_.softcap > 0) { score = a_.softcap * std::tanh(score / a_.softcap); }
      if (a_.alibi_slopes) { score -= slopes_[head] * std::abs(own - key); }
      scores.push_back(score);
      largest = std::max(largest, score);
    }
    double sum = a_.sinks ? std::exp(a_.sinks[head] - largest) : 0;
    for (double score : scores) { sum += std::exp(score - largest); }
    const bool sees_none = scores.empty() && !a_.sinks;
    const double expected_lse = sees_none ? INFINITY : largest + std::log(sum);
    const auto wrong = [&](const std::string& what, double expected, double found) {
      if (expected == found || std::abs(expected - found) <= 0.02 * std::max(1.0, std::abs(expected))) { return; }
      emulator::fail(what + " of sequence " + std::to_string(sequence) + ", head " + std::to_string(head) +
                     ", query " + std::to_string(query) + " is " + std::to_string(found) + " for " +
                     std::to_string(expected));
    };
    if (!scores.empty() && largest == -INFINITY) {
      wrong("the log-sum-exp", -INFINITY, lse);
      if (!std::isnan(float(out_[(size_t(row_q) * a_.heads + head) * value_dim]))) {
        emulator::fail("the output of a row whose scores are all -inf is a number");
      }
      return;
    }
    wrong("the log-sum-exp", expected_lse, lse);
    constexpr int kTile = forward_tile_shape(EMULATED_DIMS::kDims).key;
    const bool may_be_nan = nan_keys_.count > 0 && keys.end() > nan_keys_.first / kTile * kTile;
    for (int d = 0; d < value_dim && !may_be_nan; ++d) {
      double expected = 0;
      for (size_t i = 0; i < scores.size(); ++i) {
        const int key = keys.first + int(i);
        if (a_.drops() && !kept(sequence, head, query, key)) { continue; }
        const double p = std::exp(scores[i] - largest) / sum * (a_.drops() ? 1 / (1 - a_.dropout.p) : 1);
        expected += p * float(v_[(size_t(first_k + key) * a_.kv_heads + kv_head) * value_dim + d]);
      }
      wrong("column " + std::to_string(d), expected, float(out_[(size_t(row_q) * a_.heads + head) * value_dim + d]));
    }
  }

  const Options& options_;
  std::mt19937 random_;
  ForwardArguments a_{};
  std::vector<Sequence> lengths_;
  std::vector<int> cu_q_{0}, cu_k_{0};
  Range nan_keys_{};
  std::vector<Element> q_, k_, v_, out_;
  std::vector<float> lse_, sinks_, slopes_;
  std::vector<uint8_t> bits_;
  std::vector<char> workspace_;
};

}  // namespace

namespace dash_attn {

// What packing/plan.h does.
void launch_forward_plan(const ForwardArguments& a, const ForwardWorkspace& workspace, cudaStream_t) {
  std::vector<Sequence> sequences;
  for (int i = 0; i < a.batch; ++i) {
    const int *q = a.pack.cu_seqlens_q + i, *k = a.pack.cu_seqlens_k + i;
    sequences.push_back({q[1] - q[0], k[1] - k[0]});
  }
  const PackPlan plan = plan_pack(make_forward_pack_rule(a), sequences);
  std::copy(plan.sequences.begin(), plan.sequences.end(), workspace.pack.sequences);
  std::copy(plan.of_unit.begin(), plan.of_unit.end(), workspace.pack.of_unit);
  *workspace.pack.totals = plan.totals;
  *workspace.tiles_taken = 0;
}

}  // namespace dash_attn

int main(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    options[argument.substr(0, argument.find('='))] = argument.substr(argument.find('=') + 1);
  }
  if (options["dtype"] == "fp16") {
    Call<cutlass::half_t>(options).run();
  } else {
    Call<cutlass::bfloat16_t>(options).run();
  }
}
