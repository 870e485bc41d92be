// One token: through the fast maps of a chain, as memory/step.py has it in torch, and through an ordinary linear map.
//
// One lane (batch row and head) after another, each on one thread; every matrix of the state is read once and written once.
// Matrices are row-major (in, out). G lanes, c entries of the window, F lifted key dim, V value dim.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "joints.h"

namespace {

constexpr int kMaxMaps = 32;

struct Sizes {  // all int64, as Python fills it in
  int64_t groups, lanes, entries, l2, before, threads, poison;
  int64_t in[kMaxMaps], out[kMaxMaps], maps[kMaxMaps];  // of each group; two maps are joined by geglu
};

template <typename T>
struct Arrays {
  const T *query, *keys, *values;       // G F, G c F, G c V
  const T *weight, *momentum, *retain;  // G c, G, G; no momentum: 0, no retain: 1
  const T *W[kMaxMaps], *S[kMaxMaps], *A[kMaxMaps];
  T *newW[kMaxMaps], *newS[kMaxMaps];  // may be W and S themselves; newS: none where the memory has no momentum
  T* y;                                // G V
};

// z (c, ·) += x (c, m) M (m, n); ld: distance between rows of z
template <typename T>
void add_product(const T* x, const T* M, T* z, int64_t c, int64_t m, int64_t n, int64_t ld) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4, M += 4 * n)
    for (int64_t e = 0; e < c; e++) {
      const T *a = x + e * m + i, a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
      T* to = z + e * ld;
#pragma omp simd
      for (int64_t j = 0; j < n; j++) to[j] += a0 * M[j] + a1 * M[n + j] + a2 * M[2 * n + j] + a3 * M[3 * n + j];
    }
  for (; i < m; i++, M += n)
    for (int64_t e = 0; e < c; e++)
      for (int64_t j = 0; j < n; j++) z[e * ld + j] += x[e * m + i] * M[j];
}

template <typename T>
class Token {
 public:
  Token(const Sizes& s, const Arrays<T>& a) : s(s), a(a), c(s.entries) {
    for (int g = 0; g < s.groups; g++) {
      joint[g] = {s.maps[g] == 2, s.out[g]};
      widest = std::max({widest, s.in[g], s.maps[g] * s.out[g]});
      u_at[g] = room, room += c * s.in[g];
      z_at[g] = room, room += c * s.maps[g] * s.out[g];
      d_at[g] = room, room += c * s.maps[g] * s.out[g];
      total += s.maps[g];
    }
    back_at = room, room += c * widest;
    room += 3 * widest;
  }

  int64_t room = 0;  // numbers of workspace

  void run(int64_t lane, T* ws) const {
    const int last = s.groups - 1;
    const int64_t F = s.in[0], V = s.out[last];
    T *back = ws + back_at, *x = back + c * widest, *z = x + widest, *row = z + widest;
    std::copy_n(a.keys + lane * c * F, c * F, ws + u_at[0]);
    for (int g = 0, i = 0; g <= last; i += s.maps[g++]) {
      T* out = ws + z_at[g];
      const int64_t wide = s.maps[g] * s.out[g];
      std::fill_n(out, c * wide, T(0));
      for (int k = 0; k < s.maps[g] && (g < last || s.l2); k++)
        add_product(ws + u_at[g], a.A[i + k] + lane * s.in[g] * s.out[g], out + k * s.out[g], c, s.in[g], s.out[g], wide);
      if (g < last) joint[g].value(out, ws + u_at[g + 1], c);
    }
    const T *z_last = ws + z_at[last], *v = a.values + lane * c * V;
    for (int64_t j = 0; j < c * V; j++) ws[d_at[last] + j] = z_last[j] - v[j];
    for (int g = last, i = total - s.maps[last]; g > 0; i -= s.maps[--g]) {
      const int64_t m = s.in[g], n = s.out[g], wide = s.maps[g] * n;
      for (int64_t e = 0; e < c; e++)
        for (int64_t r = 0; r < m; r++) {
          T sum = 0;
          for (int k = 0; k < s.maps[g]; k++)
            sum += dot(a.A[i + k] + (lane * m + r) * n, ws + d_at[g] + e * wide + k * n, n);
          back[e * m + r] = sum;
        }
      joint[g - 1].pull(ws + z_at[g - 1], back, ws + d_at[g - 1], c);
    }
    std::copy_n(a.query + lane * F, F, x);
    for (int g = 0, i = 0; g <= last; i += s.maps[g++]) {
      const int64_t n = s.out[g], wide = s.maps[g] * n;
      std::fill_n(z, wide, T(0));
      for (int k = 0; k < s.maps[g]; k++)
        write_and_read(i + k, lane, s.in[g], n, ws + u_at[g], ws + d_at[g] + k * n, wide, x, z + k * n, row);
      if (g < last) joint[g].value(z, x, 1);
    }
    std::copy_n(z, V, a.y + lane * V);
  }

 private:
  // S <- momentum S - Σ_e weight_e u_eᵀ d_e, W <- retain W + S, and z += x W
  void write_and_read(int i, int64_t lane, int64_t m, int64_t n, const T* u, const T* d, int64_t ld, const T* x, T* z,
                      T* row) const {
    const T keep = a.retain ? a.retain[lane] : T(1), carry = a.momentum ? a.momentum[lane] : T(0);
    const T* weight = a.weight + lane * c;
    for (int64_t r = 0; r < m; r++) {
      const int64_t at = (lane * m + r) * n;
      const T *W = a.W[i] + at, *S = a.momentum ? a.S[i] + at : nullptr;
      T *newW = a.newW[i] + at, *newS = a.newS[i] ? a.newS[i] + at : row;
      const T first = weight[0] * u[r];
      if (S) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) newS[j] = carry * S[j] - first * d[j];
      } else {
        for (int64_t j = 0; j < n; j++) newS[j] = -first * d[j];
      }
      for (int64_t e = 1; e < c; e++) {
        const T more = weight[e] * u[e * m + r];
#pragma omp simd
        for (int64_t j = 0; j < n; j++) newS[j] -= more * d[e * ld + j];
      }
      if (s.before) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) z[j] += x[r] * W[j], newW[j] = keep * W[j] + newS[j];
      } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) newW[j] = keep * W[j] + newS[j], z[j] += x[r] * newW[j];
      }
    }
  }

  const Sizes& s;
  const Arrays<T>& a;
  const int64_t c;
  int64_t widest = 0, back_at = 0, u_at[kMaxMaps], z_at[kMaxMaps], d_at[kMaxMaps];
  int total = 0;  // maps
  Joint<T> joint[kMaxMaps];
};

template <typename T>
bool step(const Sizes& s, const Arrays<T>& a) {
  const Token<T> token(s, a);
  bool enough = true;
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    const std::unique_ptr<T[]> ws(new (std::nothrow) T[token.room]);
    if (!ws) {
#pragma omp atomic write
      enough = false;
    } else if (s.poison) {
      std::fill_n(ws.get(), token.room, std::numeric_limits<T>::quiet_NaN());
    }
#pragma omp for schedule(static)
    for (int64_t lane = 0; lane < s.lanes; lane++)
      if (ws) token.run(lane, ws.get());
  }
  return enough;
}

// y (out) = M (out, in) x: one row after another, so that M is read as one stream
template <typename T>
void linear(const T* x, const T* M, const T* bias, T* y, int64_t in, int64_t out, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < out; r++) {
    const T* row = M + r * in;
    const int64_t q = in / 4;  // four sums at a time: none waits for another
    T s0 = bias ? bias[r] : T(0), s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < q; i++) {
      s0 += x[i] * row[i];
      s1 += x[q + i] * row[q + i];
      s2 += x[2 * q + i] * row[2 * q + i];
      s3 += x[3 * q + i] * row[3 * q + i];
    }
    for (int64_t i = 4 * q; i < in; i++) s0 += x[i] * row[i];
    y[r] = (s0 + s1) + (s2 + s3);
  }
}

}  // namespace

extern "C" {
int mnemos_step_float(const Sizes* s, const Arrays<float>* a) { return step(*s, *a); }
int mnemos_step_double(const Sizes* s, const Arrays<double>* a) { return step(*s, *a); }
void mnemos_linear_float(const float* x, const float* M, const float* bias, float* y, int64_t in, int64_t out, int64_t threads) {
  linear(x, M, bias, y, in, out, threads);
}
void mnemos_linear_double(const double* x, const double* M, const double* bias, double* y, int64_t in, int64_t out, int64_t threads) {
  linear(x, M, bias, y, in, out, threads);
}
}
