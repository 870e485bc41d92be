// What the kernels share: the elementwise functions between the maps of a chain, with the derivatives that a write and its
// backward need (those of memory/joints.py, with the same names), sigmoid and dot.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// exp(x) for x <= 0, and the normal distribution's cdf and pdf: plain arithmetic that compilers vectorise
inline float exp_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = __builtin_rintf(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float power = n >= -126.0f ? n : -126.0f;  // NaN is no integer: p carries it on
  const int32_t bits = (static_cast<int32_t>(power) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline double exp_negative(double x) { return std::exp(x); }

template <typename T>
inline T sigmoid(T x) {
  const T e = exp_negative(-std::fabs(x));
  return (x < 0 ? e : T(1)) / (T(1) + e);
}

inline void normal(float z, float& cdf, float& pdf) {
  const float e = exp_negative(-0.5f * z * z);
  const float t = 1.0f / (1.0f + 0.4f * std::fabs(z));
  // 0.5 erfcx(|z| / sqrt 2) to 4e-7, fitted over 0 <= |z| <= 14
  float p = -0.039602555334568024f;
  p = p * t + 0.20060794055461884f;
  p = p * t - 0.37369504570961f;
  p = p * t + 0.2509845197200775f;
  p = p * t - 0.012391873635351658f;
  p = p * t + 0.15841856598854065f;
  p = p * t + 0.15578623116016388f;
  p = p * t + 0.15990422666072845f;
  p = p * t - 1.1989238373644184e-05f;
  const float tail = e * p;
  cdf = z < 0.0f ? tail : 1.0f - tail;
  pdf = e * 0.3989422804014327f;
}

inline void normal(double z, double& cdf, double& pdf) {
  cdf = 0.5 * std::erfc(-z * 0.7071067811865476);
  pdf = std::exp(-0.5 * z * z) * 0.3989422804014327;
}

template <typename T>
void gelu_value(const T* z, T* u, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    T cdf, pdf;
    normal(z[i], cdf, pdf);
    u[i] = z[i] * cdf;
  }
}

template <typename T>
void gelu_parts(const T* z, T* u, T* slope, T* curve, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    T cdf, pdf;
    normal(z[i], cdf, pdf);
    u[i] = z[i] * cdf;
    slope[i] = cdf + z[i] * pdf;
    curve[i] = pdf * (T(2) - z[i] * z[i]);
  }
}

template <typename T>
void gelu_pull(const T* z, const T* du, T* dz, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    T cdf, pdf;
    normal(z[i], cdf, pdf);
    dz[i] = du[i] * (cdf + z[i] * pdf);
  }
}

// `memory.joints` at rows x h values, z of each row being [p, r] for geglu
template <typename T>
struct Joint {
  bool glu;
  int64_t h;

  void value(const T* z, T* u, int64_t rows) const {
    if (!glu) return gelu_value(z, u, rows * h);
    for (int64_t r = 0; r < rows; r++) {
      gelu_value(z + r * 2 * h, u + r * h, h);
      for (int64_t i = 0; i < h; i++) u[r * h + i] *= z[r * 2 * h + h + i];
    }
  }

  void pull(const T* z, const T* du, T* dz, int64_t rows) const {
    if (!glu) return gelu_pull(z, du, dz, rows * h);
    for (int64_t r = 0; r < rows; r++) {
      const T *p = z + r * 2 * h, *gate = p + h, *d = du + r * h;
      T *dp = dz + r * 2 * h, *dr = dp + h;
      for (int64_t i = 0; i < h; i++) {
        T cdf, pdf;
        normal(p[i], cdf, pdf);
        dp[i] = d[i] * gate[i] * (cdf + p[i] * pdf);
        dr[i] = d[i] * p[i] * cdf;
      }
    }
  }

  // everything the backward asks of z: u, and slope, curve and gelu(p) of what goes through the GELU
  void parts(const T* z, T* u, T* slope, T* curve, T* g, int64_t rows) const {
    if (!glu) return gelu_parts(z, u, slope, curve, rows * h);
    for (int64_t r = 0; r < rows; r++) {
      gelu_parts(z + r * 2 * h, g + r * h, slope + r * h, curve + r * h, h);
      for (int64_t i = 0; i < h; i++) u[r * h + i] = g[r * h + i] * z[r * 2 * h + h + i];
    }
  }

  void pulled(const T* z, const T* slope, const T* g, const T* du, T* dz, int64_t rows, bool add) const {
    if (!glu) {
      for (int64_t i = 0; i < rows * h; i++) dz[i] = (add ? dz[i] : T(0)) + slope[i] * du[i];
      return;
    }
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < h; i++) {
        const int64_t at = r * h + i;
        T *dp = dz + r * 2 * h + i, *dr = dp + h;
        *dp = (add ? *dp : T(0)) + z[r * 2 * h + h + i] * slope[at] * du[at];
        *dr = (add ? *dr : T(0)) + g[at] * du[at];
      }
  }

  // gradients of <t, pull(z, du)> with respect to du and z
  void second(const T* z, const T* slope, const T* curve, const T* g, const T* du, const T* t, T* Du, T* Dz,
              int64_t rows) const {
    if (!glu) {
      for (int64_t i = 0; i < rows * h; i++) {
        Du[i] = slope[i] * t[i];
        Dz[i] = du[i] * t[i] * curve[i];
      }
      return;
    }
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < h; i++) {
        const int64_t at = r * h + i, p = r * 2 * h + i;
        const T tp = t[p], tr = t[p + h], along = z[p + h] * tp;
        Du[at] = along * slope[at] + tr * g[at];
        Dz[p] = (curve[at] * along + tr * slope[at]) * du[at];
        Dz[p + h] = slope[at] * tp * du[at];
      }
  }
};

template <typename T>
T dot(const T* x, const T* y, int64_t n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
  return sum;
}

// (x - origin) · y, in one sum: x may be close to origin. No origin: x · y
template <typename T>
T dot_from(const T* origin, const T* x, const T* y, int64_t n) {
  if (origin == nullptr) return dot(x, y, n);
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += (x[i] - origin[i]) * y[i];
  return sum;
}

}  // namespace
