// The window of one token of a memory layer: monomials of its keys (memory/features.py), the weights of its tokens
// (memory/gating.py), and the buffers of raw keys, values and gates (memory/state.py).
//
// B batch, H heads, c window, K key dim, F lifted key dim, V value dim.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>

#include "border.h"
#include "joints.h"

namespace {

constexpr int64_t kMaxDegree = 64;

// All monomials of degree <= p of K variables, in the order of memory/features.py: degree by degree, each in lexicographic order
class Monomials {
 public:
  // C(K + degree, degree), or 0 where that is larger than any size may be
  static int64_t count(int64_t K, int64_t degree) {
    int64_t total = 1;
    for (int64_t i = 1; i <= degree; i++) {
      if (__builtin_mul_overflow(total, K + i, &total)) return 0;
      total /= i;
      if (total > kLargestSize) return 0;
    }
    return total;
  }

  Monomials(int64_t K, int64_t degree) : K(K), degree(degree), F(count(K, degree)) {}

  bool make() {
    last.reset(new (std::nothrow) int32_t[F]), scale.reset(new (std::nothrow) double[F]);
    const std::unique_ptr<int32_t[]> runs(new (std::nothrow) int32_t[F]);  // how often the last variable occurs
    if (!last || !scale || !runs) return false;
    last[0] = runs[0] = 0, scale[0] = 1, first[0] = 0, first[1] = 1;
    int64_t next = 1;
    for (int64_t i = 1; i <= degree; i++) {
      for (int64_t parent = first[i - 1]; parent < first[i]; parent++)
        for (int64_t k = last[parent]; k < K; k++, next++) {
          runs[next] = k == last[parent] ? runs[parent] + 1 : 1;
          last[next] = k;
          scale[next] = scale[parent] * i / runs[next];
        }
      first[i + 1] = next;
    }
    for (int64_t j = 0; j < F; j++) scale[j] = std::sqrt(scale[j]);
    return true;
  }

  // scales (F) of the features of one head; offsets (degree + 1): of the logs of its coefficients
  template <typename T>
  void head(const T* offsets, T* scales) const {
    double logs[kMaxDegree + 1], highest = offsets[0], factorial = 1, sum = 0;
    for (int64_t i = 0; i <= degree; i++) {
      factorial *= std::max<int64_t>(i, 1);
      logs[i] = double(offsets[i]) - std::log(factorial);
      highest = std::max(highest, logs[i]);
    }
    for (int64_t i = 0; i <= degree; i++) sum += std::exp(logs[i] - highest);
    for (int64_t i = 0; i <= degree; i++) {
      const double root = std::exp(0.5 * (logs[i] - highest - std::log(sum)));
      for (int64_t j = first[i]; j < first[i + 1]; j++) scales[j] = T(root * scale[j]);
    }
  }

  // x (K) -> y (F)
  template <typename T>
  void lift(const T* x, const T* scales, T* y) const {
    y[0] = 1;
    T* next = y + 1;
    for (int64_t parent = 0; parent < first[degree]; parent++) {
      const T factor = y[parent], *from = x + last[parent];
      const int64_t n = K - last[parent];
      for (int64_t k = 0; k < n; k++) next[k] = factor * from[k];
      next += n;
    }
    for (int64_t j = 0; j < F; j++) y[j] *= scales[j];
  }

 private:
  const int64_t K, degree, F;
  std::unique_ptr<int32_t[]> last;   // variable of each monomial
  std::unique_ptr<double[]> scale;   // root of the number of ordered products that give it
  int64_t first[kMaxDegree + 2];    // monomial of each degree
};

struct WindowSizes {
  int64_t degree;               // of the monomials; 0: keys as they are
  int64_t hidden, lags, decay;  // hidden: width of the token gate's network, 0 for none; whether there are such gates
  int64_t inside;               // 1: lr weighs the gradients of a step, and step_size is its rate
  double lag_start, token_start, decay_start, step_size;
};

template <typename T>
struct WindowArrays {
  View<const T> log_coefficients;              // H degree+1
  View<const T> token, token_offset, decay;    // H hidden, H, H
  View<const T> key, value, gate;              // B c-1 H K, B c-1 H V, B c-1 H
  View<T> new_key, new_value, new_gate;        // the same, none of them the old ones
};

// x (B, c-1, n), then last (B, n), without the first of each row -> y (B, c-1, n)
template <typename T>
void shift(const T* x, const T* last, T* y, int64_t B, int64_t c, int64_t n) {
  for (int64_t b = 0; b < B && c > 1; b++, x += (c - 1) * n, y += (c - 1) * n, last += n) {
    std::copy_n(x + n, (c - 2) * n, y);
    std::copy_n(last, n, y + (c - 2) * n);
  }
}

template <typename T>
bool fits(const WindowSizes& w, const WindowArrays<T>& a, int64_t B, int64_t H, int64_t K, int64_t V, int64_t c, int64_t F) {
  Border border;
  border.sizes({w.degree, w.hidden, w.lags, w.decay, w.inside}).that(w.degree <= kMaxDegree && w.lags <= 1 && w.decay <= 1 && w.inside <= 1);
  if (!border) return false;
  border.that((w.degree ? Monomials::count(K, w.degree) : K) == F);
  if (w.degree) border.array(a.log_coefficients, {H, w.degree + 1});
  if (w.hidden) border.array(a.token, {H, w.hidden}).array(a.token_offset, {H});
  if (w.decay) border.array(a.decay, {H});
  border.exact(a.key, {B, c - 1, H, K}).exact(a.value, {B, c - 1, H, V}).exact(a.gate, {B, c - 1, H});
  border.exact(a.new_key, {B, c - 1, H, K}).exact(a.new_value, {B, c - 1, H, V}).exact(a.new_gate, {B, c - 1, H});
  return bool(border);
}

}  // namespace
