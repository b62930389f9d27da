// The kernels of the backward for one row of the table of tiles, EMULATED_DIMS, on the host: `backward NAME=VALUE...`
// runs one call (call.h; and schedule=, of which there are those without clusters, shift to 128) with an output
// and an LSE computed in double, and holds its gradients against sums in double. Prints a digest of the bits of each,
// or what is wrong. Linked with stages.cpp. With infinite_row=R lone_column=C, of fp16 and order-free sums, dS of query
// R is infinite and K zero but for column C: dQ of that row is to be NaN in every column, that of the others right.
#include "call.h"
#include "launch/backward_plan.cu"
#include "launch/column_plan.cu"
#include "launch/compiled_backward.h"

using namespace dash_attn;

namespace {

using Sums = std::vector<double>;

template <typename Element>
class BackwardCall : emulator::Call<Element> {
 public:
  using Base = emulator::Call<Element>;
  using Base::Base;

  void run() {
    using Dims = EMULATED_DIMS;
    this->prepare(a_, Dims::kDims);
    const int rows_q = int(this->q_.size()) / (a_.heads * a_.head_dims.qk);
    this->fill(dout_, a_.dout, rows_q, a_.seqlen_q, a_.heads, a_.head_dims.v);
    if (infinite_row() >= 0) { make_infinite(int(this->number("lone_column", 0))); }
    like(dq_, a_.dq, this->q_, a_.q);
    like(dk_, a_.dk, this->k_, a_.k);
    like(dv_, a_.dv, this->v_, a_.v);
    const std::string schedule = this->text("schedule", "descending");
    for (int i = 0; i < kNumPolicies; ++i) {
      if (schedule == kPolicyNames[i]) { a_.policy = static_cast<Policy>(i); }
    }
    emulator::Machine machine(this->number("seed", 0));
    emulator::machine = &machine;
    differentiate();
    run_backward(a_, [&](int64_t bytes) { return workspace_ = workspace_memory_.take(bytes); }, nullptr);
    if (infinite_row() >= 0) { check_infinite_row(); }
    if (this->number("tiny_head", -1) >= 0 && !any_needs_order()) { emulator::fail("no head needs the order"); }
    compare("dq", expected_dq_, dq_, a_.head_dims.qk);
    if (infinite_row() < 0) { compare("dk", expected_dk_, dk_, a_.head_dims.qk); }
    compare("dv", expected_dv_, dv_, a_.head_dims.v);
    for (const auto* gradient : {&dq_, &dk_, &dv_}) {
      emulator::Digest digest;
      digest.add(*gradient);
      std::printf("%s ", digest.text().c_str());
    }
  }

  // The kernel that serves a call, of those for Element.
  static const BackwardKernel& kernel_of(const BackwardArguments& a, const MaskRule& mask) {
    const BackwardKernel* found = nullptr;
    const auto serve = [&]<typename Mask, typename Score>(Mask, Score) {
      if (mask.kind != Mask::kKind || score_kind(a) != Score::Score::kKind) { return; }
      found = a.policy == Policy::kShift       ? kernel_of_policies<Mask, Score, Shift>()
              : a.policy == Policy::kOrderFree ? kernel_of_policies<Mask, Score, OrderFree>()
                                               : kernel_of_policies<Mask, Score, Ordered>();
    };
    constexpr int kDim = EMULATED_DIMS::kDims.qk;
    serve(Full{}, Plain{});
    serve(Causal{}, Plain{});
    serve(Windowed{}, Plain{});
    serve(Columns{}, Plain{});
    if constexpr (kDim == 64 || kDim == 256) {
      serve(Windowed{}, Softcap{});
      serve(Windowed{}, Alibi{});
    }
    if constexpr (kDim == 256) { serve(Causal{}, Softcap{}); }
    if constexpr (kDim == 96 || kDim == 256) { serve(Windowed{}, Dropout{}); }
    if (!found) { emulator::fail_without_kernel(); }
    return *found;
  }

 private:
  int infinite_row() const { return int(this->number("infinite_row", -1)); }
  bool any_needs_order() const {
    BackwardPlan plan = plan_backward(a_);
    place_workspace(plan, workspace_);
    return *plan.params.workspace.any_needs_order;
  }

  void make_infinite(int lone_column) {
    for (size_t i = 0; i < this->k_.size(); ++i) {
      if (int(i % a_.head_dims.qk) != lone_column) { this->k_[i] = Element(0.f); }
    }
    for (int d = 0; d < a_.head_dims.v; ++d) {
      Element& x = dout_[size_t(infinite_row()) * a_.heads * a_.head_dims.v + d];
      x = Element(float(x) < 0 ? -60000.f : 60000.f);
    }
  }

  // Of the only head. Leaves zeros there, for the comparison.
  void check_infinite_row() {
    if (largest_ds_ < 65520) { emulator::fail("dS is finite"); }  // which fp16 rounds to infinity
    if (any_needs_order()) { emulator::fail("not in fixed point"); }
    for (int d = 0; d < a_.head_dims.qk; ++d) {
      const size_t i = size_t(infinite_row()) * a_.heads * a_.head_dims.qk + d;
      if (!std::isnan(float(dq_[i]))) { emulator::fail("column " + std::to_string(d) + " is not NaN"); }
      dq_[i] = Element(float(expected_dq_[i] = 0));
    }
  }

  template <typename Mask, typename Score, typename Policies>
  static const BackwardKernel* kernel_of_policies() {
    using Dtype = emulator::DtypeOf<Element>;
    constexpr bool kDrops = Score::Score::kKind == ScoreKind::kDropout;
    constexpr CallKind kCall{Mask::kKind, EMULATED_DIMS::kDims, Score::Score::kKind != ScoreKind::kPlain && !kDrops,
                             kDrops, Mask::kKind == MaskKind::kColumns};
    if constexpr (has_kernel(Policies::kAny, kCall) && emulator::is_built<Dtype, Mask, Score, Policies>()) {
      return &compiled_backward<BackwardVariant<Dtype, EMULATED_DIMS, Mask, Score, Policies>>();
    }
    return nullptr;
  }

  static void like(std::vector<Element>& data, TensorView& view, const std::vector<Element>& other,
                   const TensorView& other_view) {
    data.assign(other.size(), Element(NAN));
    view = other_view;
    view.data = data.data();
  }

  // Output and LSE of the forward, and the gradients.
  void differentiate() {
    expected_dq_.resize(dq_.size());
    expected_dk_.resize(dk_.size());
    expected_dv_.resize(dv_.size());
    this->for_queries(a_, [&](int sequence, int head, int query, int row_q, int first_k, float& lse) {
      lse = differentiate_row(sequence, head, query, row_q, first_k);
    });
  }

  float differentiate_row(int sequence, int head, int query, int row_q, int first_k) {
    const int dim = a_.head_dims.qk, value_dim = a_.head_dims.v;
    const typename Base::Row row = this->row_of(a_, sequence, head, query, row_q, first_k);
    const size_t place = size_t(row_q) * a_.heads + head;
    const auto of_key = [&](int i) {
      return size_t(first_k + row.keys.first + i) * a_.kv_heads + head / a_.group_size();
    };
    Sums p, dropped_p, out(value_dim), dp;
    for (int i = 0; i < row.keys.count; ++i) {
      p.push_back(std::exp(row.scores[i] - row.largest) / row.sum);
      const bool is_kept = !a_.drops() || this->kept(a_, sequence, head, query, row.keys.first + i);
      const double factor = is_kept ? 1 / (1 - a_.dropout.p) : 0;
      dropped_p.push_back(p[i] * factor);
      double product = 0;
      for (int d = 0; d < value_dim; ++d) {
        const double v = float(this->v_[of_key(i) * value_dim + d]), dout = float(dout_[place * value_dim + d]);
        out[d] += dropped_p[i] * v;
        product += factor * v * dout;
        expected_dv_[of_key(i) * value_dim + d] += dropped_p[i] * dout;
      }
      dp.push_back(product);
    }
    double delta = 0;
    for (int d = 0; d < value_dim; ++d) {
      this->out_[place * value_dim + d] = Element(float(out[d]));
      delta += float(this->out_[place * value_dim + d]) * float(dout_[place * value_dim + d]);
    }
    for (int i = 0; i < row.keys.count; ++i) {
      const double capped = a_.softcap > 0 ? row.scores[i] / a_.softcap : 0;
      const double ds = p[i] * (dp[i] - delta) * (1 - capped * capped) * a_.softmax_scale;
      if (int(place) == infinite_row()) { largest_ds_ = std::max(largest_ds_, std::abs(ds) / a_.softmax_scale); }
      for (int d = 0; d < dim; ++d) {
        expected_dq_[place * dim + d] += ds * float(this->k_[of_key(i) * dim + d]);
        expected_dk_[of_key(i) * dim + d] += ds * float(this->q_[place * dim + d]);
      }
    }
    return float(row.lse(a_));
  }

  // Each element to a part of its own size and of what is usual in its row, and in the tensor.
  static void compare(const std::string& name, const Sums& expected, const std::vector<Element>& found, int columns) {
    const auto usual_from = [&](size_t first, size_t count) {
      double squares = 0;
      for (size_t i = first; i < first + count; ++i) { squares += expected[i] * expected[i]; }
      return std::sqrt(squares / double(std::max<size_t>(1, count)));
    };
    constexpr double kSmall = 0.05;  // of what inputs of size 1 make
    const double usual = std::max(kSmall, usual_from(0, expected.size()));
    for (size_t i = 0; i < expected.size(); ++i) {
      const double x = float(found[i]), of_row = usual_from(i - i % columns, columns);
      if (std::abs(x - expected[i]) <= 0.03 * std::abs(expected[i]) + 0.05 * std::max(usual, of_row)) { continue; }
      emulator::fail(name + "[" + std::to_string(i / columns) + ", " + std::to_string(i % columns) + "] is " +
                     std::to_string(x) + " for " + std::to_string(expected[i]));
    }
  }

  BackwardArguments a_{};
  std::vector<Element> dout_, dq_, dk_, dv_;
  Sums expected_dq_, expected_dk_, expected_dv_;
  double largest_ds_ = 0;  // of infinite_row, without the scale
  emulator::Workspace workspace_memory_;
  void* workspace_ = nullptr;
};

}  // namespace

namespace dash_attn {

void require_self_check() {}

const BackwardKernel& backward_kernel_of(const BackwardArguments& a, const MaskRule& mask) {
  return a.dtype == Dtype::kBFloat16 ? BackwardCall<bf16>::kernel_of(a, mask) : BackwardCall<fp16>::kernel_of(a, mask);
}

void launch_pack_plan(const BackwardPlan& plan, cudaStream_t) {
  emulator::plan_pack_of(plan.call, plan.pack_rule, plan.pack);
}

}  // namespace dash_attn

int main(int count, char** arguments) { emulator::run<BackwardCall>(count, arguments); }
