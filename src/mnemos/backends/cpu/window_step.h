// One step of the windowed family and its backward: `low_rank_newton_schulz` of memory/newton_schulz.py, with the same names.
//
// S = -Aᵀ diag(weight) B of the n window tokens of one token enters by the Gram matrices A Aᵀ and B Bᵀ, which are blocks (n, n) of
// matrices with `stride` columns; the step is Aᵀ M B. D before a name: gradient. t behind a name: transposed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "joints.h"
#include "product.h"
#include "square.h"

namespace {

constexpr int kMaxSteps = 64;

struct WindowRule {
  int64_t window, steps, nuclear;
  double floor, a[kMaxSteps], b[kMaxSteps], c[kMaxSteps];
};

template <typename T>
class WindowStep {
 public:
  WindowStep(Gemm<T> gemm, const WindowRule& rule) : gemm(gemm), rule(rule), n(rule.window) {}

  int64_t forward_room() const { return 9 * n * n; }
  int64_t backward_room() const { return (7 * rule.steps + 14) * n * n; }

  // M from the blocks that begin at gram_in and gram_out
  void forward(T* M, const T* gram_in, const T* gram_out, int64_t stride, const T* weight, T* room) const {
    sized([&](auto of) { of.forward(M, gram_in, gram_out, stride, weight, room); });
  }

  // DM is used up; adds to the blocks of Dgram_in and Dgram_out and to Dweight
  void backward(T* DM, const T* gram_in, const T* gram_out, int64_t stride, const T* weight, T* Dgram_in, T* Dgram_out,
                T* Dweight, T* room) const {
    sized([&](auto of) { of.backward(DM, gram_in, gram_out, stride, weight, Dgram_in, Dgram_out, Dweight, room); });
  }

 private:
  Gemm<T> gemm;
  const WindowRule& rule;
  int64_t n;

  template <typename Call>
  void sized(Call call) const {
    if (n == kLong<T>) call(Run<kLong<T>>{*this, n});
    else if (n == kShort<T>) call(Run<kShort<T>>{*this, n});
    else if (n == kShortest) call(Run<kShortest>{*this, n});
    else call(Run<0>{*this, n});
  }

  // N: the window, or 0 for any
  template <int N>
  struct Run {
    const WindowStep& of;
    const int64_t any;

    int64_t n() const { return N ? N : any; }
    int64_t square() const { return n() * n(); }

    void mm(T* out, const T* x, const T* y, T beta = 0, T alpha = 1) const {
      if constexpr (N) Square<T, N>::template mm<false>(out, x, y, beta, alpha);
      else product(of.gemm, out, x, false, y, false, any, any, any, beta, alpha);
    }
    void mm_t(T* out, const T* x, const T* y, T beta = 0, T alpha = 1) const {  // xᵀ y
      if constexpr (N) Square<T, N>::template mm<true>(out, x, y, beta, alpha);
      else product(of.gemm, out, x, true, y, false, any, any, any, beta, alpha);
    }
    void transpose(T* out, const T* x) const {
      if constexpr (N) return Square<T, N>::transpose(out, x);
      for (int64_t i = 0; i < any; i++)
        for (int64_t j = 0; j < any; j++) out[j * any + i] = x[i * any + j];
    }

    struct Parts {  // of one iteration: Mᵀ, B Mᵀ, H = M B Mᵀ, Q = H A, Q M
      T *Mt, *BMt, *H, *Q, *QM;
    };
    Parts parts_at(T* work) const {
      const int64_t each = square();
      return {work, work + each, work + 2 * each, work + 3 * each, work + 4 * each};
    }

    void forward(T* M, const T* gram_in, const T* gram_out, int64_t stride, const T* weight, T* room) const {
      T *A = room, *B = A + square(), *other = B + square(), *work = other + square();
      load(A, gram_in, stride), load(B, gram_out, stride);
      if (first(M, A, B, weight) == 0) return;
      T *now = M, *next = other;
      for (int64_t i = 0; i < of.rule.steps; i++) iterate(next, now, A, B, i, parts_at(work)), std::swap(now, next);
      const T inner = of.rule.nuclear ? nuclear(now, A, B, weight, work) : T(1);
      for (int64_t j = 0; j < square(); j++) M[j] = inner * now[j];
    }

    void backward(T* DM, const T* gram_in, const T* gram_out, int64_t stride, const T* weight, T* Dgram_in, T* Dgram_out,
                  T* Dweight, T* room) const {
      const int64_t steps = of.rule.steps, each = square();
      T *A = room, *B = A + each, *DA = B + each, *DB = DA + each, *work = DB + each, *Ms = work + 9 * each;
      T* made = Ms + (steps + 1) * each;  // the parts of every iteration
      load(A, gram_in, stride), load(B, gram_out, stride);
      const T scale = first(Ms, A, B, weight);
      if (scale == 0) return;
      std::fill(DA, DA + 2 * each, T(0));
      for (int64_t i = 0; i < steps; i++) iterate(Ms + (i + 1) * each, Ms + i * each, A, B, i, parts_at(made + 5 * i * each));
      if (of.rule.nuclear) nuclear_backward(DM, Ms + steps * each, A, B, weight, DA, DB, Dweight, work);
      for (int64_t i = steps; i-- > 0;)
        iterate_backward(DM, Ms + i * each, A, B, DA, DB, i, parts_at(made + 5 * i * each), work);
      T along = 0;
      for (int64_t i = 0; i < n(); i++) along -= weight[i] * DM[i * n() + i];
      const T slope = T(-0.5) * along * scale * scale * scale;  // of the squared norm
      for (int64_t i = 0; i < n(); i++) {
        T sum = 0;
        for (int64_t j = 0; j < n(); j++) {
          const int64_t at = i * n() + j;
          const T both = slope * weight[i] * weight[j];
          sum += A[at] * B[at] * weight[j];
          DA[at] += both * B[at], DB[at] += both * A[at];
        }
        Dweight[i] += 2 * slope * sum - scale * DM[i * n() + i];
      }
      store(Dgram_in, DA, stride), store(Dgram_out, DB, stride);
    }

    void load(T* to, const T* from, int64_t stride) const {
      for (int64_t i = 0; i < n(); i++) std::memcpy(to + i * n(), from + i * stride, n() * sizeof(T));
    }
    void store(T* to, const T* from, int64_t stride) const {
      for (int64_t i = 0; i < n(); i++)
        for (int64_t j = 0; j < n(); j++) to[i * stride + j] += from[i * n() + j];
    }

    // M = -diag(weight) / norm, or 0 below the floor; returns 1 / norm or 0
    T first(T* M, const T* A, const T* B, const T* weight) const {
      T squared = 0;
      for (int64_t i = 0; i < n(); i++) {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n(); j++) sum += weight[j] * A[i * n() + j] * B[i * n() + j];
        squared += weight[i] * sum;
      }
      const T scale = squared >= T(of.rule.floor * of.rule.floor) ? T(1) / std::sqrt(squared) : T(0);
      std::fill(M, M + square(), T(0));
      for (int64_t i = 0; i < n(); i++) M[i * n() + i] = -weight[i] * scale;
      return scale;
    }

    // next = a M + b Q M + c Q Q M, and what it is made of
    void iterate(T* next, const T* M, const T* A, const T* B, int64_t i, const Parts& p) const {
      if (i == 0) {  // M is diagonal
        std::memcpy(p.Mt, M, square() * sizeof(T));
        T diagonal[N ? N : 1], *m = N ? diagonal : p.Q;
        for (int64_t r = 0; r < n(); r++) m[r] = M[r * n() + r];
        for (int64_t r = 0; r < n(); r++)
          for (int64_t j = 0; j < n(); j++) {
            p.BMt[r * n() + j] = B[r * n() + j] * m[j];
            p.H[r * n() + j] = m[r] * p.BMt[r * n() + j];
          }
        mm(p.Q, p.H, A);
        for (int64_t r = 0; r < n(); r++)
          for (int64_t j = 0; j < n(); j++) p.QM[r * n() + j] = p.Q[r * n() + j] * M[j * n() + j];
      } else {
        transpose(p.Mt, M);
        mm(p.BMt, B, p.Mt);
        mm(p.H, M, p.BMt);
        mm(p.Q, p.H, A);
        mm(p.QM, p.Q, M);
      }
      const T a = of.rule.a[i], b = of.rule.b[i];
      for (int64_t j = 0; j < square(); j++) next[j] = a * M[j] + b * p.QM[j];
      mm(next, p.Q, p.QM, T(1), T(of.rule.c[i]));
    }

    // D of the next M becomes that of M
    void iterate_backward(T* D, const T* M, const T* A, const T* B, T* DA, T* DB, int64_t i, const Parts& p, T* work) const {
      const int64_t each = square();
      T *DQ = work, *DQM = DQ + each, *DH = DQM + each, *X = DH + each, *turned = X + each;
      const T a = of.rule.a[i], b = of.rule.b[i], c = of.rule.c[i];
      transpose(turned, p.QM);
      mm(DQ, D, turned, T(0), c);
      for (int64_t j = 0; j < each; j++) DQM[j] = b * D[j];
      mm_t(DQM, p.Q, D, T(1), c);
      if (i == 0) return first_backward(D, M, A, B, DA, DB, p, work);
      mm(DQ, DQM, p.Mt, T(1));
      mm_t(D, p.Q, DQM, a);
      mm(DH, DQ, A);
      mm(DA, p.H, DQ, T(1));
      transpose(turned, DH);
      for (int64_t j = 0; j < each; j++) DH[j] += turned[j];
      mm(X, DH, M);
      mm_t(DB, M, X, T(1), T(0.5));
      mm(D, X, B, T(1));
    }

    // the rest of it where M is diagonal, of whose gradient only the diagonal is asked for; A, B and H are symmetric
    void first_backward(T* D, const T* M, const T* A, const T* B, T* DA, T* DB, const Parts& p, T* work) const {
      const int64_t each = square();
      T *DQ = work, *DQM = DQ + each, *DH = DQM + each, *turned = DH + each, *m = turned + each, *sums = m + each;
      for (int64_t r = 0; r < n(); r++) m[r] = M[r * n() + r], sums[r] = of.rule.a[0] * D[r * n() + r];
      for (int64_t r = 0; r < n(); r++)
        for (int64_t j = 0; j < n(); j++) DQ[r * n() + j] += DQM[r * n() + j] * m[j];
      mm(DH, DQ, A);
      mm(DA, p.H, DQ, T(1));
      transpose(turned, DH);
      for (int64_t r = 0; r < n(); r++) {
        const T factor = m[r];
#pragma omp simd
        for (int64_t j = 0; j < n(); j++) {
          const int64_t at = r * n() + j;
          const T both = factor * (DH[at] + turned[at]);
          DB[at] += T(0.5) * both * m[j];
          sums[j] += p.Q[at] * DQM[at] + both * B[at];
        }
      }
      for (int64_t r = 0; r < n(); r++) D[r * n() + r] = sums[r];
    }

    // <S, Aᵀ M B>; leaves A M in `work`
    T nuclear(const T* M, const T* A, const T* B, const T* weight, T* work) const {
      mm(work, A, M);
      T inner = 0;
      for (int64_t i = 0; i < n(); i++) inner -= weight[i] * dot(work + i * n(), B + i * n(), n());
      return inner;
    }

    void nuclear_backward(T* DM, const T* M, const T* A, const T* B, const T* weight, T* DA, T* DB, T* Dweight,
                          T* work) const {
      T *AM = work, *WB = AM + square(), *Mt = WB + square();
      const T inner = nuclear(M, A, B, weight, AM), Dinner = dot(DM, M, square());
      for (int64_t i = 0; i < n(); i++) {
        Dweight[i] -= Dinner * dot(AM + i * n(), B + i * n(), n());
        for (int64_t j = 0; j < n(); j++) {
          WB[i * n() + j] = weight[i] * B[i * n() + j];
          DB[i * n() + j] -= Dinner * weight[i] * AM[i * n() + j];
        }
      }
      transpose(Mt, M);
      mm(DA, WB, Mt, T(1), -Dinner);
      mm(DM, A, WB, inner, -Dinner);
    }
  };
};

}  // namespace
