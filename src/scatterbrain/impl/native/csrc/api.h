// The C interface: plain structs that Python's ctypes fills. Every struct here has its twin in library.py.
#pragma once
#include <cstdint>

extern "C" {

enum { SB_F32 = 0, SB_BF16 = 1, SB_F16 = 2 };

// A (batch, heads, length, width) tensor; strides in elements.
struct SbArray {
    void* data;
    int64_t dtype, sb, sh, sn, sd;
};

enum { SB_BAND = 0, SB_BLOCKS = 1, SB_ROWS = 2, SB_BUCKETS = 3, SB_ROUTES = 4 };

// One layer of a selection, as selection.py describes it. Groups of 1 mean: the same for all.
struct SbLayer {
    int64_t kind;
    int64_t lo, hi, dilation;                 // band
    const int64_t* index;                     // blocks (groups, outer, inner), rows (groups, inner)
    int64_t groups, outer, inner;             //
    int64_t q_block, k_block;                 // blocks
    const int64_t *q_label, *k_label;         // buckets: (q_groups, N, visits), (k_groups, M); routes: k_label alone
    int64_t q_groups, k_groups, visits;       //
    int64_t nodes, top, keys, chunk;          // routes; keys < 0 for no limit; chunk > 0 when causal
    const float *offset, *worth, *least;      // routes, or null: keys' log weights (G, M); (G, nodes) and (G, N): see selection.py
};

struct SbCall {
    int64_t batch, heads, rep, n, m, d, e;    // rep: query heads a key head
    SbArray q, k, v, out;
    const uint8_t* key_mask;                  // (batch * heads, M) or null
    int64_t causal, double_count, threads;
    float scale;
    int64_t layers_n;
    const SbLayer* layers;
    // features (log_phi (G, N, R), log_psi (G, M, R)) or means (node (node_groups, M)), or neither
    int64_t features;
    const float *log_phi, *log_psi;
    const int64_t* node;
    int64_t node_groups, nodes, chunk, inner;
    const float *offset, *offset_in;          // log weights of keys (G, M) in their cluster and inner block, or null
    // what the forward pass leaves: (G, N)
    float *log_scale, *denominator;
    uint8_t* lost;                            // rows whose low-rank sum lost too many digits
    // backward
    const float *inverse, *delta;             // (G, N): one over the denominator (0: leave the row out), dO.out
    SbArray d_out, d_q, d_k, d_v;             // d_k and d_v (batch, heads, M, ..): a head each, also with rep > 1
    float *d_phi, *d_psi;
};

const char* sb_isa();
int sb_supported();
int64_t sb_layout();  // bytes of SbCall and SbLayer: whether this build and the Python beside it mean the same
int sb_forward(const SbCall* call);
int sb_backward(const SbCall* call);
// The routes of a call's routed layer, as labels (G, N, top), -1 for none.
int sb_routes(const SbCall* call, int64_t* label);
// k-means labels (G, M) of the rows of k; chunk > 0: inside each chunk of keys. -1 where masked.
int sb_cluster(const SbArray* k, int64_t batch, int64_t heads, int64_t m, int64_t d, const uint8_t* mask, int64_t clusters, int64_t iterations,
               int64_t chunk, int64_t threads, int64_t* label);
// The heaviest columns of each block: rows (rows_groups, blocks, per_block) are the sampled queries; a block takes the
// mass of its own rows (past = 0), or that of the `past` blocks before it. index (G, blocks, heavy), -1 for none.
int sb_columns(const SbCall* call, const int64_t* rows, int64_t rows_groups, int64_t blocks, int64_t per_block, int64_t past, const int64_t* fixed,
               int64_t fixed_n, int64_t heavy, int64_t* index);
}
