// What all queries of one head share: keys packed for products, dense bucket numbers, cluster means, scaled features.
#pragma once
#include <climits>

#include "select.h"

namespace sb {

constexpr int BQ = 96;  // queries done together: their node weights stay in the second-level cache

// Keys that queries meet, whole vectors of them; what stands beyond n has position INT_MAX and zero keys.
struct Tile {
    int n = 0;
    const float *kt = nullptr, *v = nullptr, *psi_t = nullptr;
    const float* v_pairs = nullptr;                // instead of v: two keys a row, their values side by side
    int64_t v_step = 0;
    const int *pos = nullptr, *ok = nullptr;       // ok: 0 where masked; null where all are visible
    std::vector<const int*> label;                 // of each bucket layer
    const int *face = nullptr, *face_in = nullptr; // the node that stands for a key
    const float *inv = nullptr, *inv_in = nullptr; // one over the node's size
    // backward
    const float *vt = nullptr, *k = nullptr, *psi = nullptr;
    int64_t k_step = 0;
    float *dk = nullptr, *dv = nullptr, *dpsi = nullptr;
};

// One bucket layer with dense numbers. Routes have no q until they are made.
struct Buckets {
    bool routes = false;
    int count = 0, visits = 0;
    std::vector<int> k, q;           // (M, padded) -1 for none; (N, visits) -2 for none
    std::vector<int> start, member;  // the keys of bucket c: member[start[c] .. start[c + 1])

    void list_members(int m) {
        start.assign(count + 1, 0);
        for (int j = 0; j < m; ++j)
            if (k[j] >= 0) ++start[k[j] + 1];
        for (int c = 0; c < count; ++c) start[c + 1] += start[c];
        member.resize(start[count]);
        std::vector<int> next(start.begin(), start.end() - 1);
        for (int j = 0; j < m; ++j)
            if (k[j] >= 0) member[next[k[j]]++] = j;
    }

    void read(const SbLayer& layer, int64_t g, int n, int m, const uint8_t* ok) {
        const int64_t* kl = layer.k_label + (layer.k_groups > 1 ? g : 0) * m;
        routes = layer.kind == SB_ROUTES;
        k.assign(round_up(m, W) + W, -1);
        if (routes) {
            count = static_cast<int>(layer.nodes);
            for (int j = 0; j < m; ++j) k[j] = !ok || ok[j] ? static_cast<int>(kl[j]) : -1;
            list_members(m);
            return;
        }
        std::vector<int64_t> names;
        for (int j = 0; j < m; ++j)
            if (kl[j] >= 0 && (!ok || ok[j])) names.push_back(kl[j]);
        std::sort(names.begin(), names.end());
        names.erase(std::unique(names.begin(), names.end()), names.end());
        count = static_cast<int>(names.size());
        // labels are mostly small numbers: then a table serves, else a search
        const bool table = count && names.back() < 8LL * (n + m) + 64;
        std::vector<int> number(table ? names.back() + 1 : 0, -1);
        for (int c = 0; c < (table ? count : 0); ++c) number[names[c]] = c;
        auto find = [&](int64_t x) {
            if (x < 0 || !count) return -1;
            if (table) return x < static_cast<int64_t>(number.size()) ? number[x] : -1;
            const auto at = std::lower_bound(names.begin(), names.end(), x);
            return at != names.end() && *at == x ? static_cast<int>(at - names.begin()) : -1;
        };
        for (int j = 0; j < m; ++j)
            if (!ok || ok[j]) k[j] = find(kl[j]);
        visits = static_cast<int>(layer.visits);
        q.resize(static_cast<size_t>(n) * visits);
        const int64_t* ql = layer.q_label + (layer.q_groups > 1 ? g : 0) * n * layer.visits;
        for (size_t x = 0; x < q.size(); ++x) {
            const int c = find(ql[x]);
            q[x] = c < 0 ? -2 : c;
        }
        list_members(m);
    }
};

// How the low-rank part keeps off the support; the names are those of the torch engine's `strategy`.
enum How { HOW_NONE, HOW_MEANS, HOW_TOTAL, HOW_BAND, HOW_PARTITION, HOW_CORRECTION };

static bool is_full(const SbLayer& x) { return x.kind == SB_BAND && x.lo <= -(1LL << 40) && x.hi >= (1LL << 40) && x.dilation == 1; }

static How how_of(const SbCall& c) {
    const bool features = c.features > 0;
    bool everything = false;
    for (int64_t x = 0; x < c.layers_n; ++x) everything |= is_full(c.layers[x]);
    if ((!features && !c.node) || (everything && !c.double_count)) return HOW_NONE;
    if (!features) return HOW_MEANS;
    if (c.layers_n == 0 || c.double_count) return HOW_TOTAL;
    const SbLayer& x = c.layers[0];
    if (c.layers_n == 1 && x.kind == SB_BAND && x.dilation == 1 && x.lo > -(1LL << 40) && x.hi < (1LL << 40) && x.lo <= 0 && x.hi >= 0)
        return HOW_BAND;
    if (c.layers_n == 1 && x.kind == SB_BUCKETS && x.visits == 1 && !c.causal) return HOW_PARTITION;
    return HOW_CORRECTION;
}

struct Head {
    const SbCall& call;
    const int n, m, d, e, dp, ep, r, rp;
    const int d2;              // width in pairs
    const bool causal, grad;
    const How how;
    const bool paired;         // bfloat16 inputs on a processor that multiplies pairs of them: logits, and sums of values
    int64_t g = 0;
    const uint8_t* ok = nullptr;
    View q, k, v, d_out;
    HalfView q_half, k_half, v_half;
    Buffer kt, vt, v_pairs;
    std::vector<int> pos, okay;
    std::vector<Buckets> buckets;
    std::vector<const SbLayer*> blocks, bands, rows;
    const SbLayer* route = nullptr;
    Tile natural;
    // features: psi (M, rp) and phi (N, rp) scaled into [0, 1], and each row's exponent
    Buffer psi, phi, rho, psi_t;
    // nodes: those of the clusters, then those of the inner blocks
    int nodes = 0, pad = 0, total = 0, per_chunk = 0;
    Buffer mu, mu_t, mean, mean_t, mean_pairs, log_count, count, mass, inv, inv_in, worth;  // log_count: of the weights; inv: a key's share of its node
    std::vector<float> peak;                                                     // the largest log weight of a node's keys
    float heaviest_key = 0;                                                      // largest absolute log weight
    std::vector<int> face, face_in;
    // results; a row's denominator is kept in W parts
    Buffer out, ref, den, before;
    float longest = 0;  // key

    float total_of(int i) const { return sum_of(load(den.data() + static_cast<int64_t>(i) * W)); }

    // The exponents of a row lie within +-bound: with that as its reference, if it is small enough, no weight can
    // overflow or underflow, and no maximum need be looked for. -inf where it is too large.
    float steady_reference(int i) const {
        constexpr float SMALL = 80.0f;
        if (with_features()) return NONE;
        const float bound = std::sqrt(squares(q.row(i), d)) * longest * std::fabs(call.scale) + heaviest_key, counts = std::log(static_cast<float>(m));
        return 2 * bound + counts < SMALL ? bound + counts : NONE;
    }

    Head(const SbCall& c, bool backward)
        : call(c), n(static_cast<int>(c.n)), m(static_cast<int>(c.m)), d(static_cast<int>(c.d)), e(static_cast<int>(c.e)), dp(round_up(d, W)),
          ep(round_up(e, W)), r(static_cast<int>(c.features)), rp(round_up(r, W)), d2((d + 1) / 2), causal(c.causal != 0), grad(backward), how(how_of(c)),
          paired(pairs_here() && c.q.dtype == SB_BF16 && c.k.dtype == SB_BF16 && c.v.dtype == SB_BF16 && !backward &&
                 how != HOW_CORRECTION) {}  // what is taken out again must not be rounded

    bool with_features() const { return how == HOW_TOTAL || how == HOW_BAND || how == HOW_PARTITION || how == HOW_CORRECTION; }
    bool with_means() const { return how == HOW_MEANS; }
    bool with_nodes() const { return with_means() || route; }

    void prepare(int64_t group, int threads) {
        g = group;
        const int64_t b = g / call.heads, h = g % call.heads;
        ok = call.key_mask ? call.key_mask + g * m : nullptr;
        q.read(call.q, b, h, n, d, nullptr, grad);
        k.read(call.k, b, h / call.rep, m, d, ok, grad);
        v.read(call.v, b, h / call.rep, m, e, ok, true);
        if (grad) d_out.read(call.d_out, b, h, n, e, nullptr, true);
        if (paired) {
            q_half.read(call.q, b, h, n, d, nullptr);
            k_half.read(call.k, b, h / call.rep, m, d, ok);
            v_half.read(call.v, b, h / call.rep, m, e, ok);
        }
        longest = longest_key();
        sort_layers();
        pack_natural(threads);
        if (with_features()) scale_features();
        if (with_nodes()) build_nodes();
    }

    float longest_key() const {
        float most = 0;
        for (int j = 0; j < m; ++j) most = std::max(most, squares(k.row(j), d));
        return std::sqrt(most);
    }

    void sort_layers() {
        buckets.clear(), blocks.clear(), bands.clear(), rows.clear();
        route = nullptr;
        for (int64_t x = 0; x < call.layers_n; ++x) {
            const SbLayer& layer = call.layers[x];
            if (layer.kind == SB_BAND) bands.push_back(&layer);
            if (layer.kind == SB_BLOCKS) blocks.push_back(&layer);
            if (layer.kind == SB_ROWS) rows.push_back(&layer);
            if (layer.kind == SB_ROUTES) route = &layer;
            if (layer.kind == SB_ROUTES || layer.kind == SB_BUCKETS) {
                buckets.emplace_back();
                buckets.back().read(layer, g, n, m, ok);
            }
        }
    }

    bool needs_natural() const { return !bands.empty() || !rows.empty() || (causal && (with_features() || with_means())); }

    void pack_natural(int threads) {
        const int wide = round_up(m, W) + W;
        pos.assign(wide, INT_MAX);
        for (int j = 0; j < m; ++j) pos[j] = j;
        if (ok) {
            okay.assign(wide, 0);
            for (int j = 0; j < m; ++j) okay[j] = ok[j] ? -1 : 0;
        }
        natural = Tile{};
        natural.n = m;
        natural.pos = pos.data();
        natural.ok = ok ? okay.data() : nullptr;
        natural.v = v.base, natural.v_step = v.step;
        natural.k = k.base, natural.k_step = k.step;
        for (const Buckets& x : buckets) natural.label.push_back(x.k.data());
        if (!needs_natural()) return;
        if (paired) {
            pack<true>([&](int j) { return k_half.row(j); }, m, d2, 1.0f, kt.get(static_cast<int64_t>(round_up(m, W)) * d2));
            natural.kt = kt.data();
            natural.v_pairs = value_pairs([](int x) { return x; }, m, v_pairs);
            return;
        }
        natural.kt = packed(kt, k, m, d, call.scale, threads);
        if (grad) natural.vt = packed(vt, v, m, e, 1.0f, threads);
    }

    // The values of keys at(0), at(1) .. two by two, for products with pairs of weights.
    template <class At>
    const float* value_pairs(At at, int n, Buffer& to) const {
        const int64_t size = static_cast<int64_t>(n + 1) / 2 * ep;
        float* out = e < ep ? to.cleared(size) : to.get(size);
        for (int x = 0; x < n; x += 2, out += ep) interleave(v_half.row(at(x)), x + 1 < n ? v_half.row(at(x + 1)) : nullptr, e, out);
        return to.data();
    }

    static const float* packed(Buffer& to, const View& x, int n, int width, float by, int threads) {
        float* out = to.get(static_cast<int64_t>(round_up(n, W)) * width);
        constexpr int SOME = 1024;  // a multiple of W
        parallel(threads, (n + SOME - 1) / SOME, [&](int64_t part) {
            const int a = static_cast<int>(part) * SOME;
            pack([&](int j) { return x.row(a + j); }, std::min(SOME, n - a), width, by, out + static_cast<int64_t>(a) * width);
        });
        return out;
    }

    // Every feature by its largest value over the keys, every row by its largest exponent then.
    void scale_features() {
        const float* log_psi = call.log_psi + g * m * r;
        const float* log_phi = call.log_phi + g * n * r;
        std::vector<float> top(rp, NONE);
        for (int j = 0; j < m; ++j) {
            if (ok && !ok[j]) continue;
            for (int x = 0; x < r; ++x) top[x] = std::max(top[x], log_psi[static_cast<int64_t>(j) * r + x]);
        }
        for (float& t : top) t = t == NONE ? 0.0f : t;
        float* ps = psi.get(static_cast<int64_t>(m) * rp);
        exponentials(log_psi, m, [&](int j, int x, float l) { return ok && !ok[j] ? NONE : l - top[x]; }, ps);
        float* ph = phi.get(static_cast<int64_t>(n) * rp);
        float* rh = rho.get(n);
        for (int i = 0; i < n; ++i) {
            float most = NONE;
            for (int x = 0; x < r; ++x) most = std::max(most, log_phi[static_cast<int64_t>(i) * r + x] + top[x]);
            rh[i] = most;
        }
        exponentials(log_phi, n, [&](int i, int x, float l) { return rh[i] == NONE ? NONE : l + top[x] - rh[i]; }, ph);
        natural.psi = ps;
        if (!natural.kt) return;
        View rows;
        rows.base = ps, rows.step = rp;
        natural.psi_t = packed(psi_t, rows, m, r, 1.0f, 1);
    }

    template <class F>
    void exponentials(const float* log, int count, F exponent, float* to) const {
        for (int j = 0; j < count; ++j) {
            float* row = to + static_cast<int64_t>(j) * rp;
            for (int x = 0; x < r; ++x) row[x] = exponent(j, x, log[static_cast<int64_t>(j) * r + x]);
            for (int x = r; x < rp; ++x) row[x] = NONE;
            for (int x = 0; x < rp; x += W) store(row + x, exp_of(load(row + x)));
        }
    }

    int chunk_of(int i) const { return i / static_cast<int>(call.chunk > 0 ? call.chunk : route->chunk); }
    // Chunks matter where clusters serve only later ones.
    int chunk() const { return call.node && call.chunk > 0 ? static_cast<int>(call.chunk) : route && route->chunk > 0 ? static_cast<int>(route->chunk) : 0; }

    void build_nodes() {
        const int64_t* label = call.node ? call.node + (call.node_groups > 1 ? g : 0) * m : route->k_label + (route->k_groups > 1 ? g : 0) * m;
        nodes = static_cast<int>(call.node ? call.nodes : route->nodes);
        const int inner = with_means() && call.chunk > 0 ? static_cast<int>(call.inner) : 0;
        const int blocks_in = inner ? (m + inner - 1) / inner : 0;
        pad = round_up(nodes, W);
        total = pad + round_up(blocks_in, W) + W;
        per_chunk = chunk() ? nodes / ((m + chunk() - 1) / chunk()) : 0;
        const float* off = call.node ? call.offset : route->offset;
        const float* off_in = inner ? call.offset_in : nullptr;
        off = off ? off + g * m : nullptr, off_in = off_in ? off_in + g * m : nullptr;
        find_peaks(label, off, off_in, inner);
        face.assign(round_up(m, W) + W, 0);
        float* size = count.cleared(total);
        mass.cleared(total);
        float* mk = mu.cleared(static_cast<int64_t>(total) * dp);
        float* mv = mean.cleared(static_cast<int64_t>(total) * ep);
        for (int j = 0; j < m; ++j) {
            const int c = !ok || ok[j] ? static_cast<int>(label[j]) : -1;
            face[j] = std::max(0, c);
            if (c >= 0) add_key(j, c, off, size, mk, mv);
        }
        if (inner) {
            face_in.assign(round_up(m, W) + W, 0);
            for (int j = 0; j < m; ++j) {
                face_in[j] = pad + j / inner;
                if (label[j] >= 0 && (!ok || ok[j])) add_key(j, face_in[j], off_in, size, mk, mv);
            }
        }
        finish_nodes(mk, mv, off, off_in);
        if (route && route->worth) {
            float* w = worth.cleared(pad);
            std::memcpy(w, route->worth + g * nodes, nodes * sizeof(float));
        }
        natural.face = face.data(), natural.inv = inv.data();
        if (inner) natural.face_in = face_in.data(), natural.inv_in = inv_in.data();
    }

    // Weights are taken relative to the largest of their node, so that none overflows.
    void find_peaks(const int64_t* label, const float* off, const float* off_in, int inner) {
        peak.assign(total, off || off_in ? NONE : 0.0f);
        heaviest_key = 0;
        if (!off && !off_in) return;
        for (int j = 0; j < m; ++j) {
            if (label[j] < 0 || (ok && !ok[j])) continue;
            const float a = off ? off[j] : 0.0f, b = off_in ? off_in[j] : 0.0f;
            peak[label[j]] = std::max(peak[label[j]], a);
            if (inner) peak[pad + j / inner] = std::max(peak[pad + j / inner], b);
            heaviest_key = std::max({heaviest_key, std::fabs(a), std::fabs(b)});
        }
    }
    float weight_of(int j, int c, const float* off) const { return off ? exp_of(off[j] - peak[c]) : 1.0f; }

    void add_key(int j, int c, const float* off, float* size, float* mk, float* mv) {
        const float w = weight_of(j, c, off);
        size[c] += 1;
        mass.data()[c] += w;
        const float* x = k.row(j);
        float* to = mk + static_cast<int64_t>(c) * dp;
        for (int t = 0; t < d; ++t) to[t] += w * x[t];
        if (!with_means()) return;
        const float* y = v.row(j);
        to = mv + static_cast<int64_t>(c) * ep;
        for (int t = 0; t < ep; t += W) store(to + t, load(to + t) + load(y + t) * w);
    }

    void finish_nodes(float* mk, float* mv, const float* off, const float* off_in) {
        float* lc = log_count.get(total);
        std::vector<float> ic(total);
        for (int c = 0; c < total; ++c) {
            const float sum = mass.data()[c], by = sum > 0 ? 1 / sum : 0.0f;
            lc[c] = sum > 0 ? std::log(sum) + peak[c] : NONE;
            ic[c] = by;
            for (int t = 0; t < dp; ++t) mk[static_cast<int64_t>(c) * dp + t] *= by;
            if (with_means())
                for (int t = 0; t < ep; ++t) mv[static_cast<int64_t>(c) * ep + t] *= by;
        }
        if (paired && with_means()) round_values(mv);
        pack([&](int c) { return mk + static_cast<int64_t>(c) * dp; }, total, d, call.scale, mu_t.get(static_cast<int64_t>(round_up(total, W)) * d));
        if (grad && with_means()) pack([&](int c) { return mv + static_cast<int64_t>(c) * ep; }, total, e, 1.0f, mean_t.get(static_cast<int64_t>(round_up(total, W)) * e));
        const int wide = round_up(m, W) + W;
        float* by_key = inv.cleared(wide);
        for (int j = 0; j < m; ++j) by_key[j] = peak[face[j]] == NONE ? 0.0f : ic[face[j]] * weight_of(j, face[j], off);
        if (!face_in.empty() && static_cast<int>(face_in.size()) == wide) {
            float* by_in = inv_in.cleared(wide);
            for (int j = 0; j < m; ++j) by_in[j] = peak[face_in[j]] == NONE ? 0.0f : ic[face_in[j]] * weight_of(j, face_in[j], off_in);
        }
    }

    // Means of values as pairs.
    void round_values(const float* mv) {
        const int wide = round_up(e, 2 * W);
        Buffer row, halves;
        float *x = row.cleared(wide), *to = halves.get(static_cast<int64_t>(total) * wide / 2);
        for (int c = 0; c < total; ++c) {
            std::memcpy(x, mv + static_cast<int64_t>(c) * ep, e * sizeof(float));
            round_pairs(x, wide, to + static_cast<int64_t>(c) * wide / 2);
        }
        float* out = mean_pairs.cleared(static_cast<int64_t>(total / 2) * ep);
        for (int c = 0; c < total; c += 2) interleave(to + static_cast<int64_t>(c) * wide / 2, to + static_cast<int64_t>(c + 1) * wide / 2, e, out + c / 2 * ep);
    }
};

}  // namespace sb
