// `backward NAME=VALUE...` runs one call (call.h; and schedule=, of which there are those without clusters, shift to
// 128) of the backward on the host, linked with backward_kernels.cpp and stages.cpp, with an output and an LSE
// computed in double, and holds its gradients against sums in double. Prints a digest of the bits of each, or what
// is wrong. With infinite_row=R lone_column=C, of fp16 and order-free sums, dS of query R is infinite and K zero but
// for column C: dQ of that row is to be NaN in every column, that of the others right.
#include "call.h"
#include "launch/backward_plan.cu"
#include "launch/column_plan.cu"

using namespace dash_attn;

namespace {

using Sums = std::vector<double>;

template <typename Element>
class BackwardCall : emulator::Call<Element> {
 public:
  using Base = emulator::Call<Element>;
  using Base::Base;

  void run() {
    this->prepare(a_);
    const int rows_q = int(this->q_.size()) / (a_.heads * a_.head_dims.qk);
    this->fill(dout_, a_.dout, rows_q, a_.seqlen_q, a_.heads, a_.head_dims.v);
    if (infinite_row() >= 0) { make_infinite(int(this->number("lone_column", 0))); }
    exact_dout_ = emulator::doubles(dout_);
    const std::string schedule = this->text("schedule", "descending");
    for (int i = 0; i < kNumPolicies; ++i) {
      if (schedule == kPolicyNames[i]) { a_.policy = static_cast<Policy>(i); }
    }
    differentiate();
    this->on_machines(a_, [&] { launch(); }, [&] { return digests(); }, [&] { check(); });
  }

 private:
  void launch() {
    like(dq_, a_.dq, this->q_, a_.q);
    like(dk_, a_.dk, this->k_, a_.k);
    like(dv_, a_.dv, this->v_, a_.v);
    run_backward(a_, [&](int64_t bytes) { return workspace_ = workspace_memory_.take(bytes); }, nullptr);
    if (infinite_row() >= 0) { check_infinite_row(); }
    if (this->number("tiny_head", -1) >= 0 && !any_needs_order()) { emulator::fail("no head needs the order"); }
  }

  std::string digests() const {
    std::string text;
    for (const auto* gradient : {&dq_, &dk_, &dv_}) { text += emulator::Digest().add(*gradient).text() + " "; }
    return text;
  }

  void check() const {
    compare("dq", expected_dq_, dq_, a_.head_dims.qk);
    if (infinite_row() < 0) { compare("dk", expected_dk_, dk_, a_.head_dims.qk); }
    compare("dv", expected_dv_, dv_, a_.head_dims.v);
  }

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
    this->exact_k_ = emulator::doubles(this->k_);
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

  static void like(std::vector<Element>& data, TensorView& view, const std::vector<Element>& other,
                   const TensorView& other_view) {
    data.assign(other.size(), Element(NAN));
    view = other_view;
    view.data = data.data();
  }

  // Output and LSE of the forward, and the gradients.
  void differentiate() {
    expected_dq_.resize(this->q_.size());
    expected_dk_.resize(this->k_.size());
    expected_dv_.resize(this->v_.size());
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
    const double *q = &this->exact_q_[place * dim], *dout = &exact_dout_[place * value_dim];
    Sums p, dropped_p, out(value_dim), dp;
    for (int i = 0; i < row.keys.count; ++i) {
      p.push_back(std::exp(row.scores[i] - row.largest) / row.sum);
      const bool is_kept = !a_.drops() || this->kept(a_, sequence, head, query, row.keys.first + i);
      const double factor = is_kept ? 1 / (1 - a_.dropout.p) : 0;
      dropped_p.push_back(p[i] * factor);
      const double* v = &this->exact_v_[of_key(i) * value_dim];
      emulator::add(out.data(), dropped_p[i], v, value_dim);
      emulator::add(&expected_dv_[of_key(i) * value_dim], dropped_p[i], dout, value_dim);
      dp.push_back(factor * emulator::product(v, dout, value_dim));
    }
    double delta = 0;
    for (int d = 0; d < value_dim; ++d) {
      this->out_[place * value_dim + d] = Element(float(out[d]));
      delta += float(this->out_[place * value_dim + d]) * dout[d];
    }
    for (int i = 0; i < row.keys.count; ++i) {
      const double capped = a_.softcap > 0 ? row.scores[i] / a_.softcap : 0;
      const double ds = p[i] * (dp[i] - delta) * (1 - capped * capped) * a_.softmax_scale;
      if (int(place) == infinite_row()) { largest_ds_ = std::max(largest_ds_, std::abs(ds) / a_.softmax_scale); }
      emulator::add(&expected_dq_[place * dim], ds, &this->exact_k_[of_key(i) * dim], dim);
      emulator::add(&expected_dk_[of_key(i) * dim], ds, q, dim);
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
    double of_row = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (i % columns == 0) { of_row = usual_from(i, columns); }
      const double x = float(found[i]);
      if (std::abs(x - expected[i]) <= 0.03 * std::abs(expected[i]) + 0.05 * std::max(usual, of_row)) { continue; }
      emulator::fail(name + "[" + std::to_string(i / columns) + ", " + std::to_string(i % columns) + "] is " +
                     std::to_string(x) + " for " + std::to_string(expected[i]));
    }
  }

  BackwardArguments a_{};
  std::vector<Element> dout_, dq_, dk_, dv_;
  Sums exact_dout_, expected_dq_, expected_dk_, expected_dv_;
  double largest_ds_ = 0;  // of infinite_row, without the scale
  emulator::Workspace workspace_memory_;
  void* workspace_ = nullptr;
};

}  // namespace

namespace dash_attn {

void require_self_check() {}

void launch_pack_plan(const BackwardPlan& plan, cudaStream_t) {
  emulator::plan_pack_of(plan.call, plan.pack_rule, plan.pack);
}

}  // namespace dash_attn

int main(int count, char** arguments) { emulator::run<BackwardCall>(count, arguments); }
