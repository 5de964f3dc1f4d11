// The forward pass: each row keeps a numerator, a denominator and the largest exponent it has met.
#pragma once
#include "piece.h"

namespace sb {

class Forward : public Piece {
public:
    using Piece::Piece;

    void run() {
        start_visits();
        steady.assign(i1 - i0, 0);
        if (h.with_features()) {
            clear(i0, i1);
            features_base();
        }
        for_blocks([&](int a, int z) {
            if (!h.with_features()) clear(a, z);
            if (h.with_nodes()) nodes_base(a, z);
            near_work(a, z, [&](const Tile& t, int from, int upto, const Rule& r) { block(t, from, upto, a, z, r); });
            if (h.with_features())
                for (int i = a; i < z; ++i) h.before.data()[i] = log_mass(i);
            local_work(a, z, [&](const Tile& t, int from, int upto, const Rule& r) { block(t, from, upto, a, z, r); });
        });
        bucket_work([&](Listed& l, const int* rows, int n, const Rule& r) {
            for (int x = 0; x < n; x += GROUP) {
                fetch(rows + x + GROUP, std::min(GROUP, n - x - GROUP));
                group(l.tile, 0, (l.tile.n + W - 1) / W, rows + x, std::min(GROUP, n - x), r);
            }
        });
        for (const SbLayer* x : h.rows) full_rows(*x);
        finish();
    }

private:
    Buffer weights, rounded, low, sums, totals;
    int low_masks[KEYS_AT_ONCE];
    std::vector<char> steady;  // rows whose reference will not change

    void clear(int a, int z) {
        std::memset(h.out.data() + static_cast<int64_t>(a) * h.ep, 0, static_cast<int64_t>(z - a) * h.ep * sizeof(float));
        for (int i = a; i < z; ++i) {
            h.ref.data()[i] = h.steady_reference(i);
            steady[i - i0] = h.ref.data()[i] != NONE;
            store(parts(i), zero());
        }
    }
    float* parts(int i) { return h.den.data() + static_cast<int64_t>(i) * W; }

    // The next rows on their way while these are done: they lie anywhere.
    void fetch(const int* rows, int n) const {
        for (int r = 0; r < n; ++r) {
            const float *q = h.q.row(rows[r]), *out = h.out.data() + static_cast<int64_t>(rows[r]) * h.ep;
            for (int t = 0; t < h.d; t += 16) __builtin_prefetch(q + t);
            for (int t = 0; t < h.ep; t += 16) __builtin_prefetch(out + t, 1);
        }
    }

    float log_mass(int i) const { return std::log(std::fabs(h.total_of(i))) + h.ref.data()[i]; }

    // Some queries against panels [from, upto) of a tile; a band leaves each of them less.
    void block(const Tile& t, int from, int upto, int a, int z, const Rule& rule) {
        const bool trim = rule.band && rule.low <= 0;
        for (int i = a; i < z; i += GROUP) {
            const int some = std::min(GROUP, z - i);
            int rows[GROUP];
            for (int r = 0; r < some; ++r) rows[r] = i + r;
            if (!trim) {
                group(t, from, upto, rows, some, rule);
                continue;
            }
            const auto p = reach(*rule.band, i, i + some);
            group(t, p.first, p.second, rows, some, rule);
        }
    }

    void group(const Tile& t, int from, int upto, const int* rows, int n, const Rule& rule) {
        constexpr int STEP = KEYS_AT_ONCE / W;
        for (int p = from; p < upto; p += STEP) keys(t, p, std::min(upto, p + STEP), rows, n, rule);
    }

    void keys(const Tile& t, int from, int upto, const int* rows, int n, const Rule& rule) {
        const int wide = (upto - from) * W, start = from * W, count = std::min(wide, t.n - start);
        float* s = weights.get(GROUP * KEYS_AT_ONCE);
        const float* q[GROUP];
        float *to[GROUP], *out[GROUP], alpha[GROUP];
        for (int r = 0; r < n; ++r) {
            q[r] = h.paired ? h.q_half.row(rows[r]) : h.q.row(rows[r]);
            alpha[r] = h.call.scale;
            to[r] = s + r * KEYS_AT_ONCE;
            out[r] = h.out.data() + static_cast<int64_t>(rows[r]) * h.ep;
        }
        if (rule.exact && h.paired) product(n, q, 1, paired(panels(t.kt, h.d2, from)), upto - from, h.d2, to, SET, alpha);
        if (rule.exact && !h.paired) product(n, q, 1, panels(t.kt, h.d, from), upto - from, h.d, to);
        if (rule.low) low_products(t, from, upto, rows, n);
        for (int r = 0; r < n; ++r) alpha[r] = rule.open ? weigh_open(count, wide, rows[r], to[r]) : weigh(t, start, wide, rows[r], to[r], rule, r);
        if (h.paired)
            add_pairs(t, start, count, wide, n, to, out, alpha);
        else
            product(n, to, 1, plain(t.v + static_cast<int64_t>(start) * t.v_step, t.v_step), h.ep / W, count, out, SCALE_ADD, alpha);
    }

    // Weights rounded to the values' bfloat16, as PyTorch's attention does; the denominator sums them unrounded.
    void add_pairs(const Tile& t, int start, int count, int wide, int n, float* const* s, float* const* out, const float* alpha) {
        const float* pairs[GROUP];
        float* to = rounded.get(GROUP * KEYS_AT_ONCE / 2);
        for (int r = 0; r < n; ++r) {
            if (wide % (2 * W)) store(s[r] + wide, zero());
            round_pairs(s[r], round_up(wide, 2 * W), to + r * KEYS_AT_ONCE / 2);
            pairs[r] = to + r * KEYS_AT_ONCE / 2;
        }
        const int64_t first = static_cast<int64_t>(start / 2) * h.ep;
        product(n, pairs, 1, paired(plain(t.v_pairs + first, h.ep)), h.ep / W, (count + 1) / 2, out, SCALE_ADD, alpha);
    }

    void low_products(const Tile& t, int from, int upto, const int* rows, int n) {
        const float* f[GROUP];
        float* to[GROUP];
        low.get(GROUP * KEYS_AT_ONCE);
        for (int r = 0; r < n; ++r) f[r] = h.phi.data() + static_cast<int64_t>(rows[r]) * h.rp, to[r] = low.data() + r * KEYS_AT_ONCE;
        product(n, f, 1, panels(t.psi_t, h.r, from), upto - from, h.r, to);
    }

    // Raises a row's reference to what it meets now; returns what its earlier sums are multiplied by.
    float raise(int i, vf top) {
        float& ref = h.ref.data()[i];
        const float next = std::max(ref, max_of(top));
        if (next == ref) return 1.0f;
        const float alpha = ref == NONE ? 0.0f : exp_of(ref - next);
        ref = next;
        store(parts(i), load(parts(i)) * alpha);
        return alpha;
    }

    float weigh_open(int count, int wide, int i, float* s) {
        if (count < wide) store(s + wide - W, lanes() < alli(count - (wide - W)) ? load(s + wide - W) : all(NONE));
        float alpha = 1.0f;
        if (!steady[i - i0]) {
            vf top = load(s);
            for (int x = W; x < wide; x += W) top = larger(top, load(s + x));
            alpha = raise(i, top);
        }
        const vf ref = all(h.ref.data()[i]);
        vf sum = load(parts(i));
        for (int x = 0; x < wide; x += W) {
            const vf w = exp_of(load(s + x) - ref);
            sum += w;
            store(s + x, w);
        }
        store(parts(i), sum);
        return alpha;
    }

    // Logits become weights; returns what the row's earlier sums are multiplied by.
    float weigh(const Tile& t, int start, int wide, int i, float* s, const Rule& rule, int r) {
        vf top = all(NONE);
        const Reach reach = reach_of(t, i, rule);
        for (int x = 0; x < wide; x += W) {
            const Pairs who = pairs(t, start + x, i, rule, reach);
            const vf logit = who.own ? load(s + x) : all(NONE);
            if (rule.low) std::memcpy(low_masks + x, &who.low, sizeof who.low);
            store(s + x, logit);
            top = larger(top, logit);
        }
        const float alpha = steady[i - i0] ? 1.0f : raise(i, top), next = h.ref.data()[i];
        if (next == NONE) {
            for (int x = 0; x < wide; x += W) store(s + x, zero());
            return 1.0f;
        }
        const float* nodes = rule.route || rule.faces ? row_of(i) : nullptr;
        const float prior_by = rule.faces ? exp_of(prior.data()[i - table_first] - next) : 0.0f;
        const float f = rule.low ? exp_of(h.rho.data()[i] - next) * rule.low : 0.0f;
        vf sum = load(parts(i));
        for (int x = 0; x < wide; x += W) {
            vf w = exp_of(load(s + x) - next);
            if (rule.route || rule.faces) w = less_node(t, start + x, i, w, load(s + x) > all(NONE), nodes, prior_by);
            if (rule.low) w += loadi(low_masks + x) ? load(low.data() + r * KEYS_AT_ONCE + x) * f : zero();
            sum += w;
            store(s + x, w);
        }
        store(parts(i), sum);
        return alpha;
    }

    vf less_node(const Tile& t, int at, int i, vf w, vi own, const float* nodes, float by) const {
        vf inv;
        const vf node = faced(t, at, nodes, i, inv);
        w -= own ? node * inv * by : zero();
        return node < zero() ? zero() : w;
    }

    // Cluster means: every open node a key of its own, that weighs as many; and the routes, chosen by the same scores.
    void nodes_base(int a, int z) {
        node_scores(a, z);
        if (h.route) choose(a, z);
        prior.get(BQ);
        const Span s = span(a, z);
        for (int i = a; i < z; ++i) {
            float* x = row_of(i);
            if (h.route && !h.call.double_count) close(i, x);
            if (h.with_means()) weigh_nodes(i, x, s);
        }
        if (h.with_means()) {
            add_nodes(a, z, 0, s.wide);
            add_nodes(a, z, s.in_from, s.in_upto);
        }
        for (int i = a; i < z; ++i) {
            float* x = row_of(i);
            if (!h.with_means()) std::fill(x, x + h.total, 0.0f);
            if (!h.route) continue;
            int n;
            const int* at = visited(i, n);
            for (int t = 0; t < n; ++t) x[at[t]] = -1.0f;
        }
    }

    void close(int i, float* x) {
        int n;
        const int* at = visited(i, n);
        for (int t = 0; t < n; ++t) x[at[t]] = NONE;
    }

    void weigh_nodes(int i, float* x, const Span& s) {
        if (!steady[i - i0]) {
            vf top = all(NONE);
            for (int c = 0; c < s.wide; c += W) top = larger(top, load(x + c));
            for (int c = s.in_from; c < s.in_upto; c += W) top = larger(top, load(x + c));
            h.ref.data()[i] = max_of(top);
        }
        const float most = h.ref.data()[i];
        prior.data()[i - table_first] = most;
        vf sum = zero();
        const auto weigh = [&](int c) {
            const vf w = most == NONE ? zero() : exp_of(load(x + c) - most);
            sum += w;
            store(x + c, w);
        };
        for (int c = 0; c < s.wide; c += W) weigh(c);
        for (int c = s.in_from; c < s.in_upto; c += W) weigh(c);
        store(parts(i), sum);
    }

    void add_nodes(int a, int z, int from, int upto) {
        constexpr int STEP = 64;  // nodes: their values stay in the first-level cache for all queries
        for (int c = from; c < upto; c += STEP) {
            if (h.paired) {
                const int some = std::min(STEP, upto - c), wide = round_up(some, 2 * W);
                float* to = rounded.get(static_cast<int64_t>(BQ) * STEP / 2);
                for (int i = a; i < z; ++i) round_pairs(row_of(i) + c, wide, to + (i - a) * STEP / 2);
                product_rows(z - a, to, STEP / 2, 1, paired(plain(h.mean_pairs.data() + static_cast<int64_t>(c / 2) * h.ep, h.ep)), h.ep / W, some / 2,
                             h.out.data() + static_cast<int64_t>(a) * h.ep, h.ep, ADD);
                continue;
            }
            product_rows(z - a, row_of(a) + c, h.total, 1, plain(h.mean.data() + static_cast<int64_t>(c) * h.ep, h.ep), h.ep / W, std::min(STEP, upto - c),
                         h.out.data() + static_cast<int64_t>(a) * h.ep, h.ep, ADD);
        }
    }

    void features_base() {
        for (int i = i0; i < i1; ++i) h.ref.data()[i] = h.rho.data()[i];
        for (const auto& pass : passes()) {
            float* state = sums.cleared(static_cast<int64_t>(h.r) * h.ep);
            float* total = totals.cleared(h.rp);
            for (const Step& s : pass) s.give ? give(s, state, total) : collect_keys(s, state, total);
        }
    }

    // state[r] += sum_j psi_jr v_j, total[r] += sum_j psi_jr
    void collect_keys(const Step& s, float* state, float* total) {
        constexpr int SOME = 256;
        const float *values[SOME], *features[SOME];
        for (int first = s.from; first < s.upto; first += SOME) {
            const int n = std::min(SOME, s.upto - first);
            float* dense = low.get(std::max<int64_t>(static_cast<int64_t>(SOME) * h.rp, GROUP * KEYS_AT_ONCE));
            for (int x = 0; x < n; ++x) {
                const int j = at(s, first + x);
                values[x] = h.v.row(j), features[x] = h.psi.data() + static_cast<int64_t>(j) * h.rp;
                std::memcpy(dense + static_cast<int64_t>(x) * h.rp, features[x], h.rp * sizeof(float));
                for (int t = 0; t < h.rp; t += W) store(total + t, load(total + t) + load(features[x] + t));
            }
            product_rows(h.r, dense, 1, h.rp, by_row(values), h.ep / W, n, state, h.ep, ADD);
        }
    }

    void give(const Step& s, const float* state, const float* total) {
        for (int first = s.from; first < s.upto; first += GROUP) {
            const int n = std::min(GROUP, s.upto - first);
            const float* f[GROUP];
            float* to[GROUP];
            for (int x = 0; x < n; ++x) {
                const int i = at(s, first + x);
                f[x] = h.phi.data() + static_cast<int64_t>(i) * h.rp;
                to[x] = h.out.data() + static_cast<int64_t>(i) * h.ep;
                vf sum = zero();
                for (int t = 0; t < h.rp; t += W) sum += load(f[x] + t) * load(total + t);
                store(parts(i), load(parts(i)) + sum);
            }
            product(n, f, 1, plain(state, h.ep), h.ep / W, h.r, to, ADD);
        }
    }

    // Queries that see every key exactly, whatever else was summed for them.
    void full_rows(const SbLayer& x) {
        const int64_t* index = x.index + (x.groups > 1 ? h.g : 0) * x.inner;
        for (int64_t t = 0; t < x.inner; ++t) {
            const int i = static_cast<int>(index[t]);
            if (i < i0 || i >= i1) continue;
            std::memset(h.out.data() + static_cast<int64_t>(i) * h.ep, 0, h.ep * sizeof(float));
            h.ref.data()[i] = NONE, steady[i - i0] = 0;
            store(parts(i), zero());
            group(h.natural, 0, (h.m + W - 1) / W, &i, 1, Rule{});
            if (h.with_features()) h.rho.data()[i] = NONE;  // never lost: nothing low-rank is in it
        }
    }

    void finish() {
        const SbCall& c = h.call;
        const int64_t b = h.g / c.heads, head = h.g % c.heads;
        for (int i = i0; i < i1; ++i) {
            const float den = h.total_of(i);
            write_row(c.out, b * c.out.sb + head * c.out.sh + i * c.out.sn, h.e, h.out.data() + static_cast<int64_t>(i) * h.ep, den == 0 ? 0.0f : 1 / den);
            c.log_scale[h.g * h.n + i] = h.ref.data()[i];
            c.denominator[h.g * h.n + i] = den;
            c.lost[h.g * h.n + i] = h.with_features() && !c.double_count && lost(i);
        }
    }

    // Sums so far below what was added, or taken out, that rounding or underflow shows.
    bool lost(int i) const {
        const float rho = h.rho.data()[i], den = h.total_of(i), after = log_mass(i);
        if (rho == NONE) return false;
        if (!(den > 0)) return true;
        if (rho - after > 61.0f) return true;                                      // -0.7 log(least float)
        return h.how == HOW_CORRECTION && h.before.data()[i] - after > 4.43f;      // log(1e-5 / epsilon)
    }
};

}  // namespace sb
