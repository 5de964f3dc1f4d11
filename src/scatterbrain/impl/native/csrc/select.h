// Choosing: k-means labels, heavy columns, and the clusters each query visits.
#pragma once
#include <algorithm>
#include <cmath>

#include "threads.h"
#include "views.h"

namespace sb {

constexpr int TWO_LEVELS_FROM = 32;  // clusters; below it Lloyd's algorithm runs on all of them at once
constexpr int SAMPLES_A_CENTRE = 64;

// Rows packed side by side, so that a product compares W of them with each centre and the nearest is found lane by lane.
struct Points {
    Buffer packed;
    int n = 0, d = 0;

    template <class Row>
    void read(Row row, int count, int width) {
        n = count, d = width;
        pack(row, n, d, 1.0f, packed.get(static_cast<int64_t>(round_up(n, W)) * d));
    }
};

struct Lloyd {
    Buffer centres, bias, score, sum;
    std::vector<int> count, label;

    // The nearest of c centres for every point, the first of equals: into `label`.
    void assign(const Points& x, int c) {
        float* b = bias.get(c);
        for (int i = 0; i < c; ++i) {
            const float* mu = centres.data() + static_cast<int64_t>(i) * x.d;
            b[i] = -squares(mu, x.d) / 2;
        }
        label.resize(round_up(x.n, W));
        for (int p = 0; p < round_up(x.n, W) / W; p += NV_MAX) assign_panels(x, c, p, std::min(NV_MAX, round_up(x.n, W) / W - p));
    }

    void assign_panels(const Points& x, int c, int p, int nv) {
        constexpr int LD = NV_MAX * W;
        float* s = score.get(GROUP * LD);
        vf top[NV_MAX];
        vi at[NV_MAX];
        for (int v = 0; v < nv; ++v) top[v] = all(NONE), at[v] = alli(0);
        for (int i = 0; i < c; i += GROUP) {
            const int some = std::min(GROUP, c - i);
            const float* a[GROUP];
            float* to[GROUP];
            for (int r = 0; r < some; ++r) a[r] = centres.data() + static_cast<int64_t>(i + r) * x.d, to[r] = s + r * LD;
            product(some, a, 1, panels(x.packed.data(), x.d, p), nv, x.d, to);
            for (int r = 0; r < some; ++r)
                for (int v = 0; v < nv; ++v) {
                    const vf y = load(to[r] + v * W) + bias.data()[i + r];
                    const vi more = y > top[v];
                    top[v] = more ? y : top[v];
                    at[v] = more ? alli(i + r) : at[v];
                }
        }
        for (int v = 0; v < nv; ++v) std::memcpy(label.data() + (p + v) * W, &at[v], W * sizeof(int));
    }

    // Fit c centres to the points, starting from evenly spaced ones.
    template <class Row>
    void fit(const Points& x, Row row, int c, int iterations) {
        const int d = x.d;
        float* mu = centres.get(static_cast<int64_t>(c) * d);
        for (int i = 0; i < c; ++i) std::memcpy(mu + static_cast<int64_t>(i) * d, row(static_cast<int>((2LL * i + 1) * x.n / (2LL * c))), d * sizeof(float));
        for (int it = 0; it < iterations; ++it) {
            assign(x, c);
            float* total = sum.cleared(static_cast<int64_t>(c) * d);
            count.assign(c, 0);
            for (int i = 0; i < x.n; ++i) {
                add_row(total + static_cast<int64_t>(label[i]) * d, row(i), d);
                ++count[label[i]];
            }
            for (int i = 0; i < c; ++i) {
                const float by = count[i] ? 1.0f / count[i] : 0.0f;
                for (int t = 0; t < (count[i] ? d : 0); ++t) mu[static_cast<int64_t>(i) * d + t] = total[static_cast<int64_t>(i) * d + t] * by;
            }
        }
    }

    static void add_row(float* __restrict__ to, const float* __restrict__ x, int d) {
        int t = 0;
        for (; t + W <= d; t += W) store(to + t, load(to + t) + load(x + t));
        for (; t < d; ++t) to[t] += x[t];
    }
};

// How many of `clusters` each of the coarse ones is split into: in proportion to its size, at least one if it has members.
static std::vector<int> shares(const std::vector<int>& size, int clusters) {
    int filled = 0;
    int64_t total = 0;
    for (int s : size) filled += s > 0, total += s;
    std::vector<int> share(size.size(), 0);
    const int64_t spare = clusters - filled;
    int64_t upto = 0, given = 0;
    for (size_t i = 0; i < size.size(); ++i) {
        if (!size[i]) continue;
        upto += size[i];
        const int64_t until = (2 * upto * spare + total) / (2 * total);  // rounded
        share[i] = static_cast<int>(1 + until - given);
        given = until;
    }
    return share;
}

// One head's clusters; see clustering.py for the same in torch.
static void cluster_head(const View& k, const std::vector<int>& seen, int clusters, int iterations, int d, int threads, int64_t* label) {
    const int n = static_cast<int>(seen.size());
    if (n == 0) return;
    auto row = [&](int i) { return k.row(seen[i]); };
    if (clusters < TWO_LEVELS_FROM) {
        Lloyd all_keys;
        Points x;
        x.read(row, n, d);
        all_keys.fit(x, row, clusters, iterations);
        all_keys.assign(x, clusters);
        for (int i = 0; i < n; ++i) label[seen[i]] = all_keys.label[i];
        return;
    }
    const int coarse = static_cast<int>(std::sqrt(static_cast<double>(clusters)));
    const int sampled = std::min(n, SAMPLES_A_CENTRE * coarse);
    const auto sample = [&](int i) { return row(static_cast<int>((2LL * i + 1) * n / (2LL * sampled))); };
    Lloyd top;
    Points few;
    few.read(sample, sampled, d);
    top.fit(few, sample, coarse, iterations);
    std::vector<int> first(n);
    constexpr int SOME = 4096;
    parallel(threads, (n + SOME - 1) / SOME, [&](int64_t part) {
        const int a = static_cast<int>(part) * SOME, z = std::min(n, a + SOME);
        Lloyd mine;
        std::memcpy(mine.centres.get(static_cast<int64_t>(coarse) * d), top.centres.data(), static_cast<size_t>(coarse) * d * sizeof(float));
        Points x;
        x.read([&](int i) { return row(a + i); }, z - a, d);
        mine.assign(x, coarse);
        std::copy(mine.label.begin(), mine.label.begin() + (z - a), first.begin() + a);
    });
    std::vector<int> size(coarse, 0), start(coarse + 1, 0), place(n);
    for (int c : first) ++size[c];
    for (int c = 0; c < coarse; ++c) start[c + 1] = start[c] + size[c];
    std::vector<int> next(start.begin(), start.end() - 1);
    for (int i = 0; i < n; ++i) place[next[first[i]]++] = i;
    const std::vector<int> share = shares(size, clusters);
    std::vector<int> base(coarse + 1, 0);
    for (int c = 0; c < coarse; ++c) base[c + 1] = base[c] + share[c];
    parallel(threads, coarse, [&](int64_t c) {
        if (!size[c]) return;
        Lloyd inside;
        Points x;
        auto mine = [&](int i) { return row(place[start[c] + i]); };
        x.read(mine, size[c], d);
        inside.fit(x, mine, share[c], iterations);
        inside.assign(x, share[c]);
        for (int i = 0; i < size[c]; ++i) label[seen[place[start[c] + i]]] = base[c] + inside.label[i];
    });
}

static void cluster_chunk(const View& k, const uint8_t* mask, int from, int upto, int per_chunk, int iterations, int d, int base, int64_t* label) {
    std::vector<int> seen;
    for (int j = from; j < upto; ++j) {
        label[j] = -1;
        if (!mask || mask[j]) seen.push_back(j);
    }
    if (seen.empty()) return;
    Lloyd in;
    Points x;
    auto row = [&](int i) { return k.row(seen[i]); };
    x.read(row, static_cast<int>(seen.size()), d);
    in.fit(x, row, per_chunk, iterations);
    in.assign(x, per_chunk);
    for (size_t i = 0; i < seen.size(); ++i) label[seen[i]] = base + in.label[i];
}

static void cluster(const SbArray& k, int64_t batch, int64_t heads, int m, int d, const uint8_t* mask, int clusters, int iterations, int chunk,
                    int threads, int64_t* label) {
    const int64_t groups = batch * heads;
    const int inside = groups >= threads ? 1 : threads;
    parallel(inside > 1 ? 1 : threads, groups, [&](int64_t g) {
        View rows;
        const uint8_t* ok = mask ? mask + g * m : nullptr;
        rows.read(k, g / heads, g % heads, m, d, ok, false);
        int64_t* to = label + g * m;
        if (chunk > 0) {
            parallel(inside, (m + chunk - 1) / chunk, [&](int64_t c) {
                const int from = static_cast<int>(c) * chunk;
                cluster_chunk(rows, ok, from, std::min(m, from + chunk), clusters, iterations, d, static_cast<int>(c) * clusters, to);
            });
            return;
        }
        std::vector<int> seen;
        seen.reserve(m);
        for (int j = 0; j < m; ++j) {
            to[j] = -1;
            if (!ok || ok[j]) seen.push_back(j);
        }
        cluster_head(rows, seen, clusters, iterations, d, inside, to);
    });
}

// Attention mass that some sampled queries give to every key, added up.
static void add_mass(const View& q, const int64_t* rows, int n, const float* packed, int m, int d, bool causal, const uint8_t* ok, Buffer& work,
                     float* mass) {
    const int wide = round_up(m, W);
    float* s = work.get(static_cast<int64_t>(GROUP) * wide);
    for (int first = 0; first < n; first += GROUP) {
        const int some = std::min(GROUP, n - first);
        const float* a[GROUP];
        float* to[GROUP];
        for (int r = 0; r < some; ++r) a[r] = q.row(rows[first + r]), to[r] = s + static_cast<int64_t>(r) * wide;
        int seen = 0;
        for (int r = 0; r < some; ++r) seen = std::max<int>(seen, causal ? static_cast<int>(std::min<int64_t>(m, rows[first + r] + 1)) : m);
        product(some, a, 1, panels(packed, d), round_up(seen, W) / W, d, to);
        for (int r = 0; r < some; ++r) {
            const int upto = causal ? static_cast<int>(std::min<int64_t>(m, rows[first + r] + 1)) : m;
            for (int j = upto; j < round_up(upto, W); ++j) to[r][j] = NONE;
            if (ok)
                for (int j = 0; j < upto; ++j)
                    if (!ok[j]) to[r][j] = NONE;
            vf top = all(NONE);
            for (int j = 0; j < upto; j += W) top = larger(top, load(to[r] + j));
            const float most = max_of(top);
            if (most == NONE) continue;
            vf sum = zero();
            for (int j = 0; j < upto; j += W) {
                const vf w = exp_of(load(to[r] + j) - most);
                sum += w;
                store(to[r] + j, w);
            }
            const float by = 1 / sum_of(sum);
            for (int j = 0; j < upto; j += W) store(mass + j, load(mass + j) + load(to[r] + j) * by);
        }
    }
}

// The same for queries that see every key, a query a lane: no packed keys, and sums without horizontal steps.
static void add_full_mass(const View& q, const int64_t* rows, int n, const View& k, float scale, int m, int d, const uint8_t* ok, float* mass) {
    Buffer packed, weights;
    for (int first = 0; first < n; first += NV_MAX * W) {
        const int some = std::min(NV_MAX * W, n - first), nv = round_up(some, W) / W;
        pack([&](int r) { return q.row(rows[first + r]); }, some, d, scale, packed.get(static_cast<int64_t>(nv) * W * d));
        float* s = weights.get(static_cast<int64_t>(m) * nv * W);
        product_rows(m, k.row(0), k.step, 1, panels(packed.data(), d), nv, d, s, nv * W);
        for (int v = 0; v < nv; ++v) {
            const float* at = s + v * W;
            const vi real = lanes() + v * W < alli(some);
            vf top = all(NONE), sum = zero();
            for (int j = 0; j < m; ++j)
                if (!ok || ok[j]) top = larger(top, load(at + static_cast<int64_t>(j) * nv * W));
            for (int j = 0; j < m; ++j) {
                float* x = s + static_cast<int64_t>(j) * nv * W + v * W;
                const vf w = !ok || ok[j] ? exp_of(load(x) - top) : zero();
                sum += w;
                store(x, w);
            }
            const vf by = real & (sum > zero()) ? 1.0f / sum : zero();
            for (int j = 0; j < m; ++j) mass[j] += sum_of(load(at + static_cast<int64_t>(j) * nv * W) * by);
        }
    }
}

// The `heavy` largest votes, -1 where fewer are positive (or, not strictly, not negative).
static void heaviest(const float* votes, int m, int heavy, bool strict, std::vector<int>& order, int64_t* index) {
    order.clear();
    for (int j = 0; j < m; ++j)
        if (strict ? votes[j] > 0 : votes[j] >= 0) order.push_back(j);
    const auto more = [&](int a, int b) { return votes[a] > votes[b] || (votes[a] == votes[b] && a < b); };
    const int got = std::min<int>(heavy, static_cast<int>(order.size()));
    if (got < static_cast<int>(order.size())) std::nth_element(order.begin(), order.begin() + got, order.end(), more);
    std::sort(order.begin(), order.begin() + got);
    for (int c = 0; c < heavy; ++c) index[c] = c < got ? order[c] : -1;
}

// Each block's columns, from its own mass or from that of the `past` blocks before it.
static void vote(const SbCall& call, const float* mass, int wide, const uint8_t* ok, int blocks, int past, const int64_t* fixed, int fixed_n, int heavy,
                 int threads, int64_t* index) {
    const int m = static_cast<int>(call.m);
    parallel(threads, blocks, [&](int64_t block) {
        std::vector<float> votes(wide, 0.0f);
        std::vector<int> order;
        const int64_t from = past ? std::max<int64_t>(0, block - past) : block, upto = past ? block : block + 1;
        for (int64_t x = from; x < upto; ++x)
            for (int j = 0; j < m; ++j) votes[j] += mass[x * wide + j];
        for (int f = 0; f < fixed_n; ++f) votes[fixed[f]] = -1;
        if (ok)
            for (int j = 0; j < m; ++j)
                if (!ok[j]) votes[j] = -1;
        heaviest(votes.data(), m, heavy, past > 0, order, index + block * heavy);
    });
}

static void columns(const SbCall& call, const int64_t* rows, int64_t rows_groups, int blocks, int per_block, int past, const int64_t* fixed,
                    int fixed_n, int heavy, int64_t* index) {
    const int m = static_cast<int>(call.m), d = static_cast<int>(call.d), wide = round_up(m, W);
    const int64_t groups = call.batch * call.heads;
    const int threads = static_cast<int>(call.threads);
    const int inside = groups >= threads ? 1 : threads;
    parallel(inside > 1 ? 1 : threads, groups, [&](int64_t g) {
        const int64_t b = g / call.heads, h = g % call.heads;
        const uint8_t* ok = call.key_mask ? call.key_mask + g * m : nullptr;
        View q, k;
        q.read(call.q, b, h, call.n, d, nullptr, false);
        k.read(call.k, b, h / call.rep, m, d, ok, false);
        Buffer packed, mass;
        if (!call.causal) {
            float* votes = mass.cleared(static_cast<int64_t>(blocks) * wide);
            for (int block = 0; block < blocks; ++block)
                add_full_mass(q, rows + ((rows_groups > 1 ? g : 0) * blocks + block) * per_block, per_block, k, call.scale, m, d, ok, votes + static_cast<int64_t>(block) * wide);
            vote(call, votes, wide, ok, blocks, past, fixed, fixed_n, heavy, inside, index + g * blocks * heavy);
            return;
        }
        pack([&](int j) { return k.row(j); }, m, d, call.scale, packed.get(static_cast<int64_t>(wide) * d));
        float* all_mass = mass.cleared(static_cast<int64_t>(blocks) * wide);
        const int64_t* mine = rows + (rows_groups > 1 ? g : 0) * blocks * per_block;
        parallel(inside, blocks, [&](int64_t block) {
            Buffer work;
            add_mass(q, mine + block * per_block, per_block, packed.data(), m, d, call.causal != 0, ok, work, all_mass + block * wide);
        });
        vote(call, all_mass, wide, ok, blocks, past, fixed, fixed_n, heavy, inside, index + g * blocks * heavy);
    });
}

// The clusters a row takes, by descending score: while they fit into `keys`, the last one if half of it still does,
// and at most `top`. Found by looking for the level between the last taken and the first left, first among all of them
// (from where the level of the row before suggests), then among the few that are near it.
class Router {
public:
    // score (wide, -inf for closed nodes) and size (wide); `best` is the largest score.
    // `out` has room for one more than `top`.
    int take(const float* score, const float* size, int wide, float best, int top, float keys, int64_t* out) {
        if (best == NONE) return 0;
        few_score_.get(wide + W), few_size_.get(wide + W);
        few_.resize(wide + 2 * W);
        for (;;) {  // until more is near than fits
            const Cut near = gather_above(score, size, wide, best - reach_);
            if (!fits(near, top, keys)) return settle(near, best, top, keys, out);
            if (near.count == open(score, wide)) {
                for (int t = 0; t < near.count; ++t) out[t] = few_[t];
                return near.count;
            }
            reach_ = reach_ * 1.6f + 0.01f;
        }
    }

    // Those whose log share of the row's weight, plus what a share of theirs is worth, reaches `least`; the `top` best of them.
    int above(const float* score, const float* worth, int wide, float best, float least, int top, int64_t* out) {
        if (best == NONE) return 0;
        vf sum = zero();
        for (int c = 0; c < wide; c += W) sum += exp_of(load(score + c) - best);
        const float level = least + best + std::log(sum_of(sum));
        few_.clear();
        for (int c = 0; c < wide; c += W) {
            const vf y = load(score + c);
            const vi in = (y > all(NONE)) & (y + load(worth + c) >= all(level));
            if (!any(in)) continue;
            for (int l = 0; l < W; ++l)
                if (in[l]) few_.push_back(c + l);
        }
        if (static_cast<int>(few_.size()) > top) {
            const auto more = [&](int a, int b) {
                const float x = score[a] + worth[a], y = score[b] + worth[b];
                return x > y || (x == y && a < b);
            };
            std::nth_element(few_.begin(), few_.begin() + top, few_.end(), more);
            few_.resize(top);
        }
        std::copy(few_.begin(), few_.end(), out);
        return static_cast<int>(few_.size());
    }

private:
    struct Cut {
        float mass;
        int count;
    };
    float reach_ = 2.0f;  // how far below the best to look
    Buffer few_score_, few_size_;
    std::vector<int> few_;

    static bool fits(const Cut& c, int top, float keys) { return c.count <= top && c.mass <= keys; }
    static int open(const float* score, int wide) {
        int n = 0;
        for (int v = 0; v < wide; ++v) n += score[v] > NONE;
        return n;
    }

    Cut gather_above(const float* score, const float* size, int wide, float level) {
        float *s = few_score_.data(), *z = few_size_.data();
        int* x = few_.data();
        int got = 0;
        vf mass = zero();
        vi here = lanes();
        for (int v = 0; v < wide; v += W, here += W) {
            const vf y = load(score + v);
            const vi in = (y >= all(level)) & (y > all(NONE));
            const vf m = in ? load(size + v) : zero();
            mass += m;
#if defined(__AVX512F__)
            const __mmask16 k = _mm512_test_epi32_mask((__m512i)in, (__m512i)in);
            if (!k) continue;  // to registers first: straight to memory is far slower on some processors
            _mm512_storeu_ps(s + got, _mm512_maskz_compress_ps(k, (__m512)y));
            _mm512_storeu_ps(z + got, _mm512_maskz_compress_ps(k, (__m512)m));
            _mm512_storeu_si512(x + got, _mm512_maskz_compress_epi32(k, (__m512i)here));
            got += __builtin_popcount(k);
#else
            if (!any(in)) continue;
            for (int l = 0; l < W; ++l)
                if (in[l]) s[got] = y[l], z[got] = m[l], x[got++] = here[l];
#endif
        }
        return {sum_of(mass), got};
    }

    // Of the gathered, those whose betters leave room for half of them. Each is compared with each: no branches.
    int settle(const Cut& near, float best, int top, float keys, int64_t* out) {
        float *s = few_score_.data(), *z = few_size_.data();
        const int n = near.count, wide = round_up(n, W);
        for (int t = n; t < wide; ++t) s[t] = NONE, z[t] = 0.0f;
        int got = 0;
        vf left = all(NONE);
        for (int v = 0; v < wide; v += W) {
            const vf mine = load(s + v);
            const vi place = lanes() + v;
            vf mass = load(z + v) * 0.5f, mass2 = zero();
            vi before = alli(0), before2 = alli(0);
            const auto meet = [&](int u, vf& m, vi& b) {
                const vi better = (all(s[u]) > mine) | ((all(s[u]) == mine) & (alli(u) < place));
                m += better ? all(z[u]) : zero();
                b -= better;
            };
            int u = 0;
            for (; u + 1 < n; u += 2) meet(u, mass, before), meet(u + 1, mass2, before2);
            if (u < n) meet(u, mass, before);
            const vi in = (mass + mass2 <= all(keys)) & (before + before2 < alli(top)) & (place < alli(n));
            left = larger(left, in ? all(NONE) : mine);
            for (int l = 0; l < W && v + l < n; ++l) {
                out[got] = few_[v + l];
                got += in[l] != 0;
            }
        }
        const float first_left = max_of(left);
        if (first_left > NONE) reach_ = 1.1f * (best - first_left) + 1e-3f;
        return got;
    }
};

}  // namespace sb
