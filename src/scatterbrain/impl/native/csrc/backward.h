// The backward pass: weights are made again from q and k, with the reference and the sum that the forward pass left.
//
// p = a / sum, slope = dO.v - delta;  dV += p dO,  dlogit = p slope, and so through every low-rank weight.
// Logits are s q.k: dQ and dK are summed without s and multiplied by it at the end.
#pragma once
#include "piece.h"

namespace sb {

// Sums over queries, one set a piece.
struct KeyGrads {
    Buffer k, v, psi, mu, mean;
};

class Backward : public Piece {
public:
    Backward(Head& head, int first, int last, KeyGrads& to) : Piece(head, first, last), sums(to) {}

    void run() {
        const Head& x = h;
        natural = h.natural;  // with this piece's gradients
        natural.dk = sums.k.cleared(static_cast<int64_t>(x.m) * x.dp);
        natural.dv = sums.v.cleared(static_cast<int64_t>(x.m) * x.ep);
        if (x.with_features()) natural.dpsi = sums.psi.cleared(static_cast<int64_t>(x.m) * x.rp);
        if (x.with_means()) sums.mu.cleared(static_cast<int64_t>(x.total) * x.dp), sums.mean.cleared(static_cast<int64_t>(x.total) * x.ep);
        read_rows();
        start_visits();
        if (h.with_features()) features_base();
        for_blocks([&](int a, int z) {
            std::vector<int> rows(z - a);
            for (int i = a; i < z; ++i) rows[i - a] = i;
            const auto work = [&](const Tile& t, int from, int upto, const Rule& r) {
                tile(&t == &h.natural ? natural : t, from, upto, rows.data(), z - a, r);
                if (&t != &h.natural) scatter_listed(t);
            };
            if (h.with_nodes()) nodes_begin(a, z);
            near_work(a, z, work);
            local_work(a, z, work);
            if (h.with_means()) nodes_end(a, z);
        });
        bucket_work([&](Listed& l, const int* rows, int n, const Rule& r) {
            for (int x = 0; x < n; x += BQ) tile(l.tile, 0, (l.tile.n + W - 1) / W, rows + x, std::min(BQ, n - x), r);
            scatter(l);
        });
        for (const SbLayer* x : h.rows) full_rows(*x);
    }

private:
    KeyGrads& sums;
    Tile natural;
    Buffer w_buffer, s_buffer, low_buffer, slope_buffer, feature_rows, node_grad, node_gain, state_buffer, total_buffer, packed_state;
    std::vector<float> full_inverse;

    const float* phi(int i) const { return h.phi.data() + static_cast<int64_t>(i) * h.rp; }
    float* d_q(int i) { return h.out.data() + static_cast<int64_t>(i) * h.dp; }

    void read_rows() {
        const SbCall& c = h.call;
        for (int i = i0; i < i1; ++i) {
            const int64_t at = h.g * h.n + i;
            h.den.data()[i] = c.inverse[at];
            // rows left out: a reference so high that every weight is zero
            h.ref.data()[i] = c.log_scale[at] == NONE ? 0.0f : c.inverse[at] == 0 ? std::numeric_limits<float>::max() : c.log_scale[at];
            h.before.data()[i] = c.delta[at];
        }
        std::memset(d_q(i0), 0, static_cast<int64_t>(i1 - i0) * h.dp * sizeof(float));
        full_inverse.clear();
        for_full_rows([&](int i) {
            full_inverse.push_back(h.den.data()[i]);
            h.den.data()[i] = 0.0f;
        });
        if (!h.with_features()) return;
        for (int i = i0; i < i1; ++i) {  // phi as it enters the weights
            float* x = h.phi.data() + static_cast<int64_t>(i) * h.rp;
            const float by = h.rho.data()[i] == NONE || h.den.data()[i] == 0 ? 0.0f : exp_of(h.rho.data()[i] - h.ref.data()[i]) * h.den.data()[i];
            for (int t = 0; t < h.rp; t += W) store(x + t, load(x + t) * by);
        }
    }

    template <class F>
    void for_full_rows(F f) {
        for (const SbLayer* x : h.rows) {
            const int64_t* index = x->index + (x->groups > 1 ? h.g : 0) * x->inner;
            for (int64_t t = 0; t < x->inner; ++t)
                if (index[t] >= i0 && index[t] < i1) f(static_cast<int>(index[t]));
        }
    }

    void full_rows(const SbLayer& x) {
        size_t at = 0;
        if (&x != h.rows.front()) return;  // all layers at once: a row that two of them hold is done once
        std::vector<int> done;
        for_full_rows([&](int i) {
            const float inverse = full_inverse[at++];
            if (std::find(done.begin(), done.end(), i) != done.end()) return;
            done.push_back(i);
            h.den.data()[i] = inverse;
            tile(natural, 0, (h.m + W - 1) / W, &i, 1, Rule{});
        });
    }

    void tile(const Tile& t, int from, int upto, const int* rows, int n, const Rule& rule) {
        constexpr int STEP = KEYS_AT_ONCE_BACK / W;
        for (int p = from; p < upto; p += STEP) keys(t, p, std::min(upto, p + STEP), rows, n, rule);
    }

    void keys(const Tile& t, int from, int upto, const int* rows, int n, const Rule& rule) {
        constexpr int LD = KEYS_AT_ONCE_BACK;
        const int start = from * W, count = std::min((upto - from) * W, t.n - start);
        float *w = w_buffer.get(BQ * LD), *s = s_buffer.get(BQ * LD);
        if (rule.low) low_buffer.get(BQ * LD), slope_buffer.get(BQ * LD);
        for (int r = 0; r < n; r += GROUP) weights(t, from, upto, rows + r, std::min(GROUP, n - r), w + r * LD, s + r * LD, r, rule);
        const float *qs[BQ], *gs[BQ];
        for (int r = 0; r < n; ++r) qs[r] = h.q.row(rows[r]), gs[r] = h.d_out.row(rows[r]);
        const int64_t first = start;
        if (rule.exact) {
            to_rows(n, s, plain(t.k + first * t.k_step, t.k_step), h.dp / W, count, [&](int r) { return d_q(rows[r]); });
            to_keys(count, s, by_row(qs), h.dp, n, t.dk + first * h.dp);
        }
        to_keys(count, w, by_row(gs), h.ep, n, t.dv + first * h.ep);
        if (rule.low) feature_grads(t, start, count, rows, n);
    }

    template <class Row>
    void to_rows(int n, const float* a, const Operand& b, int nv, int count, Row row) {
        for (int r = 0; r < n; r += GROUP) {
            const int some = std::min(GROUP, n - r);
            const float* as[GROUP];
            float* c[GROUP];
            for (int x = 0; x < some; ++x) as[x] = a + (r + x) * KEYS_AT_ONCE_BACK, c[x] = row(r + x);
            product(some, as, 1, b, nv, count, c, ADD);
        }
    }

    void to_keys(int count, const float* a, const Operand& b, int width, int n, float* to) {
        product_rows(count, a, 1, KEYS_AT_ONCE_BACK, b, width / W, n, to, width, ADD);
    }

    // GROUP rows: w becomes the weight of each value, s the gradient of each logit.
    void weights(const Tile& t, int from, int upto, const int* rows, int n, float* w, float* s, int r0, const Rule& rule) {
        constexpr int LD = KEYS_AT_ONCE_BACK;
        const int wide = (upto - from) * W, start = from * W;
        const float *q[GROUP], *g[GROUP], *f[GROUP];
        float *logit[GROUP], *gain[GROUP], *low[GROUP];
        for (int r = 0; r < n; ++r) {
            q[r] = h.q.row(rows[r]), g[r] = h.d_out.row(rows[r]);
            logit[r] = s + r * LD, gain[r] = w + r * LD;
            if (rule.low) f[r] = phi(rows[r]), low[r] = low_buffer.data() + (r0 + r) * LD;
        }
        if (rule.exact) product(n, q, 1, panels(t.kt, h.d, from), upto - from, h.d, logit);
        product(n, g, 1, panels(t.vt, h.e, from), upto - from, h.e, gain);
        if (rule.low) product(n, f, 1, panels(t.psi_t, h.r, from), upto - from, h.r, low);
        for (int r = 0; r < n; ++r) {
            const int i = rows[r];
            const vf ref = all(h.ref.data()[i]), inverse = all(h.den.data()[i]), delta = all(h.before.data()[i]);
            const Reach reach = reach_of(t, i, rule);
            for (int x = 0; x < wide; x += W) {
                const Pairs who = pairs(t, start + x, i, rule, reach);
                const vf slope = load(gain[r] + x) - delta;
                vf p = who.own ? exp_of(load(logit[r] + x) - ref) * inverse : zero();
                vf weight = p;
                if (rule.route || rule.faces) {
                    vf inv;
                    const vf node = faced(t, start + x, row_of(i), i, inv);
                    const vi mine = who.own & (node >= zero());
                    p = mine ? p : zero();
                    weight = p;
                    if (rule.faces) {
                        const vf l = mine ? node * inv : zero();
                        weight -= l;
                        spread(t, start + x, i, l * slope, mine);
                    }
                }
                if (rule.low) {
                    const float sign = static_cast<float>(rule.low);
                    weight += who.low ? load(low[r] + x) * sign : zero();
                    store(slope_buffer.data() + (r0 + r) * LD + x, who.low ? slope * sign : zero());
                }
                store(logit[r] + x, p * slope);
                store(gain[r] + x, weight);
            }
        }
    }

    // What was taken out of node weights gives its gradient back to them.
    void spread(const Tile& t, int at, int i, vf x, vi mine) {
        if (!any(mine)) return;
        float* to = node_grad.data() + static_cast<int64_t>(i - table_first) * h.total;
        const int here = t.face_in ? i / h.chunk() * h.chunk() : 0;
        for (int l = 0; l < W; ++l)
            if (mine[l]) to[t.face_in && t.pos[at + l] >= here ? t.face_in[at + l] : t.face[at + l]] -= x[l];
    }

    // low_ij = phi_i.psi_j: the gradients of the logarithms of both.
    void feature_grads(const Tile& t, int start, int count, const int* rows, int n) {
        constexpr int LD = KEYS_AT_ONCE_BACK;
        const float* slope = slope_buffer.data();
        float* some = feature_rows.get(static_cast<int64_t>(std::max(BQ, LD)) * h.rp);
        std::memset(some, 0, static_cast<int64_t>(n) * h.rp * sizeof(float));
        to_rows(n, slope, plain(t.psi + static_cast<int64_t>(start) * h.rp, h.rp), h.rp / W, count, [&](int r) { return some + static_cast<int64_t>(r) * h.rp; });
        for (int r = 0; r < n; ++r) add_log_grad(rows[r], phi(rows[r]), some + static_cast<int64_t>(r) * h.rp);
        const float* fs[BQ];
        for (int r = 0; r < n; ++r) fs[r] = phi(rows[r]);
        std::memset(some, 0, static_cast<int64_t>(count) * h.rp * sizeof(float));
        to_keys(count, slope, by_row(fs), h.rp, n, some);
        for (int x = 0; x < count; ++x) {
            const float* psi = t.psi + static_cast<int64_t>(start + x) * h.rp;
            float* to = t.dpsi + static_cast<int64_t>(start + x) * h.rp;
            for (int f = 0; f < h.rp; f += W) store(to + f, load(to + f) + load(psi + f) * load(some + static_cast<int64_t>(x) * h.rp + f));
        }
    }

    void add_log_grad(int i, const float* f, const float* d) {
        float* to = h.call.d_phi + (h.g * h.n + i) * static_cast<int64_t>(h.r);
        for (int t = 0; t < h.r; ++t) to[t] += f[t] * d[t];
    }

    void scatter(Listed& l) { scatter_rows(l.keys, l.tile); }
    void scatter_listed(const Tile& t) {
        for (Listed& l : listed)
            if (&l.tile == &t) {
                scatter_rows(l.keys, t);
                std::memset(l.tile.dk, 0, l.keys.size() * h.dp * sizeof(float));
                std::memset(l.tile.dv, 0, l.keys.size() * h.ep * sizeof(float));
                if (t.dpsi) std::memset(l.tile.dpsi, 0, l.keys.size() * h.rp * sizeof(float));
            }
    }
    void scatter_rows(const std::vector<int>& keys, const Tile& t) {
        for (size_t x = 0; x < keys.size(); ++x) {
            const int64_t j = keys[x];
            add(natural.dk + j * h.dp, t.dk + x * h.dp, h.dp);
            add(natural.dv + j * h.ep, t.dv + x * h.ep, h.ep);
            if (t.dpsi) add(natural.dpsi + j * h.rp, t.dpsi + x * h.rp, h.rp);
        }
    }
    static void add(float* to, const float* from, int n) {
        for (int t = 0; t < n; t += W) store(to + t, load(to + t) + load(from + t));
    }

    // --- nodes ----------------------------------------------------------------------------------------------

    void nodes_begin(int a, int z) {
        node_scores(a, z);
        if (h.route) choose(a, z);
        node_grad.get(static_cast<int64_t>(BQ) * h.total);
        const Span s = span(a, z);
        for (int i = a; i < z; ++i) {
            float* x = row_of(i);
            const float ref = h.ref.data()[i], inverse = h.den.data()[i];
            const auto weigh = [&](int c) { store(x + c, exp_of(load(x + c) - ref) * inverse); };
            if (h.with_means()) {
                for (int c = 0; c < s.wide; c += W) weigh(c);
                for (int c = s.in_from; c < s.in_upto; c += W) weigh(c);
            } else {
                std::fill(x, x + h.total, 0.0f);
            }
            float* to = node_grad.data() + static_cast<int64_t>(i - a) * h.total;
            std::memset(to, 0, h.total * sizeof(float));
            if (!h.route || h.call.double_count) continue;
            mark(i, x, -1.0f);
        }
    }

    void mark(int i, float* x, float value) {
        int n;
        const int* at = visited(i, n);
        for (int t = 0; t < n; ++t) x[at[t]] = value;
    }

    void nodes_end(int a, int z) {
        const Span s = span(a, z);
        if (h.route && !h.call.double_count)
            for (int i = a; i < z; ++i) mark(i, row_of(i), 0.0f);
        node_gain.get(static_cast<int64_t>(BQ) * h.total);
        node_products(a, z, 0, s.wide);
        node_products(a, z, s.in_from, s.in_upto);
    }

    void node_products(int a, int z, int from, int upto) {
        if (upto <= from) return;
        float* gain = node_gain.data();
        for (int p = from / W; p < upto / W; p += NV_MAX)
            product_rows(z - a, h.d_out.row(a), h.d_out.step, 1, panels(h.mean_t.data(), h.e, p), std::min(NV_MAX, upto / W - p), h.e, gain + p * W, h.total);
        for (int i = a; i < z; ++i) {
            float* g = gain + static_cast<int64_t>(i - a) * h.total;
            const float *w = row_of(i), *more = node_grad.data() + static_cast<int64_t>(i - a) * h.total;
            const float delta = h.before.data()[i];
            for (int c = from; c < upto; c += W) store(g + c, load(w + c) * (load(g + c) - delta) + load(more + c));
        }
        constexpr int STEP = 64;
        for (int c = from; c < upto; c += STEP) {
            const int n = std::min(STEP, upto - c);
            product_rows(z - a, gain + c, h.total, 1, plain(h.mu.data() + static_cast<int64_t>(c) * h.dp, h.dp), h.dp / W, n, d_q(a), h.dp, ADD);
            product_rows(n, gain + c, 1, h.total, plain(h.q.row(a), h.q.step), h.dp / W, z - a, sums.mu.data() + static_cast<int64_t>(c) * h.dp, h.dp, ADD);
            product_rows(n, row_of(a) + c, 1, h.total, plain(h.d_out.row(a), h.d_out.step), h.ep / W, z - a,
                         sums.mean.data() + static_cast<int64_t>(c) * h.ep, h.ep, ADD);
        }
    }

    // --- running sums of features -----------------------------------------------------------------------------

    void features_base() {
        for (const auto& pass : passes()) {
            clear_state();
            for (const Step& s : pass) s.give ? rows_from_state(s) : state_from_keys(s);
            clear_state();
            for (size_t x = pass.size(); x-- > 0;) pass[x].give ? state_from_rows(pass[x]) : keys_from_state(pass[x]);
        }
    }

    void clear_state() {
        state_buffer.cleared(static_cast<int64_t>(h.r) * h.ep);
        total_buffer.cleared(h.rp);
    }

    // state += x' y, total += x' t for rows x (features) and y (values or gradients) of a step
    template <class X, class Y, class T>
    void into_state(const Step& s, X x, Y y, T t) {
        constexpr int SOME = 128;
        const float* values[SOME];
        for (int first = s.from; first < s.upto; first += SOME) {
            const int n = std::min(SOME, s.upto - first);
            float *dense = feature_rows.get(static_cast<int64_t>(SOME) * h.rp), *total = total_buffer.data();
            for (int r = 0; r < n; ++r) {
                const int j = at(s, first + r);
                const float by = t(j);
                values[r] = y(j);
                std::memcpy(dense + static_cast<int64_t>(r) * h.rp, x(j), h.rp * sizeof(float));
                for (int f = 0; f < h.rp; f += W) store(total + f, load(total + f) + load(x(j) + f) * by);
            }
            product_rows(h.r, dense, 1, h.rp, by_row(values), h.ep / W, n, state_buffer.data(), h.ep, ADD);
        }
    }
    void state_from_keys(const Step& s) {
        into_state(s, [&](int j) { return h.psi.data() + static_cast<int64_t>(j) * h.rp; }, [&](int j) { return h.v.row(j); }, [](int) { return 1.0f; });
    }
    void state_from_rows(const Step& s) {
        into_state(s, [&](int i) { return phi(i); }, [&](int i) { return h.d_out.row(i); }, [&](int i) { return -h.before.data()[i]; });
    }

    // x_r * (y.state_r + t total_r) for each row of a step
    template <class Y, class T, class Put>
    void from_state(const Step& s, Y y, T t, Put put) {
        if (s.upto <= s.from) return;
        const int wide = round_up(h.r, W);
        float* state = state_buffer.data();
        pack([&](int f) { return state + static_cast<int64_t>(f) * h.ep; }, h.r, h.e, 1.0f, packed_state.get(static_cast<int64_t>(wide) * h.e));
        float* some = feature_rows.get(static_cast<int64_t>(128) * h.rp);
        for (int first = s.from; first < s.upto; first += GROUP) {
            const int n = std::min(GROUP, s.upto - first);
            const float* a[GROUP];
            float* c[GROUP];
            for (int r = 0; r < n; ++r) a[r] = y(at(s, first + r)), c[r] = some + static_cast<int64_t>(r) * h.rp;
            product(n, a, 1, panels(packed_state.data(), h.e), wide / W, h.e, c);
            for (int r = 0; r < n; ++r) {
                const int j = at(s, first + r);
                for (int f = 0; f < h.rp; f += W) store(c[r] + f, load(c[r] + f) + load(total_buffer.data() + f) * t(j));
                put(j, c[r]);
            }
        }
    }
    void rows_from_state(const Step& s) {
        from_state(s, [&](int i) { return h.d_out.row(i); }, [&](int i) { return -h.before.data()[i]; }, [&](int i, const float* d) { add_log_grad(i, phi(i), d); });
    }
    void keys_from_state(const Step& s) {
        from_state(
            s, [&](int j) { return h.v.row(j); }, [](int) { return 1.0f; },
            [&](int j, const float* d) {
                const float* psi = h.psi.data() + static_cast<int64_t>(j) * h.rp;
                float* to = natural.dpsi + static_cast<int64_t>(j) * h.rp;
                for (int f = 0; f < h.rp; f += W) store(to + f, load(to + f) + load(psi + f) * load(d + f));
            });
        for (int first = s.from; first < s.upto; first += GROUP) {
            const int n = std::min(GROUP, s.upto - first);
            const float* a[GROUP];
            float* c[GROUP];
            for (int r = 0; r < n; ++r) {
                const int64_t j = at(s, first + r);
                a[r] = h.psi.data() + j * h.rp, c[r] = natural.dv + j * h.ep;
            }
            product(n, a, 1, plain(state_buffer.data(), h.ep), h.ep / W, h.r, c, ADD);
        }
    }
};

// The pieces' sums put together, the nodes' gradients handed to their keys, and all written out.
static void finish_backward(Head& h, std::vector<KeyGrads>& parts, int pieces) {
    const SbCall& c = h.call;
    const int64_t b = h.g / c.heads, head = h.g % c.heads;
    const auto join = [&](Buffer KeyGrads::*x, int64_t n) {
        float* to = (parts[0].*x).data();
        for (int p = 1; p < pieces; ++p) {
            const float* from = (parts[p].*x).data();
            for (int64_t t = 0; t < n; ++t) to[t] += from[t];
        }
        return to;
    };
    float *dk = join(&KeyGrads::k, static_cast<int64_t>(h.m) * h.dp), *dv = join(&KeyGrads::v, static_cast<int64_t>(h.m) * h.ep);
    if (h.with_means()) {
        const float *dmu = join(&KeyGrads::mu, static_cast<int64_t>(h.total) * h.dp), *dmean = join(&KeyGrads::mean, static_cast<int64_t>(h.total) * h.ep);
        const auto hand = [&](int j, int node, float by) {
            for (int t = 0; t < h.dp; ++t) dk[static_cast<int64_t>(j) * h.dp + t] += dmu[static_cast<int64_t>(node) * h.dp + t] * by;
            for (int t = 0; t < h.ep; ++t) dv[static_cast<int64_t>(j) * h.ep + t] += dmean[static_cast<int64_t>(node) * h.ep + t] * by;
        };
        for (int j = 0; j < h.m; ++j) {
            if (c.node[(c.node_groups > 1 ? h.g : 0) * h.m + j] < 0 || (h.ok && !h.ok[j])) continue;
            hand(j, h.face[j], h.inv.data()[j]);
            if (h.natural.face_in) hand(j, h.face_in[j], h.inv_in.data()[j]);
        }
    }
    for (int i = 0; i < h.n; ++i)
        write_row(c.d_q, b * c.d_q.sb + head * c.d_q.sh + i * c.d_q.sn, h.d, h.out.data() + static_cast<int64_t>(i) * h.dp, c.scale);
    for (int j = 0; j < h.m; ++j) {
        const bool seen = !h.ok || h.ok[j];  // what masked keys hold has no part
        write_row(c.d_k, b * c.d_k.sb + head * c.d_k.sh + j * c.d_k.sn, h.d, dk + static_cast<int64_t>(j) * h.dp, seen ? c.scale : 0.0f);
        write_row(c.d_v, b * c.d_v.sb + head * c.d_v.sh + j * c.d_v.sn, h.e, dv + static_cast<int64_t>(j) * h.ep, seen ? 1.0f : 0.0f);
    }
    if (!h.with_features()) return;
    const float* dpsi = join(&KeyGrads::psi, static_cast<int64_t>(h.m) * h.rp);
    for (int j = 0; j < h.m; ++j)
        for (int t = 0; t < h.r; ++t) c.d_psi[(h.g * h.m + j) * static_cast<int64_t>(h.r) + t] = dpsi[static_cast<int64_t>(j) * h.rp + t];
}

}  // namespace sb
