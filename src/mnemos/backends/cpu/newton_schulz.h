// Newton–Schulz of one wide matrix and its backward: memory/newton_schulz.py, with the same names and in the same order.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "joints.h"
#include "product.h"

namespace {

template <typename T>
struct NewtonSchulz {
  Gemm<T> gemm;
  int64_t d, e, steps, stage;  // d <= e; iterations between two products with the wide matrix
  T a, b, c, floor;

  int64_t square() const { return d * d; }
  int64_t grams() const { return steps * square(); }
  int64_t stages() const { return (steps + stage - 1) / stage; }
  int64_t forward_room() const { return d * e + 3 * square(); }
  int64_t backward_room() const { return stages() * d * e + (2 * steps + 6) * square(); }

  // X (d, e) and `room` are used up; fills in the Gram matrix of every iterate and returns where the step is
  T* forward(T* X, T* grams, T* room) const {
    T *Y = room, *P = Y + d * e, *Q = P + square(), *R = Q + square();
    normalise(X);
    for (int64_t first = 0; first < steps; first += stage) {
      const int64_t stop = std::min(first + stage, steps);
      gram(grams + first * square(), X);
      for (int64_t i = first; i < stop; i++) {
        T *A = grams + i * square(), *now = i == first ? P : Q;
        polynomial(now, A);
        if (i > first) symmetric(R, now, P), std::swap(P, R);
        if (i + 1 < stop) symmetric(R, A, now), symmetric(A + square(), now, R);
      }
      wide(Y, P, X);
      std::swap(X, Y);
    }
    return X;
  }

  // X (d, e) before the step, DX the gradient of the step, which becomes that of X; returns <DX, step>
  T backward(T* X, const T* grams, T* DX, T* room) const {
    T *other = room, *starts = other + d * e, *Q = starts + (stages() - 1) * d * e, *products = Q + steps * square();
    T* squares = products + steps * square();
    const T scale = normalise(X);
    for (int64_t i = 0; i < steps; i++) polynomial(Q + i * square(), grams + i * square());
    const auto start = [&](int64_t first) { return first ? starts + (first / stage - 1) * d * e : X; };
    const auto upto = [&](int64_t i) { return (i % stage ? products : Q) + i * square(); };  // … Q₂ Q₁ of its stage
    for (int64_t i = 0; i < steps; i++) {
      if (i % stage) symmetric(upto(i), Q + i * square(), upto(i - 1));
      if ((i + 1) % stage == 0 && i + 1 < steps) wide(start(i + 1), upto(i), start(i + 1 - stage));
    }
    T inner = 0, *D = DX;
    for (int64_t first = (stages() - 1) * stage; first >= 0; first -= stage) {
      const int64_t stop = std::min(first + stage, steps);
      const T* from = start(first);
      product(gemm, squares, D, false, from, true, d, d, e);
      const T* Dgram = stage_backward(first, stop, grams, Q, upto, squares);
      wide(other, upto(stop - 1), D);
      std::swap(other, D);
      if (stop == steps) inner = dot(from, D, d * e);
      product(gemm, D, Dgram, false, from, false, d, e, d, T(1));
    }
    const T along = dot(X, D, d * e);
    for (int64_t i = 0; i < d * e; i++) DX[i] = (D[i] - along * X[i]) * scale;
    return inner;
  }

 private:
  void mm(T* out, const T* x, const T* y, T beta = 0, T alpha = 1) const {
    product(gemm, out, x, false, y, false, d, d, d, beta, alpha);
  }
  // x y where they commute, as all polynomials of one Gram matrix do: symmetric, as they are
  void symmetric(T* out, const T* x, const T* y, T beta = 0, T alpha = 1) const {
    product(gemm, out, x, false, y, false, d, d, d, beta, alpha, true);
  }
  void wide(T* out, const T* P, const T* X) const { product(gemm, out, P, false, X, false, d, e, d); }
  void gram(T* out, const T* X) const { product(gemm, out, X, false, X, true, d, d, e, T(0), T(1), true); }

  // X over its norm, or 0 where it has none; returns what it was multiplied by
  T normalise(T* X) const {
    const T norm = std::sqrt(dot(X, X, d * e)), scale = norm >= floor ? T(1) / norm : T(0);
    for (int64_t i = 0; i < d * e; i++) X[i] *= scale;
    return scale;
  }

  // a + b A + c A²
  void polynomial(T* Q, const T* A) const {
    std::memcpy(Q, A, square() * sizeof(T));
    symmetric(Q, A, A, b, c);
    for (int64_t i = 0; i < d; i++) Q[i * d + i] += a;
  }

  // out = x + its transpose; out may be x
  void both(T* out, const T* x) const {
    for (int64_t i = 0; i < d; i++)
      for (int64_t j = 0; j <= i; j++) out[i * d + j] = out[j * d + i] = x[i * d + j] + x[j * d + i];
  }

  // from the gradient of a stage's product, at the start of `squares`: twice that of its first Gram matrix
  template <typename Upto>
  const T* stage_backward(int64_t first, int64_t stop, const T* grams, const T* Q, Upto upto, T* squares) const {
    T *DP = squares, *next = DP + square(), *half = next + square(), *DQ = half + square(), *Dgram = DQ + square();
    T* carried = Dgram + square();
    both(DP, DP);
    for (int64_t i = stop - 1; i >= first; i--) {
      const T *A = grams + i * square(), *Qi = Q + i * square();
      const bool later = i + 1 < stop;
      if (i > first) mm(half, DP, upto(i - 1), T(0), T(0.5));
      else
        for (int64_t j = 0; j < square(); j++) half[j] = T(0.5) * DP[j];
      if (later) mm(carried, Dgram, Qi), mm(half, carried, A, T(1));
      both(DQ, half);
      if (later) mm(Dgram, Qi, carried);
      mm(half, DQ, A, T(0), c);
      for (int64_t r = 0; r < d; r++)
        for (int64_t j = 0; j < d; j++) {
          const int64_t at = r * d + j;
          Dgram[at] = (later ? Dgram[at] : T(0)) + b * DQ[at] + half[at] + half[j * d + r];
        }
      if (i > first) mm(next, Qi, DP), std::swap(DP, next);
    }
    return Dgram;
  }
};

}  // namespace
