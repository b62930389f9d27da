// wgmma's m64nNk16 with 16-bit inputs and fp32 sums (PTX ISA 9.7.15): operands by their descriptors, fragments as the
// ISA lays them out. A product runs when it is issued or when it is waited for, as the machine's seed says; until then
// its sums are NaN, and an A operand in registers must not change.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "machine.h"

namespace emulator {

// An operand in shared memory.
template <typename Element, int kRows, bool kIsMnMajor>
struct SharedOperand {
  uint64_t descriptor;

  // Element (i, k), i along M or N, is at 16 i + k.
  const std::vector<float>& read() const {
    return machine->read_once(descriptor * 2 + kIsMnMajor, [&] {
      std::vector<float> elements;
      for (int i = 0; i < kRows; ++i) {
        for (int k = 0; k < 16; ++k) { elements.push_back(element(i, k)); }
      }
      return elements;
    });
  }

 private:
  float element(int i, int k) const {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    const int mode = int(descriptor >> 62);
    if (mode != 1 && mode != 2) { fail("a descriptor with a swizzle that is not of 128 or 64 bytes"); }
    const int row_bytes = mode == 1 ? 128 : 64, columns = row_bytes / 2;
    uint32_t address = kIsMnMajor ? start + i / columns * leading + k / 8 * stride + k % 8 * row_bytes + i % columns * 2
                                  : start + i / 8 * stride + i % 8 * row_bytes + k * 2;
    address ^= (address >> 7 & (mode == 1 ? 7 : 3)) << 4;
    Element element;
    std::memcpy(&element, shared_at(address, 2), 2);
    return float(element);
  }
};

struct Fragment {
  static int row(int thread, int r) { return thread % 128 / 32 * 16 + thread % 32 / 4 + r / 2 % 2 * 8; }
  static int column(int thread, int r) { return r / 4 * 8 + thread % 4 * 2 + r % 2; }
};

template <int kRegisters>
struct Accumulator {
  float* registers[kRegisters];
};

// Rows of A of 16 elements, as a thread has them.
using RowsOfThread = float[2][16];

// `read_rows(thread, rows)`.
template <int kRegisters, typename ReadRows, typename B>
void issue(const Accumulator<kRegisters>& acc, bool accumulate, ReadRows read_rows, B b,
           std::function<void()> check = [] {}) {
  Machine::Thread& self = machine->self();
  const int thread = int(machine->current);
  auto& sums = self.sums[acc.registers[0]];
  if (!sums) {
    sums = std::make_shared<std::vector<float>>(kRegisters);
    for (int r = 0; r < kRegisters; ++r) {
      (*sums)[r] = *acc.registers[r];
      *acc.registers[r] = NAN;
    }
  }
  Machine::Product product;
  product.run = [=, sums = sums] {
    check();
    RowsOfThread rows;
    read_rows(thread, rows);
    const float* columns = b.read().data();
    for (int r = 0; r < kRegisters; ++r) {
      const float *row = rows[r / 2 % 2], *column = columns + 16 * Fragment::column(thread, r);
      float sum = accumulate ? (*sums)[r] : 0.f;
      for (int k = 0; k < 16; ++k) { sum += row[k] * column[k]; }
      (*sums)[r] = sum;
    }
  };
  product.finish = [=, sums = sums, &self] {
    // Of products on the same sums, which are in one group, the first hands them over, when all have run.
    const auto found = self.sums.find(acc.registers[0]);
    const bool is_handed_over = found == self.sums.end() || found->second != sums;
    check();
    if (is_handed_over) { return; }
    self.sums.erase(found);
    for (int r = 0; r < kRegisters; ++r) {
      if (!std::isnan(*acc.registers[r])) { fail("a sum was written while its product ran"); }
      *acc.registers[r] = (*sums)[r];
    }
  };
  if (!machine->is_lazy()) {
    product.run();
    product.run = [] {};
  }
  self.open.push_back(std::move(product));
}

template <typename Element, int kN, bool kIsMnMajorA, bool kIsMnMajorB>
struct SharedProduct {
  template <typename... Rest>
  static void fma(uint64_t a, uint64_t b, Rest&&... rest) {
    run(a, b, std::make_index_sequence<kN / 2>{}, std::forward<Rest>(rest)...);
  }
  template <size_t... kI, typename... Rest>
  static void run(uint64_t a, uint64_t b, std::index_sequence<kI...>, Rest&&... rest) {
    const auto all = std::forward_as_tuple(rest...);
    const auto read_rows = [operand = SharedOperand<Element, 64, kIsMnMajorA>{a}](int thread, RowsOfThread& rows) {
      const float* elements = operand.read().data();
      for (int half = 0; half < 2; ++half) {
        std::copy_n(elements + 16 * Fragment::row(thread, 2 * half), 16, rows[half]);
      }
    };
    emulator::issue<kN / 2>({{&std::get<kI>(all)...}}, bool(int(std::get<kN / 2>(all))), read_rows,
                            SharedOperand<Element, kN, kIsMnMajorB>{b});
  }
};

template <typename Element, int kN, bool kIsMnMajorB>
struct RegisterProduct {
  template <typename... Rest>
  static void fma(const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3, uint64_t b,
                  Rest&&... rest) {
    run({&a0, &a1, &a2, &a3}, b, std::make_index_sequence<kN / 2>{}, std::forward<Rest>(rest)...);
  }
  template <size_t... kI, typename... Rest>
  static void run(std::array<const uint32_t*, 4> a, uint64_t b, std::index_sequence<kI...>, Rest&&... rest) {
    struct Own {
      uint32_t words[4];
    } own;
    for (int i = 0; i < 4; ++i) { own.words[i] = *a[i]; }
    const auto given = machine->exchange("wgmma", own);
    const int first_lane = int(machine->current % kWarpLanes / 4 * 4);  // of the four that have its rows
    std::array<Own, 4> lanes;
    for (int i = 0; i < 4; ++i) { std::memcpy(&lanes[i], given[first_lane + i], sizeof(Own)); }
    const auto read_rows = [lanes](int, RowsOfThread& rows) {
      for (int i = 0; i < 32; ++i) {
        const int half = i / 16, k = i % 16;
        const uint32_t word = lanes[k % 8 / 2].words[half + k / 8 * 2];
        const uint16_t bits = uint16_t(k % 2 ? word >> 16 : word);
        Element value;
        std::memcpy(&value, &bits, 2);
        rows[half][k] = float(value);
      }
    };
    const auto unchanged = [a, own] {
      for (int i = 0; i < 4; ++i) {
        if (*a[i] != own.words[i]) { fail("a register changed while a product read it"); }
      }
    };
    const auto all = std::forward_as_tuple(rest...);
    emulator::issue<kN / 2>({{&std::get<kI>(all)...}}, bool(int(std::get<kN / 2>(all))), read_rows,
                            SharedOperand<Element, kN, kIsMnMajorB>{b}, unchanged);
  }
};

inline void commit_products() {
  Machine::Thread& self = machine->self();
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

template <int kPending>
void wait_products() {
  Machine::Thread& self = machine->self();
  // They may take long: others go on meanwhile.
  unsigned turns = machine->is_lazy() ? machine->random() % kLongestTime : 0;
  machine->wait("products", [turns]() mutable { return turns-- == 0; });
  while (self.groups.size() > kPending) {
    for (auto& product : self.groups.front()) { product.run(); }
    for (auto& product : self.groups.front()) { product.finish(); }
    self.groups.erase(self.groups.begin());
  }
}

}  // namespace emulator
