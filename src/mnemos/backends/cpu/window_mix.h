// How tokens read the steps of their tile: mixed[t] = Σ_r C[t,r] P[t] M_r, where of P[t] and mixed[t] (E numbers) each r takes and
// changes the n numbers of its window, r..r+n-1. P are inner products of a token with the entries. L tokens; D before a name: gradient.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "joints.h"
#include "product.h"
#include "square.h"

namespace {

template <typename T>
struct WindowMix {
  Gemm<T> gemm;
  int64_t L, E, n, own;  // own: 1 where a token reads its own step
  const T* C;            // (L, L)

  // mixed (L, E) from P (L, E) in steps of `stride` and M (L, n, n); room: two windows of every token
  void forward(T* mixed, const T* P, int64_t stride, const T* M, T* room) const {
    std::fill(mixed, mixed + L * E, T(0));
    if (n == kLong<T>) return fast<kLong<T>>(mixed, P, stride, M);
    if (n == kShort<T>) return fast<kShort<T>>(mixed, P, stride, M);
    if (n == kShortest) return fast<kShortest>(mixed, P, stride, M);
    T *windows = room, *made = room + L * n;
    for (int64_t r = 0; first(r) < L; r++, M += n * n) {
      gather(windows, P, stride, r);
      product(gemm, made, windows, false, M, false, L - first(r), n, n);
      for (int64_t t = first(r); t < L; t++)
        for (int64_t i = 0; i < n; i++) mixed[t * E + r + i] += made[(t - first(r)) * n + i];
    }
  }

  // from Dmixed (L, E) to DP (L, E), which is written, and to DM and DC, to which is added; room: three windows of every token
  void backward(T* DP, const T* Dmixed, const T* P, int64_t stride, const T* M, T* DM, T* DC, T* room) const {
    std::fill(DP, DP + L * E, T(0));
    if (n == kLong<T>) return fast_backward<kLong<T>>(DP, Dmixed, P, stride, M, DM, DC);
    if (n == kShort<T>) return fast_backward<kShort<T>>(DP, Dmixed, P, stride, M, DM, DC);
    if (n == kShortest) return fast_backward<kShortest>(DP, Dmixed, P, stride, M, DM, DC);
    T *windows = room, *Dmade = room + L * n, *Dwindows = Dmade + L * n;
    for (int64_t r = 0; first(r) < L; r++, M += n * n, DM += n * n) {
      const int64_t count = L - first(r);
      gather(windows, P, stride, r);
      for (int64_t t = first(r); t < L; t++) std::memcpy(Dmade + (t - first(r)) * n, Dmixed + t * E + r, n * sizeof(T));
      product(gemm, DM, windows, true, Dmade, false, n, n, count, T(1));
      product(gemm, Dwindows, Dmade, false, M, true, count, n, n);
      for (int64_t t = first(r); t < L; t++) {
        const T *D = Dwindows + (t - first(r)) * n, factor = C[t * L + r];
        DC[t * L + r] += dot(D, P + t * stride + r, n);
        for (int64_t i = 0; i < n; i++) DP[t * E + r + i] += factor * D[i];
      }
    }
  }

 private:
  int64_t first(int64_t r) const { return r + 1 - own; }  // the first token that reads step r

  void gather(T* windows, const T* P, int64_t stride, int64_t r) const {
    for (int64_t t = first(r); t < L; t++)
      for (int64_t i = 0; i < n; i++) windows[(t - first(r)) * n + i] = C[t * L + r] * P[t * stride + r + i];
  }

  template <int N>
  void fast(T* mixed, const T* P, int64_t stride, const T* M) const {
    using S = Square<T, N>;
    for (int64_t r = 0; first(r) < L; r++, M += N * N) {
      typename S::Row held[N];
      for (int i = 0; i < N; i++) held[i] = S::row(M)[i];
      for (int64_t t = first(r); t < L; t++) {
        const T* score = P + t * stride + r;
        typename S::Row even = {}, odd = {};
#pragma GCC unroll 16
        for (int i = 0; i < N; i += 2) even += score[i] * held[i], odd += score[i + 1] * held[i + 1];
        *S::row(mixed + t * E + r) += C[t * L + r] * (even + odd);
      }
    }
  }

  template <int N>
  void fast_backward(T* DP, const T* Dmixed, const T* P, int64_t stride, const T* M, T* DM, T* DC) const {
    using S = Square<T, N>;
    T turned[N * N];
    for (int64_t r = 0; first(r) < L; r++, M += N * N, DM += N * N) {
      S::transpose(turned, M);
      typename S::Row held[N];
      for (int i = 0; i < N; i++) held[i] = S::row(turned)[i];
      for (int64_t t = first(r); t < L; t++) {
        const T *D = Dmixed + t * E + r, *score = P + t * stride + r;
        typename S::Row even = {}, odd = {};
#pragma GCC unroll 16
        for (int i = 0; i < N; i += 2) even += D[i] * held[i], odd += D[i + 1] * held[i + 1];
        even += odd;
        *S::row(DP + t * E + r) += C[t * L + r] * even;
        const auto along = even * *S::row(score);
        T sum = 0;
        for (int i = 0; i < N; i++) sum += along[i];
        DC[t * L + r] += sum;
      }
      for (int i = 0; i < N; i++) held[i] = S::row(DM)[i];
      for (int64_t t = first(r); t < L; t++) {
        const T* score = P + t * stride + r;
        const typename S::Row D = C[t * L + r] * *S::row(Dmixed + t * E + r);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) held[i] += score[i] * D;
      }
      for (int i = 0; i < N; i++) S::row(DM)[i] = held[i];
    }
  }
};

}  // namespace
