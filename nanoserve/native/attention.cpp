// Paged attention in float32 for any mix of rows: what `AttentionBackend` in attention.py asks of store and attend.
//
// A tile is up to TILE (query, head) pairs of one row that share a key head. It walks the keys in chunks, through the
// block table, with an online softmax (Milakov & Gimelshein 2018), and reads nothing beyond the row's keys. A tile of
// many pairs has one pair in each lane of a vector: a key that was read serves them all. One of few pairs, as a decode
// has it, puts the head's dimensions in the lanes. No -ffast-math: linking with it flushes denormals to zero in the
// whole process; sums are reordered only where the code says so.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX512F__
constexpr int VECTORS = 2;  // in a tile: as many as have their sums for STEP keys in registers
#else
constexpr int VECTORS = 1;
#endif
constexpr int LANES = 16, TILE = VECTORS * LANES, FEW = 4, CHUNK = 64, STEP = 4;
constexpr float HIDDEN = -1e30f, LOG2E = 1.44269504f, SMALL_WORK = 1 << 17;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

struct Batch {  // strides are in numbers; a token's heads and a place's dimensions lie side by side
    const float *q, *keys, *values;
    float *out;
    const int64_t *query_starts, *seq_lens, *table;
    int64_t rows, heads, kv_heads, dim, block_size, q_token, q_head, block, head, table_row, threads;
};

// 2^x for x <= 0: the whole part becomes the exponent's bits, the rest, at most a half, goes through seven terms.
static inline Floats exp2(Floats x) {
    Floats bounded = x > -126.0f ? x : Floats{} - 126.0f, sum = Floats{} + 1.0f;
    Ints whole = __builtin_convertvector(bounded - 0.5f, Ints);
    Floats rest = (bounded - __builtin_convertvector(whole, Floats)) * 0.693147181f;
    for (int k = 7; k; k--) sum = 1.0f + rest * sum * (1.0f / k);
    return x > -126.0f ? sum * (Floats)((whole + 127) << 23) : Floats{};
}

// Adds the halves of what is left of each vector, and joins two of them to one.
template <int HALF, int... LANE>
static inline void fold(Floats *x, std::integer_sequence<int, LANE...>) {
    constexpr Ints low = {LANE / HALF * 2 * HALF + LANE % HALF...}, high = low + HALF;
    for (int i = 0; i < HALF; i++)
        x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high);
}

static inline Floats sum_each(Floats *x) {  // lane l: the sum of x[l]
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    fold<8>(x, lanes), fold<4>(x, lanes), fold<2>(x, lanes), fold<1>(x, lanes);
    return x[0];
}

// Sums over the dimensions that share a lane.
static inline Floats products(const float *a, const float *b, int64_t dim) {
    Floats sum = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) sum += *(const Loose *)(a + d) * *(const Loose *)(b + d);
    for (; d < dim; d++) sum[d % LANES] += a[d] * b[d];
    return sum;
}

// Memory is asked for what will be read soon.
static inline void ask(const float *x, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) __builtin_prefetch(x + d);
}

struct Places {  // of a chunk's keys and values; the last one again up to whole vectors, where its weight is 0
    const float *keys[CHUNK], *values[CHUNK];
    int n;
};

struct Tile {
    const Batch &b;
    int64_t row, kv_head, first, count, group, past;

    int64_t seen(int64_t i) const { return past + (first + i) / group + 1; }  // keys that pair i may look at
    int64_t token(int64_t i) const { return b.query_starts[row] + (first + i) / group; }
    int64_t head(int64_t i) const { return kv_head * group + (first + i) % group; }
    const float *q(int64_t i) const { return b.q + token(i) * b.q_token + head(i) * b.q_head; }
    float *out(int64_t i) const { return b.out + (token(i) * b.heads + head(i)) * b.dim; }

    void find(Places &p, int64_t from, int64_t end) const {
        p.n = std::clamp<int64_t>(end - from, 0, CHUNK);
        const int64_t *block = b.table + row * b.table_row + from / b.block_size;
        for (int64_t j = 0, place = from % b.block_size; j < p.n; block++, place = 0) {
            int64_t at = *block * b.block + kv_head * b.head + place * b.dim;
            for (; j < p.n && place < b.block_size; j++, place++, at += b.dim)
                p.keys[j] = b.keys + at, p.values[j] = b.values + at;
        }
        for (int j = p.n; j % LANES; j++) p.keys[j] = p.keys[p.n - 1], p.values[j] = p.values[p.n - 1];
    }

    void attend_many(Floats *memory) {
        auto q_lanes = (Floats(*)[VECTORS])memory, sums = q_lanes + b.dim, s = sums + b.dim;
        Floats most[VECTORS], total[VECTORS] = {};
        Ints limit[VECTORS] = {};
        memset(memory, 0, 2 * b.dim * sizeof *sums);
        for (int i = 0; i < count; i++) {
            limit[i / LANES][i % LANES] = seen(i);
            for (int64_t d = 0; d < b.dim; d++) q_lanes[d][i / LANES][i % LANES] = q(i)[d];
        }
        for (auto &m : most) m = Floats{} + HIDDEN;
        const float scale = LOG2E / __builtin_sqrtf(b.dim);
        Places places;
        const auto &[keys, values, n] = places;
        for (int64_t from = 0, end = seen(count - 1); from < end; from += CHUNK) {
            find(places, from, end);
            Floats top[VECTORS];
            std::copy(most, most + VECTORS, top);
            for (int j = 0; j < n; j += STEP) {
                Floats dots[STEP][VECTORS] = {};
                for (int64_t d = 0; d < b.dim; d++)
                    for (int i = 0; i < STEP; i++)
                        for (int v = 0; v < VECTORS; v++) dots[i][v] += keys[j + i][d] * q_lanes[d][v];
                for (int i = 0; i < STEP; i++)
                    for (int v = 0; v < VECTORS; v++) {
                        Ints key = Ints{} + int32_t(from + j + i);
                        s[j + i][v] = key < limit[v] ? dots[i][v] * scale : Floats{} + HIDDEN;
                        top[v] = s[j + i][v] > top[v] ? s[j + i][v] : top[v];
                    }
            }
            for (int v = 0; v < VECTORS; v++) {
                Floats shrink = exp2(most[v] - top[v]);
                total[v] *= shrink, most[v] = top[v];
                for (int64_t d = 0; d < b.dim; d++) sums[d][v] *= shrink;
                for (int j = 0; j < n; j++) total[v] += s[j][v] = exp2(s[j][v] - top[v]);
            }
            for (int64_t d = 0; d < b.dim; d += STEP) {
                const int width = std::min<int64_t>(STEP, b.dim - d);
                Floats added[STEP][VECTORS] = {};
                for (int j = 0; j < n; j++)
                    for (int i = 0; i < STEP; i++)
                        for (int v = 0; v < VECTORS; v++) added[i][v] += values[j][d + (i < width ? i : 0)] * s[j][v];
                for (int i = 0; i < width; i++)
                    for (int v = 0; v < VECTORS; v++) sums[d + i][v] += added[i][v];
            }
        }
        for (int i = 0; i < count; i++)
            for (int64_t d = 0; d < b.dim; d++)
                out(i)[d] = sums[d][i / LANES][i % LANES] / total[i / LANES][i % LANES];
    }

    void attend_few(Floats *memory) {
        auto s = (float(*)[CHUNK])memory;
        float most[FEW], total[FEW] = {}, *sums[FEW];
        const float scale = LOG2E / __builtin_sqrtf(b.dim);
        const int64_t dim = b.dim, end = seen(count - 1);
        Places chunks[2];
        find(chunks[0], 0, end);
        for (int i = 0; i < count; i++) most[i] = HIDDEN, sums[i] = out(i);
        for (int64_t from = 0; from < end; from += CHUNK) {
            const Places &now = chunks[from / CHUNK % 2];
            Places &next = chunks[(from / CHUNK + 1) % 2];
            find(next, from + CHUNK, end);
            for (int i = 0; i < count; i++) {
                const float *query = q(i);
                const int visible = std::clamp<int64_t>(seen(i) - from, 0, now.n);
                for (int j = 0; j < now.n; j += LANES) {
                    Floats parts[LANES];
                    for (int l = 0; l < LANES; l++) {
                        parts[l] = products(query, now.keys[j + l], dim);
                        if (!i) ask(now.values[j + l], dim);
                    }
                    *(Floats *)(s[i] + j) = sum_each(parts) * scale;
                }
                std::fill(s[i] + visible, s[i] + CHUNK, HIDDEN);
                Floats tops = Floats{} + most[i], added = {};
                for (int j = 0; j < now.n; j += LANES) {
                    const Floats scores = *(Floats *)(s[i] + j);
                    tops = scores > tops ? scores : tops;
                }
                float top = tops[0];
                for (int l = 1; l < LANES; l++) top = std::max(top, tops[l]);
                const float shrink = exp2(Floats{} + (most[i] - top))[0];
                for (int j = 0; j < now.n; j += LANES)
                    added += *(Floats *)(s[i] + j) = exp2(*(Floats *)(s[i] + j) - top);
                for (int l = 1; l < LANES; l++) added[0] += added[l];
                total[i] = total[i] * shrink + added[0], most[i] = top;
                for (int64_t d = 0; d < dim; d++) sums[i][d] *= shrink;
            }
            for (int j = 0; j < now.n; j += STEP) {
                for (int k = j; k < j + STEP && k < next.n; k++) ask(next.keys[k], dim);
                const float *v0 = now.values[j], *v1 = now.values[j + 1];
                const float *v2 = now.values[j + 2], *v3 = now.values[j + 3];
                for (int i = 0; i < count; i++) {
                    const float *w = s[i] + j, w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
                    float *sum = sums[i];
#pragma omp simd
                    for (int64_t d = 0; d < dim; d++) sum[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d];
                }
            }
        }
        for (int i = 0; i < count; i++)
            for (int64_t d = 0; d < dim; d++) sums[i][d] /= total[i];
    }
};

struct New {  // keys and values of a step's tokens; slot -1: not stored
    const float *k, *v;
    float *keys, *values;
    const int64_t *slots;
    int64_t tokens, heads, dim, block_size, k_token, k_head, v_token, v_head;
};

extern "C" void store(const New *tokens) {
    const New &n = *tokens;
    for (int64_t t = 0; t < n.tokens; t++)
        for (int64_t h = 0; h < n.heads && n.slots[t] >= 0; h++) {
            const int64_t block = n.slots[t] / n.block_size, place = n.slots[t] % n.block_size;
            const int64_t at = ((block * n.heads + h) * n.block_size + place) * n.dim;
            memcpy(n.keys + at, n.k + t * n.k_token + h * n.k_head, n.dim * sizeof(float));
            memcpy(n.values + at, n.v + t * n.v_token + h * n.v_head, n.dim * sizeof(float));
        }
}

extern "C" void attend(const Batch *batch) {
    const Batch &b = *batch;
    const int64_t group = b.heads / b.kv_heads;
    int64_t most = 0;
    float work = 0;
    for (int64_t r = 0; r < b.rows; r++) {
        int64_t pairs = (b.query_starts[r + 1] - b.query_starts[r]) * group;
        most = std::max(most, pairs);
        work += float(pairs) * b.kv_heads * b.seq_lens[r] * b.dim;
    }
    const int64_t tiles = (most + TILE - 1) / TILE;
#pragma omp parallel num_threads(b.threads) if (work > SMALL_WORK)
    {
        std::vector<Floats> memory((2 * b.dim + CHUNK) * VECTORS);
#pragma omp for collapse(3) schedule(dynamic, 1)
        for (int64_t back = 1; back <= tiles; back++)  // the last tile, which has the most keys, first
            for (int64_t r = 0; r < b.rows; r++)
                for (int64_t h = 0; h < b.kv_heads; h++) {
                    const int64_t n = b.query_starts[r + 1] - b.query_starts[r], first = (tiles - back) * TILE;
                    const int64_t count = std::min<int64_t>(TILE, n * group - first);
                    if (count <= 0 || !b.seq_lens[r]) continue;
                    Tile tile{b, r, h, first, count, group, b.seq_lens[r] - n};
                    count > FEW ? tile.attend_many(memory.data()) : tile.attend_few(memory.data());
                }
    }
}
