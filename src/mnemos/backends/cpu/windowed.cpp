// The tiles of `WindowSteps` in backends/torch/engine.py, one lane (batch row and head) after another, each on one thread: the same formulas, with the
// same names. A map is kept narrow axis first, (n, w), with the initial weights it decays towards, if any, and the tile's entries of
// the wide side below it: Z = [W; W0; wide], as in chain.cpp. L tokens and E = c-1+L entries of a tile, c window, N tiles, G lanes. D before a name: gradient.

#include "lane.h"
#include "window_mix.h"
#include "window_step.h"

namespace {

template <typename T>
struct Arrays {
  Gemm<T> gemm;
  View<const T> q, k, v, C, beta, weight;
  View<const T> W0;     // lane after lane, map after map: (n, w); empty where weights decay towards 0
  View<const T> start;  // lane after lane, map after map: (n, w)
  View<const T> given;  // the same: the anchor, where the run does not begin with a fresh one
  View<T> y, last, saved, states;
  // the backward's
  View<const T> Dy, Dlast;
  View<T> Dq, Dk, Dv, DC, Dbeta, Dweight, DW0, Dstart, Dgiven;
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
  int64_t state_size;

  Lane(const Sizes& s, const WindowRule& rule, const Arrays<T>& a)
      : Base(s, a.gemm), a(a), c(rule.window), stacked(1 + s.keeps_start), own_anchor(s.period > 1 || !s.fresh), step(a.gemm, rule) {
    state_size = (own_anchor ? 2 : 1) * this->state_numbers();
    for (int l = 0; l < n; l++) steps_at[l] = per_tile, per_tile += L * c * c;
    if (s.reads) {
      for (int l = 0; l + 1 < n; l++) read_z[l] = per_tile, per_tile += L * map[l].out;
      for (int l = 0; l < n; l++) scores[l] = per_tile, per_tile += L * score_width(l);
    }
    widest = 3 * c;  // for three windows of every token
    for (int l = 0; l < n; l++) widest = std::max({widest, map[l].in, map[l].out, rows(l)});
  }

  int64_t workspace(bool backward) {
    room = nullptr, taken = 0;
    backward ? void(backward_buffers()) : void(forward_buffers());
    return taken;
  }

  void forward(int64_t g, T* own_room) {
    room = own_room, taken = 0;
    auto [tile, scratch, unsaved, grams, work] = forward_buffers();
    for (int l = 0; l < n; l++) copy(tile.Z[l], a.start + place(g, l), size(l));
    copy_start(tile, g);
    if (!s.fresh)
      for (int l = 0; l < n; l++) copy(tile.anchor[l], a.given + place(g, l), size(l));
    for (int64_t i = 0; i < s.tiles; i++) {
      const int64_t at = i * s.lanes + g;
      if (s.fresh && i % s.period == 0) anchor_here(tile);
      if (s.saving && i % s.save_every == 0) save_state(tile, i / s.save_every * s.lanes + g);
      T* kept = s.saving ? a.saved + at * per_tile : unsaved;
      this->keys(tile, a.k + at * E * map[0].in, a.v + at * E * map[n - 1].out, kept, scratch[0]);
      for (int l = 0; l < n; l++) make_steps(tile, l, at, kept + steps_at[l], grams, work);
      if (s.reads) read(tile, at, kept, scratch.data());
      for (int l = 0; l < n; l++) advance(tile, tile, l, at, kept + steps_at[l], grams, scratch[0]);
    }
    for (int l = 0; l < n; l++) copy(a.last + place(g, l), tile.Z[l], size(l));
  }

  void backward(int64_t g, T* own_room) {
    room = own_room, taken = 0;
    auto [tiles, D, scratch, Du, Dz, DA, DM, grams, work] = backward_buffers();
    for (int l = 0; l < n; l++) {
      copy(D.Z[l], a.Dlast + place(g, l), size(l));
      if (s.keeps_start) zero(start_of(D, l), size(l));
      if (!own_anchor) DA[l] = D.Z[l];  // the anchor is the tile's W
      else zero(DA[l], size(l));
    }
    for (Tile<T>& tile : tiles) copy_start(tile, g);
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
        for (int l = 0; l < n; l++) {
          copy(next.Z[l], tile.Z[l], size(l));
          if (own_anchor) copy(next.anchor[l], tile.A[l], size(l));
          advance(next, tile, l, at, a.saved + at * per_tile + steps_at[l], grams, scratch[0]);
        }
      }
      for (int64_t i = stop - 1; i >= first; i--) {
        Tile<T>& tile = tiles[i - first];
        const int64_t at = i * s.lanes + g;
        for (int l = 0; l < n; l++) advance_backward(tile, l, at, D, DM[l], grams, scratch.data());
        if (s.reads) read_backward(tile, at, D, DM.data(), scratch.data());
        for (int l = 0; l < n; l++) steps_backward(tile, l, at, D, DM[l], grams, work);
        this->keys_backward(tile, D, DA.data(), Du.data(), Dz.data());
        this->key_gradients(D, a.Dk + at * E * map[0].in, a.Dv + at * E * map[n - 1].out);
        if (own_anchor && s.fresh && i % s.period == 0)
          for (int l = 0; l < n; l++) add(D.Z[l], DA[l], size(l)), zero(DA[l], size(l));
      }
    }
    for (int l = 0; l < n; l++) {
      copy(a.Dstart + place(g, l), D.Z[l], size(l));
      if (s.keeps_start) copy(a.DW0 + place(g, l), start_of(D, l), size(l));
      if (!s.fresh) copy(a.Dgiven + place(g, l), DA[l], size(l));
    }
  }

 private:
  const Arrays<T>& a;
  const int64_t c, stacked;  // stacked: matrices of a map in Z
  const bool own_anchor;
  const WindowStep<T> step;
  int64_t steps_at[kMaxMaps], read_z[kMaxMaps], scores[kMaxMaps], widest;

  int64_t rows(int l) const { return stacked * map[l].n + E; }
  int64_t score_width(int l) const { return map[l].widens ? E : rows(l); }

  Tile<T> new_tile() {
    Tile<T> t;
    for (int l = 0; l < n; l++) {
      t.Z[l] = take(rows(l) * map[l].w);
      t.thin[l] = take(E * map[l].n);
      t.wide[l] = t.Z[l] ? t.Z[l] + stacked * size(l) : nullptr;
      t.A[l] = t.anchor[l] = own_anchor ? take(size(l)) : t.Z[l];
    }
    this->take_joints(t);
    return t;
  }

  struct Forward {
    Tile<T> tile;
    std::array<T*, 4> scratch;
    T *unsaved, *grams, *work;
  };
  Forward forward_buffers() {
    Forward b;
    b.tile = new_tile();
    for (auto& x : b.scratch) x = take(std::max(L, E) * widest);
    b.unsaved = take(per_tile), b.grams = take(2 * E * E), b.work = take(step.forward_room());
    return b;
  }

  struct Backward {
    std::vector<Tile<T>> tiles;
    Tile<T> D;
    std::array<T*, 7> scratch;
    std::array<T*, kMaxMaps> Du, Dz, DA, DM;
    T *grams, *work;
  };
  Backward backward_buffers() {
    Backward b;
    for (int64_t i = 0; i < s.save_every; i++) b.tiles.push_back(new_tile());
    b.D = new_tile();
    for (auto& x : b.scratch) x = take(std::max(L, E) * widest);
    for (int l = 0; l < n; l++) {
      b.Du[l] = take(E * map[l].in), b.Dz[l] = take(E * map[l].out), b.DA[l] = take(size(l));
      b.DM[l] = take(L * c * c);
    }
    b.grams = take(4 * E * E), b.work = take(step.backward_room());
    return b;
  }

  T* start_of(const Tile<T>& t, int l) const { return t.Z[l] + size(l); }

  void copy_start(Tile<T>& t, int64_t g) const {
    for (int l = 0; s.keeps_start && l < n; l++) copy(start_of(t, l), a.W0 + place(g, l), size(l));
  }

  void anchor_here(Tile<T>& t) const {
    if (own_anchor)
      for (int l = 0; l < n; l++) copy(t.anchor[l], t.Z[l], size(l));
  }

  void save_state(const Tile<T>& t, int64_t at) const {
    T* to = a.states + at * state_size;
    for (int l = 0; l < n; l++) {
      copy(to + place(0, l), t.Z[l], size(l));
      if (own_anchor) copy(to + this->state_numbers() + place(0, l), t.A[l], size(l));
    }
  }

  void load_state(Tile<T>& t, int64_t at) const {
    const T* from = a.states + at * state_size;
    for (int l = 0; l < n; l++) {
      copy(t.Z[l], from + place(0, l), size(l));
      if (own_anchor) copy(t.anchor[l], from + this->state_numbers() + place(0, l), size(l));
    }
  }

  // Gram matrices of the entries of map l: of the narrow and of the wide side
  void make_grams(const Tile<T>& t, int l, T* grams) const {
    product(this->gemm, grams, t.thin[l], false, t.thin[l], true, E, E, map[l].n, T(0), T(1), true);
    product(this->gemm, grams + E * E, t.wide[l], false, t.wide[l], true, E, E, map[l].w, T(0), T(1), true);
  }
  T* of_inputs(T* grams, int l) const { return map[l].widens ? grams : grams + E * E; }
  T* of_errors(T* grams, int l) const { return map[l].widens ? grams + E * E : grams; }

  // M of every token of the tile: (L, c, c)
  void make_steps(const Tile<T>& t, int l, int64_t at, T* M, T* grams, T* work) const {
    make_grams(t, l, grams);
    for (int64_t r = 0; r < L; r++, M += c * c) {
      const int64_t block = r * E + r;
      step.forward(M, of_inputs(grams, l) + block, of_errors(grams, l) + block, E, a.weight + (at * L + r) * c, work);
    }
  }

  // from DM to the entries, and to the weights of the windows
  void steps_backward(const Tile<T>& t, int l, int64_t at, Tile<T>& D, T* DM, T* grams, T* work) const {
    T *Dgrams = grams + 2 * E * E, *both = grams;
    make_grams(t, l, grams);
    zero(Dgrams, 2 * E * E);
    for (int64_t r = 0; r < L; r++, DM += c * c) {
      const int64_t block = r * E + r, row = (at * L + r) * c;
      step.backward(DM, of_inputs(grams, l) + block, of_errors(grams, l) + block, E, a.weight + row,
                    of_inputs(Dgrams, l) + block, of_errors(Dgrams, l) + block, a.Dweight + row, work);
    }
    for (int side = 0; side < 2; side++) {
      const T* Dgram = Dgrams + side * E * E;
      for (int64_t i = 0; i < E; i++)
        for (int64_t j = 0; j < E; j++) both[i * E + j] = Dgram[i * E + j] + Dgram[j * E + i];
      if (side) mm(D.wide[l], both, false, t.wide[l], false, E, map[l].w, E, T(1));
      else mm(D.thin[l], both, false, t.thin[l], false, E, map[l].n, E, T(1));
    }
  }

  struct Rows {
    const T *beta, *C;
    int64_t skip;  // 1 where a token reads its own step
  };
  Rows read_rows(int64_t at) const {
    const int64_t skip = s.before ? 0 : 1;
    return {a.beta + at * (L + 1) + skip, a.C + (at * (L + 1) + skip) * L, skip};
  }
  WindowMix<T> mixer(const Rows& row) const { return {this->gemm, L, E, c, row.skip, row.C}; }

  // [beta x, (1 - beta) x, mixed]
  void left(T* out, const T* x, const T* mixed, const Rows& row, int64_t dim) const {
    for (int64_t r = 0; r < L; r++, out += stacked * dim + E) {
      const T beta = row.beta[r];
      for (int64_t i = 0; i < dim; i++) out[i] = beta * x[r * dim + i];
      if (s.keeps_start)
        for (int64_t i = 0; i < dim; i++) out[dim + i] = (T(1) - beta) * x[r * dim + i];
      copy(out + stacked * dim, mixed + r * E, E);
    }
  }

  void read(Tile<T>& t, int64_t at, T* kept, T** scratch) {
    const Rows row = read_rows(at);
    const T* x = a.q + at * L * map[0].in;
    T *value = scratch[1], *mixed = scratch[2], *part = scratch[3];
    for (int l = 0; l < n; l++) {
      T *out = l + 1 < n ? kept + read_z[l] : a.y + at * L * map[l].out, *score = kept + scores[l];
      const T* M = kept + steps_at[l];
      const int64_t dim = map[l].n;
      if (map[l].widens) {
        mm(score, x, false, t.thin[l], true, L, E, dim);
        mixer(row).forward(mixed, score, E, M, part);
        left(part, x, mixed, row, dim);
        mm(out, part, false, t.Z[l], false, L, map[l].w, rows(l));
      } else {
        mm(score, x, false, t.Z[l], true, L, rows(l), map[l].w);
        for (int64_t r = 0; r < L; r++) {
          const T *of_W = score + r * rows(l), beta = row.beta[r];
          for (int64_t i = 0; i < dim; i++) out[r * dim + i] = beta * of_W[i];
          if (s.keeps_start)
            for (int64_t i = 0; i < dim; i++) out[r * dim + i] += (T(1) - beta) * of_W[dim + i];
        }
        mixer(row).forward(mixed, score + stacked * dim, rows(l), M, part);
        mm(out, mixed, false, t.thin[l], false, L, dim, E, T(1));
      }
      if (l + 1 < n) joint[l].value(out, value, L), x = value;
    }
  }

  void read_backward(Tile<T>& t, int64_t at, Tile<T>& D, T** DM, T** scratch) {
    const Rows row = read_rows(at);
    T *Dbeta = a.Dbeta + at * (L + 1) + row.skip, *DC = a.DC + (at * (L + 1) + row.skip) * L;
    const T *kept = a.saved + at * per_tile, *Dout = a.Dy + at * L * map[n - 1].out;
    T *value = scratch[0], *mixed = scratch[1], *part = scratch[2], *Dpart = scratch[3], *work = scratch[4];
    T* Dx[2] = {scratch[5], scratch[6]};
    for (int l = n - 1; l >= 0; l--) {
      const int64_t dim = map[l].n, width = rows(l);
      const T *x = a.q + at * L * map[0].in, *score = kept + scores[l], *M = kept + steps_at[l];
      if (l) joint[l - 1].value(kept + read_z[l - 1], value, L), x = value;
      T* into = l ? Dx[0] : a.Dq + at * L * map[0].in;
      if (map[l].widens) {
        mixer(row).forward(mixed, score, E, M, work);
        left(part, x, mixed, row, dim);
        mm(D.Z[l], part, true, Dout, false, width, map[l].w, L, T(1));
        mm(Dpart, Dout, false, t.Z[l], true, L, width, map[l].w);
        for (int64_t r = 0; r < L; r++) {
          const T *first = Dpart + r * width, *second = first + dim, *from = x + r * dim, beta = row.beta[r];
          Dbeta[r] += dot_from(s.keeps_start ? second : nullptr, first, from, dim);
          for (int64_t i = 0; i < dim; i++) into[r * dim + i] = beta * first[i];
          if (s.keeps_start) {
            for (int64_t i = 0; i < dim; i++) into[r * dim + i] += (T(1) - beta) * second[i];
          }
          copy(part + r * E, first + stacked * dim, E);
        }
        mixer(row).backward(mixed, part, score, E, M, DM[l], DC, work);
        mm(into, mixed, false, t.thin[l], false, L, dim, E, T(1));
        mm(D.thin[l], mixed, true, x, false, E, dim, L, T(1));
      } else {
        mixer(row).forward(mixed, score + stacked * dim, width, M, work);
        mm(D.thin[l], mixed, true, Dout, false, E, dim, L, T(1));
        mm(part, Dout, false, t.thin[l], true, L, E, dim);
        mixer(row).backward(mixed, part, score + stacked * dim, width, M, DM[l], DC, work);
        left(Dpart, Dout, mixed, row, dim);
        for (int64_t r = 0; r < L; r++) {
          const T *of_W = score + r * width, *from = Dout + r * dim;
          Dbeta[r] += dot_from(s.keeps_start ? of_W + dim : nullptr, of_W, from, dim);
        }
        mm(D.Z[l], Dpart, true, x, false, width, map[l].w, L, T(1));
        mm(into, Dpart, false, t.Z[l], false, L, map[l].w, width);
      }
      if (l) joint[l - 1].pull(kept + read_z[l - 1], into, Dx[1], L), Dout = Dx[1];
    }
  }

  // band (E, E) = Σ_r C[L,r] M_r, the narrow side's entries first
  void make_band(T* band, const T* M, int64_t at, int l) const {
    const T* C = a.C + (at * (L + 1) + L) * L;
    zero(band, E * E);
    for (int64_t r = 0; r < L; r++, M += c * c)
      for (int64_t i = 0; i < c; i++)
        for (int64_t j = 0; j < c; j++) band[(r + i) * E + r + j] += C[r] * (map[l].widens ? M[i * c + j] : M[j * c + i]);
  }

  // `to` holds W of map l of `t` and gets the one at the tile's end
  void advance(Tile<T>& to, const Tile<T>& t, int l, int64_t at, const T* M, T* band, T* turned) const {
    const T beta = a.beta[at * (L + 1) + L];
    make_band(band, M, at, l);
    mm(turned, t.thin[l], true, band, false, map[l].n, E, E);
    for (int64_t i = 0; i < size(l); i++) to.Z[l][i] *= beta;
    if (s.keeps_start) {
      const T* W0 = start_of(t, l);
      for (int64_t i = 0; i < size(l); i++) to.Z[l][i] += (T(1) - beta) * W0[i];
    }
    mm(to.Z[l], turned, false, t.wide[l], false, map[l].n, map[l].w, E, T(1));
  }

  // writes D.thin, D.wide and DM; D.Z becomes the gradient of the tile's W
  void advance_backward(Tile<T>& t, int l, int64_t at, Tile<T>& D, T* DM, T* grams, T** scratch) const {
    const int64_t end = at * (L + 1) + L, dim = map[l].n, w = map[l].w;
    const T *M = a.saved + at * per_tile + steps_at[l], *C = a.C + end * L, beta = a.beta[end];
    T *DC = a.DC + end * L, *band = grams, *Dband = grams + E * E, *turned = scratch[0], *Dturned = scratch[1];
    make_band(band, M, at, l);
    mm(turned, t.thin[l], true, band, false, dim, E, E);
    mm(D.wide[l], turned, true, D.Z[l], false, E, w, dim);
    mm(Dturned, D.Z[l], false, t.wide[l], true, dim, E, w);
    mm(D.thin[l], band, false, Dturned, true, E, dim, E);
    mm(Dband, t.thin[l], false, Dturned, false, E, E, dim);
    for (int64_t r = 0; r < L; r++, M += c * c, DM += c * c) {
      T sum = 0;
      for (int64_t i = 0; i < c; i++)
        for (int64_t j = 0; j < c; j++) {
          const T Dm = map[l].widens ? Dband[(r + i) * E + r + j] : Dband[(r + j) * E + r + i];
          sum += Dm * M[i * c + j];
          DM[i * c + j] = C[r] * Dm;
        }
      DC[r] += sum;
    }
    a.Dbeta[end] += dot_from(s.keeps_start ? start_of(t, l) : nullptr, t.Z[l], D.Z[l], size(l));
    if (s.keeps_start) {
      T* DW0 = start_of(D, l);
      for (int64_t i = 0; i < size(l); i++) DW0[i] += (T(1) - beta) * D.Z[l][i];
    }
    for (int64_t i = 0; i < size(l); i++) D.Z[l][i] *= beta;
  }
};

bool fits(const Sizes& s, const WindowRule& rule) {
  if (!fits(s)) return false;
  Border border;
  border.sizes({rule.window, rule.steps}, 1);
  border.that(rule.steps <= kMaxSteps && s.matrices == 1 && rule.window - 1 + s.tokens == s.entries);
  for (int l = 0; l + 1 < s.maps; l++) border.that(s.joint[l] == 0);  // maps side by side take steps of their own
  return bool(border);
}

// Whether every array holds what the kernel will read and write
template <typename T>
bool fits(const Sizes& s, const WindowRule& rule, const Arrays<T>& a, const Lane<T>& lane, bool backward) {
  const int64_t N = s.tiles, G = s.lanes, L = s.tokens, E = s.entries, F = s.in[0], V = s.out[s.maps - 1];
  Border border;
  border.array(a.k, {N, G, E, F}).array(a.v, {N, G, E, V}).array(a.C, {N, G, L + 1, L}).array(a.beta, {N, G, L + 1});
  border.array(a.weight, {N, G, L, rule.window});
  if (s.reads) border.array(a.q, {N, G, L, F});
  if (s.saving || backward) {
    border.array(a.saved, {N, G, lane.per_tile}).array(a.states, {(N - 1) / s.save_every + 1, G, lane.state_size});
  }
  const int64_t numbers = lane.state_numbers();
  border.exact(a.last, {G, numbers});
  if (s.keeps_start) border.exact(a.W0, {G, numbers});
  if (s.keeps_start && backward) border.exact(a.DW0, {G, numbers});
  if (!s.fresh && !backward) border.array(a.given, {G, numbers});
  if (!backward) border.exact(a.start, {G, numbers});
  if (backward) border.exact(a.Dlast, {G, numbers}).exact(a.Dstart, {G, numbers});
  if (backward && !s.fresh) border.array(a.Dgiven, {G, numbers});
  if (!backward && s.reads) border.array(a.y, {N, G, L, V});
  if (backward) {
    border.array(a.Dk, {N, G, E, F}).array(a.Dv, {N, G, E, V}).array(a.DC, {N, G, L + 1, L}).array(a.Dbeta, {N, G, L + 1});
    border.array(a.Dweight, {N, G, L, rule.window});
    if (s.reads) border.array(a.Dy, {N, G, L, V}).array(a.Dq, {N, G, L, F});
  }
  return a.gemm != nullptr && border;
}

template <typename T>
int run(const Sizes& s, const WindowRule& rule, const Arrays<T>& a, bool backward) {
  if (!fits(s, rule) || !fits(s, rule, a, Lane<T>(s, rule, a), backward)) return kRefused;
  return run_lanes<Lane<T>, T>(s, backward, [&] { return Lane<T>(s, rule, a); });
}

}  // namespace

extern "C" {

// Bytes of `Arrays`, or 0 for sizes that do not fit each other
int64_t mnemos_windowed_sizes(const Sizes* s, const WindowRule* rule, int64_t* per_tile, int64_t* state) {
  if (!fits(*s, *rule)) return 0;
  Arrays<float> none{};
  Lane<float> lane(*s, *rule, none);
  *per_tile = lane.per_tile;
  *state = lane.state_size;
  return sizeof(Arrays<float>);
}

int mnemos_windowed_float(const Sizes* s, const WindowRule* rule, const Arrays<float>* a, int backward) {
  return run(*s, *rule, *a, backward != 0);
}
int mnemos_windowed_double(const Sizes* s, const WindowRule* rule, const Arrays<double>* a, int backward) {
  return run(*s, *rule, *a, backward != 0);
}
}
