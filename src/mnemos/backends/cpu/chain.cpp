// The tiles of `memory.chain_engine`, one lane (batch row and head) after another, each on one thread.
//
// The formulas are those of memory/packed.py and memory/anchors.py, with the same names; here the products of a lane stay in
// that core's cache and no thread waits for another. Matrices are row-major. A map is kept narrow axis first, (n, w), with its
// momentum, the initial weights it decays towards and the tile's entries of the wide side below it: Z = [W; S; W0; wide], S and W0
// where there are any; `thin` are the entries of the narrow side.
// L tokens and E entries of a tile, m = 2 matrices per map (W and S) or 1, N tiles, G lanes. D before a name: gradient.

#include "lane.h"

namespace {

template <typename T>
struct Arrays {
  Gemm<T> gemm;
  View<const T> q, k, v, C, beta, f, end, keep;
  View<const T> W0;     // lane after lane, map after map: (n, w); empty where weights decay towards 0
  View<const T> start;  // lane after lane, map after map: (m n, w)
  View<const T> given;  // the same with (n, w): the anchor, where the piece does not begin with a fresh one
  View<T> y, last, saved, states;
  // the backward's
  View<const T> Dy, Dlast;
  View<T> Dq, Dk, Dv, DC, Dbeta, Df, Dend, Dkeep, DW0, Dstart, Dgiven;
};

template <typename T>
struct Tile : Entries<T> {
  T *Z[kMaxMaps], *anchor[kMaxMaps];  // the anchor's place: Z where it is the tile's own W
};

template <typename T>
class Lane : public Keys<T> {
  using Base = Keys<T>;
  using Base::E, Base::L, Base::n, Base::s, Base::map, Base::joint, Base::room, Base::taken;
  using Base::take, Base::size, Base::place, Base::mm, Base::copy, Base::zero, Base::add, Base::input_of, Base::error_at;

 public:
  using Base::per_tile;

  Lane(const Sizes& s, const Arrays<T>& a) : Base(s, a.gemm), a(a), m(s.matrices), stacked(m + s.keeps_start) {
    state_size = 0;
    for (int l = 0; l < n; l++) state_offset[l] = state_size, state_size += m * size(l);
    if (s.period > 1 || !s.fresh)
      for (int l = 0; l < n; l++) anchor_offset[l] = state_size, state_size += map[l].n * map[l].w;
    if (s.reads) {
      for (int l = 0; l + 1 < n; l++) read_z[l] = per_tile, per_tile += L * map[l].out;
      for (int l = 0; l < n; l++) scores[l] = per_tile, per_tile += L * score_width(l);
    }
    widest = 0;
    for (int l = 0; l < n; l++) widest = std::max({widest, map[l].in, map[l].out, rows(l)});
  }

  int64_t state_size;

  // numbers that `forward` or `backward` needs room for
  int64_t workspace(bool backward) {
    room = nullptr, taken = 0;
    backward ? void(backward_buffers()) : void(forward_buffers());
    return taken;
  }

  void forward(int64_t g, T* own_room) {
    room = own_room, taken = 0;
    auto [tile, scratch, unsaved] = forward_buffers();
    for (int l = 0; l < n; l++) copy(tile.Z[l], a.start + place(g, l, m), m * size(l));
    copy_start(tile, g);
    if (!s.fresh)
      for (int l = 0; l < n; l++) copy(tile.anchor[l], a.given + place(g, l), size(l));
    for (int64_t i = 0; i < s.tiles; i++) {
      const int64_t at = i * s.lanes + g;
      if (s.fresh && i % s.period == 0) anchor_here(tile);
      if (s.saving && i % s.save_every == 0) save_state(tile, i / s.save_every * s.lanes + g);
      T* kept = s.saving ? a.saved + at * per_tile : unsaved;
      this->keys(tile, a.k + at * E * map[0].in, a.v + at * E * map[n - 1].out, kept, scratch[0]);
      if (s.reads) read(tile, at, kept, scratch.data());
      advance(tile, at, scratch[0]);
    }
    for (int l = 0; l < n; l++) copy(a.last + place(g, l, m), tile.Z[l], m * size(l));
  }

  void backward(int64_t g, T* own_room) {
    room = own_room, taken = 0;
    auto [tiles, D, scratch, Du, Dz, DA] = backward_buffers();
    for (int l = 0; l < n; l++) {
      copy(D.Z[l], a.Dlast + place(g, l, m), m * size(l));
      if (s.keeps_start) zero(start_of(D, l), size(l));
    }
    for (Tile<T>& tile : tiles) copy_start(tile, g);
    const bool own_anchor = s.period > 1 || !s.fresh;
    for (int l = 0; l < n; l++) {
      if (!own_anchor) DA[l] = D.Z[l];  // the anchor is the tile's W
      else zero(DA[l], size(l));
    }
    for (int64_t first = (s.tiles - 1) / s.save_every * s.save_every; first >= 0; first -= s.save_every) {
      const int64_t stop = std::min(first + s.save_every, s.tiles);
      load_state(tiles[0], first / s.save_every * s.lanes + g);
      for (int64_t i = first; i < stop; i++) {
        Tile<T>& tile = tiles[i - first];
        const int64_t at = i * s.lanes + g;
        if (s.fresh && i % s.period == 0) anchor_here(tile);
        this->keys_again(tile, a.k + at * E * map[0].in, a.saved + at * per_tile);
        if (i + 1 == stop) break;
        Tile<T>& next = tiles[i + 1 - first];
        for (int l = 0; l < n; l++) copy(next.Z[l], tile.Z[l], m * size(l));
        if (own_anchor)
          for (int l = 0; l < n; l++) copy(next.anchor[l], tile.A[l], size(l));
        advance_into(next, tile, at, scratch[0]);
      }
      for (int64_t i = stop - 1; i >= first; i--) {
        Tile<T>& tile = tiles[i - first];
        const int64_t at = i * s.lanes + g;
        advance_backward(tile, at, D, scratch.data());
        if (s.reads) read_backward(tile, at, D, scratch.data());
        this->keys_backward(tile, D, DA.data(), Du.data(), Dz.data());
        this->key_gradients(D, a.Dk + at * E * map[0].in, a.Dv + at * E * map[n - 1].out);
        if (own_anchor && s.fresh && i % s.period == 0)
          for (int l = 0; l < n; l++) add(D.Z[l], DA[l], size(l)), zero(DA[l], size(l));
      }
    }
    for (int l = 0; l < n; l++) {
      copy(a.Dstart + place(g, l, m), D.Z[l], m * size(l));
      if (s.keeps_start) copy(a.DW0 + place(g, l), start_of(D, l), size(l));
      if (!s.fresh) copy(a.Dgiven + place(g, l), DA[l], size(l));
    }
  }

 private:
  const Arrays<T>& a;
  const int64_t m, stacked;  // stacked: matrices of a map in Z
  int64_t state_offset[kMaxMaps], anchor_offset[kMaxMaps], read_z[kMaxMaps], scores[kMaxMaps], widest;

  int64_t rows(int l) const { return stacked * map[l].n + E; }
  int64_t score_width(int l) const { return map[l].widens ? E : rows(l); }

  Tile<T> new_tile() {
    Tile<T> t;
    for (int l = 0; l < n; l++) {
      t.Z[l] = take(rows(l) * map[l].w);
      t.thin[l] = take(E * map[l].n);
      t.wide[l] = t.Z[l] ? t.Z[l] + stacked * size(l) : nullptr;
      t.A[l] = t.anchor[l] = s.period > 1 || !s.fresh ? take(size(l)) : t.Z[l];
    }
    this->take_joints(t);
    return t;
  }

  struct Forward {
    Tile<T> tile;
    std::array<T*, 4> scratch;
    T* unsaved;
  };
  Forward forward_buffers() {
    Forward b;
    b.tile = new_tile();
    for (auto& x : b.scratch) x = take(std::max(L, E) * widest);
    b.unsaved = take(per_tile);
    return b;
  }

  struct Backward {
    std::vector<Tile<T>> tiles;
    Tile<T> D;
    std::array<T*, 6> scratch;
    std::array<T*, kMaxMaps> Du, Dz, DA;
  };
  Backward backward_buffers() {
    Backward b;
    for (int64_t i = 0; i < s.save_every; i++) b.tiles.push_back(new_tile());
    b.D = new_tile();
    for (auto& x : b.scratch) x = take(std::max(L, E) * widest);
    for (int l = 0; l < n; l++)
      b.Du[l] = take(E * map[l].in), b.Dz[l] = take(E * map[l].out), b.DA[l] = take(size(l));
    return b;
  }

  T* start_of(const Tile<T>& t, int l) const { return t.Z[l] + m * size(l); }

  void copy_start(Tile<T>& t, int64_t g) const {
    for (int l = 0; s.keeps_start && l < n; l++) copy(start_of(t, l), a.W0 + place(g, l), size(l));
  }

  void anchor_here(Tile<T>& t) const {
    for (int l = 0; l < n; l++)
      if (t.A[l] != t.Z[l]) copy(t.anchor[l], t.Z[l], size(l));
  }

  void save_state(const Tile<T>& t, int64_t at) const {
    for (int l = 0; l < n; l++) {
      copy(a.states + at * state_size + state_offset[l], t.Z[l], m * size(l));
      if (t.A[l] != t.Z[l]) copy(a.states + at * state_size + anchor_offset[l], t.A[l], size(l));
    }
  }

  void load_state(Tile<T>& t, int64_t at) const {
    for (int l = 0; l < n; l++) {
      copy(t.Z[l], a.states + at * state_size + state_offset[l], m * size(l));
      if (t.A[l] != t.Z[l]) copy(t.anchor[l], a.states + at * state_size + anchor_offset[l], size(l));
    }
  }

  struct Rows {
    const T *beta, *f, *C;
  };
  Rows read_rows(int64_t at) const {
    const int64_t skip = s.before ? 0 : 1;
    return {a.beta + at * (L + 1) + skip, a.f + at * (L + 1) + skip, a.C + (at * (L + 1) + skip) * E};
  }

  // [beta x, f x, (1 - beta) x, C * P], P in steps of `stride`
  void left(T* out, const T* x, const T* P, int64_t stride, const Rows& rows, int64_t dim) const {
    for (int64_t r = 0; r < L; r++) {
      const T beta = rows.beta[r], *row = x + r * dim;
      for (int64_t i = 0; i < dim; i++) out[i] = beta * row[i];
      out += dim;
      if (m == 2) {
        const T f = rows.f[r];
        for (int64_t i = 0; i < dim; i++) out[i] = f * row[i];
        out += dim;
      }
      if (s.keeps_start) {
        for (int64_t i = 0; i < dim; i++) out[i] = (T(1) - beta) * row[i];
        out += dim;
      }
      const T *C = rows.C + r * E, *score = P + r * stride;
      for (int64_t i = 0; i < E; i++) out[i] = C[i] * score[i];
      out += E;
    }
  }

  void read(Tile<T>& t, int64_t at, T* kept, T** scratch) {
    const Rows row = read_rows(at);
    const T* x = a.q + at * L * map[0].in;
    T *value = scratch[1], *part = scratch[2];
    for (int l = 0; l < n; l++) {
      T* out = l + 1 < n ? kept + read_z[l] : a.y + at * L * map[l].out;
      T* score = kept + scores[l];
      if (map[l].widens) {
        mm(score, x, false, t.thin[l], true, L, E, map[l].n);
        left(part, x, score, E, row, map[l].n);
        mm(out, part, false, t.Z[l], false, L, map[l].w, rows(l));
      } else {
        mm(score, x, false, t.Z[l], true, L, rows(l), map[l].w);
        mix(out, score, row, map[l].n, rows(l), part);
        mm(out, part, false, t.thin[l], false, L, map[l].n, E, T(1));
      }
      if (l + 1 < n) joint[l].value(out, value, L), x = value;
    }
  }

  // out = beta Y_W + f Y_S + (1 - beta) Y_W0, part = C * Y_E
  void mix(T* out, const T* Y, const Rows& row, int64_t dim, int64_t width, T* part) const {
    for (int64_t r = 0; r < L; r++) {
      const T *of_W = Y + r * width, *of_S = of_W + dim, *of_start = of_W + m * dim, *of_E = of_W + stacked * dim;
      const T* C = row.C + r * E;
      const T beta = row.beta[r], f = m == 2 ? row.f[r] : T(0);
      if (m == 2)
        for (int64_t i = 0; i < dim; i++) out[r * dim + i] = beta * of_W[i] + f * of_S[i];
      else
        for (int64_t i = 0; i < dim; i++) out[r * dim + i] = beta * of_W[i];
      if (s.keeps_start)
        for (int64_t i = 0; i < dim; i++) out[r * dim + i] += (T(1) - beta) * of_start[i];
      for (int64_t i = 0; i < E; i++) part[r * E + i] = C[i] * of_E[i];
    }
  }

  void read_backward(Tile<T>& t, int64_t at, Tile<T>& D, T** scratch) {
    const Rows row = read_rows(at);
    const int64_t skip = s.before ? 0 : 1;
    T *Dbeta = a.Dbeta + at * (L + 1) + skip, *Df = a.Df + at * (L + 1) + skip, *DC = a.DC + (at * (L + 1) + skip) * E;
    const T *kept = a.saved + at * per_tile, *Dout = a.Dy + at * L * map[n - 1].out;
    T *value = scratch[0], *part = scratch[1], *Dpart = scratch[2], *square = scratch[3];
    T* Dx[2] = {scratch[4], scratch[5]};
    for (int l = n - 1; l >= 0; l--) {
      const int64_t dim = map[l].n, width = rows(l);
      const T *x = a.q + at * L * map[0].in, *score = kept + scores[l];
      if (l) joint[l - 1].value(kept + read_z[l - 1], value, L), x = value;
      T* into = l ? Dx[0] : a.Dq + at * L * map[0].in;
      if (map[l].widens) {
        left(part, x, score, E, row, dim);
        mm(D.Z[l], part, true, Dout, false, width, map[l].w, L, T(1));
        mm(Dpart, Dout, false, t.Z[l], true, L, width, map[l].w);
        for (int64_t r = 0; r < L; r++) {
          const T *first = Dpart + r * width, *second = first + dim, *third = first + m * dim;
          const T* Dscore = first + stacked * dim;
          const T *C = row.C + r * E, *P = score + r * E, *from = x + r * dim;
          Dbeta[r] += dot_from(s.keeps_start ? third : nullptr, first, from, dim);
          if (m == 2) Df[r] += dot(second, from, dim);
          const T beta = row.beta[r], f = m == 2 ? row.f[r] : T(0);
          if (m == 2)
            for (int64_t i = 0; i < dim; i++) into[r * dim + i] = beta * first[i] + f * second[i];
          else
            for (int64_t i = 0; i < dim; i++) into[r * dim + i] = beta * first[i];
          if (s.keeps_start)
            for (int64_t i = 0; i < dim; i++) into[r * dim + i] += (T(1) - beta) * third[i];
          for (int64_t i = 0; i < E; i++) {
            DC[r * E + i] += Dscore[i] * P[i];
            square[r * E + i] = C[i] * Dscore[i];
          }
        }
        mm(into, square, false, t.thin[l], false, L, dim, E, T(1));
        mm(D.thin[l], square, true, x, false, E, dim, L, T(1));
      } else {
        mm(square, Dout, false, t.thin[l], true, L, E, dim);
        left(Dpart, Dout, square, E, row, dim);
        for (int64_t r = 0; r < L; r++) {
          const T *of_W = score + r * width, *of_S = of_W + dim, *of_E = of_W + stacked * dim, *from = Dout + r * dim;
          const T* C = row.C + r * E;
          Dbeta[r] += dot_from(s.keeps_start ? of_W + m * dim : nullptr, of_W, from, dim);
          if (m == 2) Df[r] += dot(of_S, from, dim);
          for (int64_t i = 0; i < E; i++) {
            DC[r * E + i] += square[r * E + i] * of_E[i];
            square[r * E + i] = C[i] * of_E[i];
          }
        }
        mm(D.thin[l], square, true, Dout, false, E, dim, L, T(1));
        mm(D.Z[l], Dpart, true, x, false, width, map[l].w, L, T(1));
        mm(into, Dpart, false, t.Z[l], false, L, map[l].w, width);
      }
      if (l) joint[l - 1].pull(kept + read_z[l - 1], into, Dx[1], L), Dout = Dx[1];
    }
  }

  // T = [C_end thin, n_end thin]
  void weigh(T* out, const T* thin, const T* end, int64_t dim) const {
    for (int64_t e = 0; e < E; e++)
      for (int64_t j = 0; j < m; j++)
        for (int64_t i = 0; i < dim; i++) out[(e * m + j) * dim + i] = end[e * m + j] * thin[e * dim + i];
  }

  void advance(Tile<T>& t, int64_t at, T* weighed) { advance_into(t, t, at, weighed); }

  // `to` holds the state of `t` and gets the one at the tile's end
  void advance_into(Tile<T>& to, Tile<T>& t, int64_t at, T* weighed) {
    const T *keep = a.keep + at * m, *end = a.end + at * E * m, f = m == 2 ? a.f[at * (L + 1) + L] : T(0);
    for (int l = 0; l < n; l++) {
      T *W = to.Z[l], *S = to.Z[l] + size(l);
      weigh(weighed, t.thin[l], end, map[l].n);
      if (m == 2)
        for (int64_t i = 0; i < size(l); i++) {
          W[i] = keep[0] * W[i] + f * S[i];
          S[i] *= keep[1];
        }
      else
        for (int64_t i = 0; i < size(l); i++) W[i] *= keep[0];
      if (s.keeps_start) {
        const T* W0 = start_of(to, l);
        for (int64_t i = 0; i < size(l); i++) W[i] += (T(1) - keep[0]) * W0[i];
      }
      mm(W, weighed, true, t.wide[l], false, m * map[l].n, map[l].w, E, T(1));
    }
  }

  void advance_backward(Tile<T>& t, int64_t at, Tile<T>& D, T** scratch) {
    const T *keep = a.keep + at * m, *end = a.end + at * E * m, f = m == 2 ? a.f[at * (L + 1) + L] : T(0);
    T *Dkeep = a.Dkeep + at * m, *Dend = a.Dend + at * E * m;
    T *weighed = scratch[0], *Dweighed = scratch[1];
    for (int l = 0; l < n; l++) {
      const int64_t dim = map[l].n, both = m * dim;
      weigh(weighed, t.thin[l], end, dim);
      mm(D.wide[l], weighed, false, D.Z[l], false, E, map[l].w, both);
      mm(Dweighed, t.wide[l], false, D.Z[l], true, E, both, map[l].w);
      T *DW = D.Z[l], *DS = DW + size(l), *W = t.Z[l], *S = W + size(l);
      Dkeep[0] += dot_from(s.keeps_start ? start_of(t, l) : nullptr, W, DW, size(l));
      if (s.keeps_start) {
        T* DW0 = start_of(D, l);
        for (int64_t i = 0; i < size(l); i++) DW0[i] += (T(1) - keep[0]) * DW[i];
      }
      if (m == 2) {
        Dkeep[1] += dot(DS, S, size(l));
        a.Df[at * (L + 1) + L] += dot(DW, S, size(l));
        for (int64_t i = 0; i < size(l); i++) {
          DS[i] = keep[1] * DS[i] + f * DW[i];
          DW[i] *= keep[0];
        }
      } else {
        for (int64_t i = 0; i < size(l); i++) DW[i] *= keep[0];
      }
      for (int64_t e = 0; e < E; e++) {
        const T *of_W = Dweighed + e * both, *of_S = of_W + dim, *thin = t.thin[l] + e * dim;
        T* Dthin = D.thin[l] + e * dim;
        Dend[e * m] += dot(thin, of_W, dim);
        if (m == 2) Dend[e * m + 1] += dot(thin, of_S, dim);
        if (m == 2)
          for (int64_t i = 0; i < dim; i++) Dthin[i] = end[e * m] * of_W[i] + end[e * m + 1] * of_S[i];
        else
          for (int64_t i = 0; i < dim; i++) Dthin[i] = end[e * m] * of_W[i];
      }
    }
  }
};

// Whether every array holds what the kernel will read and write
template <typename T>
bool fits(const Sizes& s, const Arrays<T>& a, const Lane<T>& lane, bool backward) {
  const int64_t N = s.tiles, G = s.lanes, L = s.tokens, E = s.entries, m = s.matrices, F = s.in[0], V = s.out[s.maps - 1];
  Border border;
  border.array(a.k, {N, G, E, F}).array(a.v, {N, G, E, V}).array(a.C, {N, G, L + 1, E}).array(a.beta, {N, G, L + 1});
  border.array(a.end, {N, G, E, m}).array(a.keep, {N, G, m});
  if (m == 2) border.array(a.f, {N, G, L + 1});
  if (s.reads) border.array(a.q, {N, G, L, F});
  if (s.saving || backward) {
    border.array(a.saved, {N, G, lane.per_tile}).array(a.states, {(N - 1) / s.save_every + 1, G, lane.state_size});
  }
  const int64_t numbers = lane.state_numbers();
  border.exact(a.last, {G, m, numbers});
  if (s.keeps_start) border.exact(a.W0, {G, numbers});
  if (s.keeps_start && backward) border.exact(a.DW0, {G, numbers});
  if (!s.fresh && !backward) border.array(a.given, {G, numbers});
  if (!backward) border.exact(a.start, {G, m, numbers});
  if (backward) border.exact(a.Dlast, {G, m, numbers}).exact(a.Dstart, {G, m, numbers});
  if (backward && !s.fresh) border.array(a.Dgiven, {G, numbers});
  if (!backward && s.reads) border.array(a.y, {N, G, L, V});
  if (backward) {
    border.array(a.Dk, {N, G, E, F}).array(a.Dv, {N, G, E, V}).array(a.Dend, {N, G, E, m}).array(a.Dkeep, {N, G, m});
    if (m == 2) border.array(a.Df, {N, G, L + 1});
    if (s.reads) {
      border.array(a.Dy, {N, G, L, V}).array(a.Dq, {N, G, L, F}).array(a.DC, {N, G, L + 1, E}).array(a.Dbeta, {N, G, L + 1});
    }
  }
  return a.gemm != nullptr && border;
}

template <typename T>
int run(const Sizes& s, const Arrays<T>& a, bool backward) {
  if (!fits(s) || !fits(s, a, Lane<T>(s, a), backward)) return kRefused;
  return run_lanes<Lane<T>, T>(s, backward, [&] { return Lane<T>(s, a); });
}

}  // namespace

extern "C" {

// Bytes of `Arrays`, or 0 for sizes that do not fit each other
int64_t mnemos_chain_sizes(const Sizes* s, int64_t* per_tile, int64_t* state) {
  if (!fits(*s)) return 0;
  Arrays<float> none{};
  Lane<float> lane(*s, none);
  *per_tile = lane.per_tile;
  *state = lane.state_size;
  return sizeof(Arrays<float>);
}

int mnemos_chain_float(const Sizes* s, const Arrays<float>* a, int backward) { return run(*s, *a, backward != 0); }
int mnemos_chain_double(const Sizes* s, const Arrays<double>* a, int backward) { return run(*s, *a, backward != 0); }
}
