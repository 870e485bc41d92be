// Products of decays over every span, and their gradient: `memory.rules.decay_products`.
//
// P[t][s] = prod_{s<r<=t} x_r for s <= t, else 0. With Z[r][s] = sum_{t>=r} P[t][r] DP[t][s] the gradient of x_r is
// sum_{s<r} Z[r][s] P[r-1][s], and Z[r] = DP[r] + x_{r+1} Z[r+1]: no division, so a decay of 0 is as good as any.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "border.h"

namespace {

template <typename T>
void forward(const T* x, T* P, int64_t count, int64_t length, T least, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    T* row = P + i * length * length;
    for (int64_t t = 0; t < length; t++, row += length) {
      const T decay = x[i * length + t], *before = row - length;
      for (int64_t s = 0; s < t; s++) {
        const T product = before[s] * decay;
        row[s] = product < least ? T(0) : product;  // denormal numbers would slow every product that follows
      }
      row[t] = 1;
      std::fill(row + t + 1, row + length, T(0));
    }
  }
}

template <typename T>
void backward(const T* x, const T* P, const T* DP, T* Dx, int64_t count, int64_t length, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> Z(length);
#pragma omp for
    for (int64_t i = 0; i < count; i++) {
      const T *products = P + i * length * length, *D = DP + i * length * length, *decay = x + i * length;
      std::fill(Z.begin(), Z.end(), T(0));
      for (int64_t r = length - 1; r >= 0; r--) {
        const T later = r + 1 < length ? decay[r + 1] : T(0), *row = D + r * length, *before = products + (r - 1) * length;
        T sum = 0;
        for (int64_t s = 0; s <= r; s++) Z[s] = row[s] + later * Z[s];
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < r; s++) sum += Z[s] * before[s];
        Dx[i * length + r] = sum;
      }
    }
  }
}

template <typename T>
struct Decay {
  int64_t count, length, threads;
  double least;
  View<const T> x;
  View<T> P;  // read by the backward
  View<const T> DP;
  View<T> Dx;

  int run(bool back) const {
    Border border;
    border.sizes({length, threads}, 1).sizes({count}).array(x, {count, length}).array(P, {count, length, length});
    if (back) border.array(DP, {count, length, length}).array(Dx, {count, length});
    if (!border) return kRefused;
    if (back) backward<T>(x, P, DP, Dx, count, length, threads);
    else forward<T>(x, P, count, length, T(least), threads);
    return kDone;
  }
};

}  // namespace

extern "C" {

int mnemos_decay_float(const Decay<float>* job) { return job->run(false); }
int mnemos_decay_double(const Decay<double>* job) { return job->run(false); }
int mnemos_decay_backward_float(const Decay<float>* job) { return job->run(true); }
int mnemos_decay_backward_double(const Decay<double>* job) { return job->run(true); }
}
