// What `memory.NeuralMemory` does around its scan, each in one pass over memory forward and two backward:
//
// mix: causal convolution over time -> SiLU -> norm of each head, from (B, T, C) to q, k (B, T, H, K) and v (B, T, H, V).
// gated_norm: RMS norm of each vector, times a scale, times SiLU of a gate; scale and gate may be absent.
//
// A norm is s / sqrt(alpha sum s^2 + epsilon), which also says "none" (alpha 0, epsilon 1) and "at most this long".

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "border.h"
#include "joints.h"

namespace {

constexpr int64_t SMALL = 1 << 15;  // numbers that one thread is done with before another would have begun

template <typename T>
struct Mix {
  int64_t rows, time, width;  // width 0: no convolution
  int64_t heads, dim[3];      // of q, k, v
  double alpha[3], epsilon[3];
  int64_t threads;
  View<const T> x, tail, weight;
  View<T> out[3];
  View<const T> Dout[3];  // null where nothing comes back
  View<T> Dx, Dtail, Dweight;

  bool fits(bool backward) const {
    if (!Border().sizes({rows, time, heads, dim[0], dim[1], dim[2], threads}, 1).sizes({width})) return false;
    const int64_t C = channels(), past = width > 0 ? width - 1 : 0;
    Border border;
    border.sizes({C}, 1).array(x, {rows, time, C}).array(tail, {rows, past, C}).array(weight, {width, C});
    for (int part = 0; part < 3; part++) {
      if (backward) border.optional(Dout[part], {rows, time, heads, dim[part]});
      else border.array(out[part], {rows, time, heads, dim[part]});
    }
    if (backward) border.array(Dx, {rows, time, C}).array(Dtail, {rows, past, C}).array(Dweight, {width, C});
    return bool(border);
  }

  int64_t channels() const { return heads * (dim[0] + dim[1] + dim[2]); }
  int team() const { return rows * time * channels() <= SMALL ? 1 : static_cast<int>(threads); }

  const T* input(int64_t b, int64_t t) const {  // t >= 1 - width
    const int64_t C = channels();
    return t < 0 ? tail + (b * (width - 1) + width - 1 + t) * C : x + (b * time + t) * C;
  }

  void convolve(int64_t b, int64_t t, T* u) const {
    const int64_t C = channels();
    if (width == 0) {
      std::copy(input(b, t), input(b, t) + C, u);
      return;
    }
    const T* last = input(b, t);
    for (int64_t c = 0; c < C; c++) u[c] = weight[(width - 1) * C + c] * last[c];
    for (int64_t j = 0; j < width - 1; j++) {
      const T *from = input(b, t - width + 1 + j), *w = weight + j * C;
      for (int64_t c = 0; c < C; c++) u[c] += w[c] * from[c];
    }
  }

  void forward() const {
    const int64_t C = channels();
#pragma omp parallel num_threads(team())
    {
      std::vector<T> u(C);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows * time; i++) {
        convolve(i / time, i % time, u.data());
        for (int64_t c = 0; c < C; c++) u[c] *= sigmoid(u[c]);
        const T* s = u.data();
        for (int part = 0; part < 3; part++) {
          const int64_t d = dim[part];
          T* y = out[part] + i * heads * d;
          for (int64_t h = 0; h < heads; h++, s += d, y += d) {
            const T scale = T(1) / std::sqrt(T(alpha[part]) * dot(s, s, d) + T(epsilon[part]));
            for (int64_t c = 0; c < d; c++) y[c] = s[c] * scale;
          }
        }
      }
    }
  }

  // the gradient of what the convolution of one token gave; u, s: room for a row each
  void before_silu(int64_t b, int64_t t, T* u, T* s, T* D) const {
    const int64_t C = channels(), i = b * time + t;
    convolve(b, t, u);
    for (int64_t c = 0; c < C; c++) {
      const T share = sigmoid(u[c]);
      s[c] = u[c] * share;
      u[c] = share + s[c] * (T(1) - share);
    }
    for (int part = 0; part < 3; part++) {
      const int64_t d = dim[part];
      for (int64_t h = 0; h < heads; h++, s += d, u += d, D += d) {
        if (Dout[part] == nullptr) {
          std::fill(D, D + d, T(0));
          continue;
        }
        const T* Dy = Dout[part] + (i * heads + h) * d;
        const T scale = T(1) / std::sqrt(T(alpha[part]) * dot(s, s, d) + T(epsilon[part]));
        const T along = T(alpha[part]) * scale * scale * scale * dot(Dy, s, d);
        for (int64_t c = 0; c < d; c++) D[c] = (scale * Dy[c] - along * s[c]) * u[c];
      }
    }
  }

  // Tiles of inputs, so that everything but x and the gradients stays in the cache. Input t is tap j of token t+width-1-j, so a
  // tile also needs the width-1 tokens behind it; it keeps the gradients of the last `width` ones in a ring.
  void backward() const {
    constexpr int64_t TILE = 128;
    const int64_t C = channels(), taps = std::max<int64_t>(width, 1), tiles = (time + TILE - 1) / TILE;
    std::vector<T> shares(team() * width * C);  // of Dweight, one per thread, so that their sum has one order
#pragma omp parallel num_threads(team())
    {
      std::vector<T> u(C), s(C), ring(taps * C);
      T* share = shares.data() + omp_get_thread_num() * width * C;
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < rows * tiles; tile++) {
        const int64_t b = tile / tiles, first = tile % tiles * TILE, end = std::min(time, first + TILE);
        for (int64_t t = first - taps + 1; t < end; t++) {
          const int64_t newest = t + taps - 1;
          if (newest < time) before_silu(b, newest, u.data(), s.data(), ring.data() + newest % taps * C);
          if (t < first && first > 0) continue;  // of the tile before
          T* to = t < 0 ? Dtail + (b * (width - 1) + width - 1 + t) * C : Dx + (b * time + t) * C;
          if (!width) {
            std::copy(ring.begin(), ring.end(), to);
            continue;
          }
          const T* mine = input(b, t);
          std::fill(to, to + C, T(0));
          for (int64_t j = 0; j < width; j++) {
            const int64_t user = t + width - 1 - j;
            if (user < 0 || user >= time) continue;
            const T *D = ring.data() + user % taps * C, *w = weight + j * C;
            T* Dw = share + j * C;
            for (int64_t c = 0; c < C; c++) {
              to[c] += w[c] * D[c];
              Dw[c] += mine[c] * D[c];
            }
          }
        }
      }
    }
    std::fill_n(Dweight.at, width * C, T(0));
    for (int64_t i = 0; i < static_cast<int64_t>(shares.size()); i++) Dweight[i % (width * C)] += shares[i];
  }
};

template <typename T>
struct GatedNorm {
  int64_t vectors, dim, period, threads;
  double epsilon;
  View<const T> x, scale, gate;  // scale (period, dim), of which vector i has row i % period; gate (vectors, dim); or null
  View<T> y;
  View<const T> Dy;
  View<T> Dx, Dscale, Dgate;

  bool fits(bool backward) const {
    if (!Border().sizes({dim, period, threads}, 1).sizes({vectors})) return false;
    Border border;
    border.array(x, {vectors, dim}).optional(scale, {period, dim}).optional(gate, {vectors, dim});
    if (!backward) return bool(border.array(y, {vectors, dim}));
    border.array(Dy, {vectors, dim}).array(Dx, {vectors, dim});
    if (scale) border.array(Dscale, {period, dim});
    if (gate) border.array(Dgate, {vectors, dim});
    return bool(border);
  }

  int team() const { return vectors * dim <= SMALL ? 1 : static_cast<int>(threads); }

  void forward() const {
#pragma omp parallel for schedule(static) num_threads(team())
    for (int64_t i = 0; i < vectors; i++) {
      const T *from = x + i * dim, *g = gate ? gate + i * dim : nullptr;
      T* to = y + i * dim;
      const T* factor = scale ? scale + i % period * dim : nullptr;
      const T r = T(1) / std::sqrt(dot(from, from, dim) / T(dim) + T(epsilon));
      for (int64_t c = 0; c < dim; c++) to[c] = from[c] * r;
      if (scale)
        for (int64_t c = 0; c < dim; c++) to[c] *= factor[c];
      if (gate)
        for (int64_t c = 0; c < dim; c++) to[c] *= g[c] * sigmoid(g[c]);
    }
  }

  void backward() const {
    std::vector<T> shares(scale ? team() * period * dim : 0);  // of Dscale, one per thread, so that their sum has one order
#pragma omp parallel num_threads(team())
    {
      std::vector<T> D(dim);
      T* mine = shares.data() + (scale ? omp_get_thread_num() * period * dim : 0);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < vectors; i++) {
        const T *from = x + i * dim, *g = gate ? gate + i * dim : nullptr;
        const T* factor = scale ? scale + i % period * dim : nullptr;
        const T r = T(1) / std::sqrt(dot(from, from, dim) / T(dim) + T(epsilon));
        std::copy(Dy + i * dim, Dy + (i + 1) * dim, D.begin());
        if (gate)
          for (int64_t c = 0; c < dim; c++) {
            const T share = sigmoid(g[c]), s = g[c] * share;
            Dgate[i * dim + c] = D[c] * from[c] * r * (scale ? factor[c] : T(1)) * (share + s * (T(1) - share));
            D[c] *= s;
          }
        if (scale)
          for (int64_t c = 0; c < dim; c++) {
            mine[i % period * dim + c] += D[c] * from[c] * r;
            D[c] *= factor[c];
          }
        const T along = r * r * r / T(dim) * dot(D.data(), from, dim);
        for (int64_t c = 0; c < dim; c++) Dx[i * dim + c] = r * D[c] - along * from[c];
      }
    }
    if (!scale) return;
    std::fill_n(Dscale.at, period * dim, T(0));
    for (int64_t i = 0; i < static_cast<int64_t>(shares.size()); i++) Dscale[i % (period * dim)] += shares[i];
  }
};

}  // namespace

extern "C" {

#define MNEMOS_LAYER(name, Job, T)                                        \
  int mnemos_##name##_##T(const Job<T>* job) {                            \
    return job->fits(false) ? (job->forward(), kDone) : kRefused;         \
  }                                                                       \
  int mnemos_##name##_backward_##T(const Job<T>* job) {                   \
    return job->fits(true) ? (job->backward(), kDone) : kRefused;         \
  }
MNEMOS_LAYER(mix, Mix, float)
MNEMOS_LAYER(mix, Mix, double)
MNEMOS_LAYER(gated_norm, GatedNorm, float)
MNEMOS_LAYER(gated_norm, GatedNorm, double)
}
