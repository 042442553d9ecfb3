// Paged attention in float32 for any mix of rows: what `AttentionBackend` in attention.py asks of store and attend.
//
// A tile is up to TILE (query, head) pairs of one row that share a key head. It walks the keys in chunks, through the
// block table, with an online softmax (Milakov & Gimelshein 2018), and reads nothing beyond the row's keys. A tile of
// many pairs has one pair in each lane of a vector: a key that was read serves them all. One of few pairs, as a decode
// has it, puts the head's dimensions in the lanes. Decodes whose tables begin with the same blocks are one tile: many
// pairs there, each of which adds up in the order that it has alone, and few behind. No -ffast-math: linking with it
// flushes denormals to zero in the whole process; sums are reordered only where the code says so.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16, MOST_VECTORS = 4;  // in a tile: as many as have their sums for STEP keys in registers
#else
constexpr int LANES = 8, MOST_VECTORS = 2;
#endif
constexpr int TILE = MOST_VECTORS * LANES, FEW = 4, CHUNK = 64, STEP = 4;
constexpr float HIDDEN = -1e30f, LOG2E = 1.44269504f, SMALL_WORK = 1 << 17;
constexpr int64_t SMALL_STORE = 1 << 14;  // numbers
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
#define UNROLLED _Pragma("GCC unroll 8")  // else vectors are in memory
#define EACH_DOT UNROLLED for (int i = 0; i < KEYS; i++) UNROLLED for (int v = 0; v < VECTORS; v++)
constexpr auto ALL_LANES = std::make_integer_sequence<int, LANES>();

struct Batch {  // strides are in numbers; a token's heads and a place's dimensions lie side by side
    const float *q, *keys, *values;
    float *out;
    const int64_t *query_starts, *seq_lens, *table;
    int64_t rows, heads, kv_heads, dim, block_size, q_token, q_head, block, head, table_row, threads;

    int64_t queries(int64_t row) const { return query_starts[row + 1] - query_starts[row]; }
    float scale() const { return LOG2E / __builtin_sqrtf(dim); }  // weights are powers of 2
};

struct Places {  // of a chunk's keys and values; the last one again up to whole vectors, where its weight is 0
    const float *keys[CHUNK], *values[CHUNK];
    int n;
};

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where one is NaN

// 2^x for x <= 0, and 0 from -127 on: the whole part goes into the exponent's bits, the rest, at most a half, into a
// polynomial that is 1 at 0 and off by 1e-7 at most, relatively.
static inline Floats exp2(Floats x) {
    constexpr float large = 3 << 22;  // a sum with it has no bits for what is behind the point
    const Floats bounded = larger(Floats{} - 127.0f, x), sum = bounded + large, rest = bounded - (sum - large);
    Floats power = Floats{} + 0.00132647273f;
    for (float term : {0.00967151299f, 0.0555073358f, 0.240222424f, 0.693147004f, 1.0f}) power = power * rest + term;
    return (Floats)((Ints)power + ((Ints)sum << 23));
}

template <int... LANE>
static inline Floats largest(Floats x, std::integer_sequence<int, LANE...>) {  // in every lane
    x = larger(x, __builtin_shuffle(x, Ints{(LANE ^ 8)...})), x = larger(x, __builtin_shuffle(x, Ints{(LANE ^ 4)...}));
    x = larger(x, __builtin_shuffle(x, Ints{(LANE ^ 2)...})), x = larger(x, __builtin_shuffle(x, Ints{(LANE ^ 1)...}));
    return x;
}

// Adds the halves of what is left of each vector, and joins two of them to one.
template <int HALF, int... LANE>
static inline void fold(Floats *x, std::integer_sequence<int, LANE...>) {
    constexpr Ints low = {LANE / HALF * 2 * HALF + LANE % HALF...}, high = low + HALF;
    for (int i = 0; i < HALF; i++)
        x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high);
}

static inline Floats sum_each(Floats *x) {  // lane l: the sum of x[l]
    if constexpr (LANES == 16) fold<8>(x, ALL_LANES);
    fold<4>(x, ALL_LANES), fold<2>(x, ALL_LANES), fold<1>(x, ALL_LANES);
    return x[0];
}

// Memory is asked for what will be read soon; not into the first cache, which what is read now fills.
static inline void ask(const float *x, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) __builtin_prefetch(x + d, 0, 2);
}

// Many pairs, one in each lane. Dot products and totals have PARTS parts: one, or, for pairs that go on as few, LANES,
// in the order of sum_each(). Here: what dimensions PART, PART + DISTANCE, ... of each key and pair add up to.
template <int PARTS, int PART, int DISTANCE, int KEYS, int VECTORS>
__attribute__((always_inline)) static inline void add_dimensions(
    const float *const *keys, const Floats (*q)[VECTORS], int64_t dim, Floats (&dots)[KEYS][VECTORS]) {
    if constexpr (DISTANCE == PARTS) {
        EACH_DOT dots[i][v] = Floats{};
        for (int64_t d = PART; d < dim; d += PARTS) EACH_DOT dots[i][v] += keys[i][d] * q[d][v];
    } else {
        Floats others[KEYS][VECTORS];
        add_dimensions<PARTS, PART, 2 * DISTANCE>(keys, q, dim, dots);
        add_dimensions<PARTS, PART + DISTANCE, 2 * DISTANCE>(keys, q, dim, others);
        EACH_DOT dots[i][v] += others[i][v];
    }
}

// The scores of a chunk's keys; with one part, q is scaled already.
template <int PARTS, int VECTORS>
static inline void multiply(const Places &p, const Floats (*q)[VECTORS], const Batch &b, Floats (*s)[VECTORS]) {
    constexpr int KEYS = PARTS > 1 || VECTORS == MOST_VECTORS ? STEP : 2 * STEP;
    for (int j = 0; j < p.n; j += KEYS) {
        Floats dots[KEYS][VECTORS];
        for (int i = 0; i < KEYS; i++) ask(p.values[j + i], b.dim);
        for (int i = j + KEYS; i < std::min(j + 2 * KEYS, p.n); i++) ask(p.keys[i], b.dim);
        add_dimensions<PARTS, 0, 1>(p.keys + j, q, b.dim, dots);
        EACH_DOT s[j + i][v] = PARTS > 1 ? dots[i][v] * b.scale() : dots[i][v];
    }
}

// Scores become weights, and what was summed before is to shrink where there is a new largest one.
template <int PARTS, int VECTORS>
static inline void weigh(Floats (*s)[VECTORS], int n, Floats *most, Floats (*total)[VECTORS], Floats *shrink) {
    Floats top[VECTORS];
    for (int v = 0; v < VECTORS; v++) top[v] = most[v];
    for (int j = 0; j < n; j++)
        for (int v = 0; v < VECTORS; v++) top[v] = larger(s[j][v], top[v]);
    for (int v = 0; v < VECTORS; v++) shrink[v] = exp2(most[v] - top[v]), most[v] = top[v];
    for (int part = 0; part < PARTS; part++) {
        Floats added[VECTORS] = {};
        for (int j = part; j < n; j += PARTS)
            for (int v = 0; v < VECTORS; v++) added[v] += s[j][v] = exp2(s[j][v] - top[v]);
        for (int v = 0; v < VECTORS; v++) total[part][v] = total[part][v] * shrink[v] + added[v];
    }
}

// WIDTH dimensions, from d on, of the weighted sums of values.
template <int WIDTH, int VECTORS>
static inline void add_values(const Places &p, const Floats (*s)[VECTORS], int64_t d, const Floats *shrink,
                              Floats (*sums)[VECTORS]) {
    Floats added[WIDTH][VECTORS] = {};
    for (int j = 0; j < p.n; j++)
        for (int i = 0; i < WIDTH; i++)
            for (int v = 0; v < VECTORS; v++) added[i][v] += p.values[j][d + i] * s[j][v];
    for (int i = 0; i < WIDTH; i++)
        for (int v = 0; v < VECTORS; v++) sums[d + i][v] = sums[d + i][v] * shrink[v] + added[i][v];
}

struct Pair {
    const float *q;
    float *sums;         // in the output
    int64_t seen;        // keys that it may look at
    Floats most, total;  // the largest score in every lane; what all lanes add up to
};

// One pair, or two that share what was read, and a chunk of keys; `cold`: nobody has just read them.
template <int PAIRS>
struct Step {
    Pair *pairs;
    const Places &now, &next;
    int64_t dim;
    bool cold;
    alignas(64) float s[PAIRS][CHUNK];
    Floats shrink[PAIRS];

    void multiply(float scale) {
        constexpr int KEYS = LANES / PAIRS;
        for (int j = 0; j < now.n; j += KEYS) {
            Floats parts[LANES];
            for (auto &part : parts) part = Floats{};
            for (int k = 0; cold && k < KEYS; k++) ask(now.values[j + k], dim);
            for (int64_t d = 0; d < dim; d += LANES)
                for (int k = 0; k < KEYS; k++)
                    for (int i = 0; i < PAIRS; i++)
                        parts[i * KEYS + k] += *(const Loose *)(pairs[i].q + d) * *(const Loose *)(now.keys[j + k] + d);
            const Floats scores = sum_each(parts) * scale;
            for (int i = 0; i < PAIRS; i++) memcpy(s[i] + j, (float *)&scores + i * KEYS, KEYS * sizeof(float));
        }
    }

    void weigh(int64_t from) {
        for (int i = 0; i < PAIRS; i++) {
            auto [query, sums, seen, most, total] = pairs[i];
            std::fill(s[i] + std::clamp<int64_t>(seen - from, 0, now.n), s[i] + CHUNK, HIDDEN);
            Floats top = most, added = {};
            for (int j = 0; j < now.n; j += LANES) top = larger(*(Floats *)(s[i] + j), top);
            top = largest(top, ALL_LANES);
            for (int j = 0; j < now.n; j += LANES) added += *(Floats *)(s[i] + j) = exp2(*(Floats *)(s[i] + j) - top);
            shrink[i] = exp2(most - top);
            pairs[i].total = total * shrink[i] + added, pairs[i].most = top;
        }
    }

    template <int VECTORS>
    void add_values(int64_t d) {
        Floats added[PAIRS][VECTORS] = {};
        for (int j = 0; j < now.n; j++) {
            if (cold && !d && j < next.n) ask(next.keys[j], dim);
            for (int v = 0; v < VECTORS; v++)
                for (int i = 0; i < PAIRS; i++)
                    added[i][v] += s[i][j] * *(const Loose *)(now.values[j] + d + v * LANES);
        }
        for (int i = 0; i < PAIRS; i++)
            for (int v = 0; v < VECTORS; v++) {
                Loose &sum = *(Loose *)(pairs[i].sums + d + v * LANES);
                sum = sum * shrink[i] + added[i][v];
            }
    }

    void run(int64_t from, float scale) {
        multiply(scale);
        weigh(from);
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<4>(d);
        for (; d < dim; d += LANES) add_values<1>(d);
    }
};

struct Tile {
    const Batch &b;
    int64_t row, first, count, kv_head = 0, rows = 1, shared = 0;  // `rows` from `row` on share their first keys

    int64_t group() const { return b.heads / b.kv_heads; }
    int64_t seen(int64_t i, int64_t r) const { return b.seq_lens[r] - b.queries(r) + (first + i) / group() + 1; }
    int64_t token(int64_t i, int64_t r) const { return b.query_starts[r] + (first + i) / group(); }
    int64_t head(int64_t i) const { return kv_head * group() + (first + i) % group(); }
    const float *q(int64_t i, int64_t r) const { return b.q + token(i, r) * b.q_token + head(i) * b.q_head; }
    float *out(int64_t i, int64_t r) const { return b.out + (token(i, r) * b.heads + head(i)) * b.dim; }

    void find(Places &p, int64_t r, int64_t from, int64_t end) const {
        p.n = std::clamp<int64_t>(end - from, 0, CHUNK);
        const int64_t *block = b.table + r * b.table_row + from / b.block_size;
        for (int64_t j = 0, place = from % b.block_size; j < p.n; block++, place = 0) {
            int64_t at = *block * b.block + kv_head * b.head + place * b.dim;
            for (; j < p.n && place < b.block_size; j++, place++, at += b.dim)
                p.keys[j] = b.keys + at, p.values[j] = b.values + at;
        }
        for (int j = p.n; j % LANES; j++) p.keys[j] = p.keys[p.n - 1], p.values[j] = p.values[p.n - 1];
    }

    // The first keys of `row`, up to `end`, for n pairs that all have them, or that are a tile's.
    template <int PARTS, int VECTORS>
    void walk_many(Pair *pairs, int n, int64_t end) const {
        std::vector<Floats> memory((2 * b.dim + CHUNK) * VECTORS);
        auto q_lanes = (Floats(*)[VECTORS])memory.data(), sums = q_lanes + b.dim, s = sums + b.dim;
        Floats most[VECTORS], total[PARTS][VECTORS] = {}, shrink[VECTORS];
        Ints limit[VECTORS] = {};
        for (auto &m : most) m = Floats{} + HIDDEN;
        for (int i = 0; i < n; i++) {
            const float *query = pairs[i].q, scale = PARTS > 1 ? 1.0f : b.scale();
            limit[i / LANES][i % LANES] = pairs[i].seen;
            for (int64_t d = 0; d < b.dim; d++) q_lanes[d][i / LANES][i % LANES] = query[d] * scale;
        }
        Places places;
        for (int64_t from = 0; from < end; from += CHUNK) {
            find(places, row, from, end);
            multiply<PARTS>(places, q_lanes, b, s);
            for (int j = std::max<int64_t>(0, pairs[0].seen - from); PARTS == 1 && j < places.n; j++)
                for (int v = 0; v < VECTORS; v++) s[j][v] = int32_t(from + j) < limit[v] ? s[j][v] : Floats{} + HIDDEN;
            weigh<PARTS>(s, places.n, most, total, shrink);
            int64_t d = 0;
            for (; d + STEP <= b.dim; d += STEP) add_values<STEP>(places, s, d, shrink, sums);
            for (; d < b.dim; d++) add_values<1>(places, s, d, shrink, sums);
        }
        for (int i = 0; i < n; i++) {
            const int v = i / LANES, lane = i % LANES;
            const float factor = PARTS > 1 ? 1.0f : 1.0f / total[0][v][lane];
            pairs[i].most = Floats{} + most[v][lane];
            for (int part = 0; part < PARTS; part++) pairs[i].total[part] = total[part][v][lane];
            for (int64_t d = 0; d < b.dim; d++) pairs[i].sums[d] = sums[d][v][lane] * factor;
        }
    }

    template <int PARTS>
    void walk_many(Pair *pairs, int n, int64_t end) const {
        if (n <= LANES) walk_many<PARTS, 1>(pairs, n, end);
        else if (n <= 2 * LANES) walk_many<PARTS, 2>(pairs, n, end);
        else walk_many<PARTS, MOST_VECTORS>(pairs, n, end);
    }

    // Keys `from` to `end` of row r, for n pairs that look at them.
    void walk(int64_t r, int64_t from, int64_t end, Pair *pairs, int n) const {
        Places chunks[2];
        find(chunks[0], r, from, end);
        for (; from < end; from += CHUNK) {
            Places &now = chunks[0], &next = chunks[1];
            find(next, r, from + CHUNK, end);
            int i = 0;
            for (; i + 2 <= n; i += 2) Step<2>{pairs + i, now, next, b.dim, !i}.run(from, b.scale());
            if (i < n) Step<1>{pairs + i, now, next, b.dim, !i}.run(from, b.scale());
            std::swap(now, next);
        }
    }

    void attend() const {
        const int n = rows * count;
        Pair pairs[TILE];
        for (int i = 0; i < n; i++) {
            const int64_t r = row + i / count, own = i % count;
            pairs[i] = {q(own, r), out(own, r), seen(own, r), Floats{} + HIDDEN, Floats{}};
        }
        if (!is_few(b, count)) return walk_many<1>(pairs, n, seen(count - 1, row));
        if (n < LANES) walk(row, 0, shared, pairs, n);  // empty lanes cost as much as full ones
        else if (shared) walk_many<LANES>(pairs, n, shared);
        for (int i = 0; i < rows; i++) walk(row + i, shared, seen(count - 1, row + i), pairs + i * count, count);
        for (int i = 0; i < n; i++) {
            for (int l = 1; l < LANES; l++) pairs[i].total[0] += pairs[i].total[l];
            for (int64_t d = 0; d < b.dim; d++) pairs[i].sums[d] /= pairs[i].total[0];
        }
    }

    static bool is_few(const Batch &b, int64_t pairs) { return pairs <= FEW && b.dim % LANES == 0; }
};

struct New {  // keys and values of a step's tokens; slot -1: not stored
    const float *k, *v;
    float *keys, *values;
    const int64_t *slots;
    int64_t tokens, heads, dim, block_size, k_token, k_head, v_token, v_head, threads;
};

extern "C" void store(const New *tokens) {
    const New &n = *tokens;
#pragma omp parallel for schedule(static) num_threads(n.threads) if (n.tokens * n.heads * n.dim > SMALL_STORE)
    for (int64_t t = 0; t < n.tokens; t++)
        for (int64_t h = 0; h < n.heads && n.slots[t] >= 0; h++) {
            const int64_t block = n.slots[t] / n.block_size, place = n.slots[t] % n.block_size;
            const int64_t at = ((block * n.heads + h) * n.block_size + place) * n.dim;
            memcpy(n.keys + at, n.k + t * n.k_token + h * n.k_head, n.dim * sizeof(float));
            memcpy(n.values + at, n.v + t * n.v_token + h * n.v_head, n.dim * sizeof(float));
        }
}

// Keys of two decodes that are in the same blocks: whole chunks of them.
static int64_t shared_keys(const Batch &b, int64_t row, int64_t other) {
    const int64_t *table = b.table + row * b.table_row, *others = b.table + other * b.table_row;
    const int64_t blocks = std::min(b.seq_lens[row], b.seq_lens[other]) / b.block_size;
    return (std::mismatch(table, table + blocks, others).first - table) * b.block_size / CHUNK * CHUNK;
}

// A decode, and those behind it that share as many keys with it as the next one does; enough tiles for all threads.
static Tile join(const Batch &b, int64_t row) {
    Tile tile{b, row, 0, b.heads / b.kv_heads};
    const int64_t most = std::clamp<int64_t>(b.rows * b.kv_heads / (2 * b.threads), 1, TILE / tile.count);
    for (int64_t r = row + 1; r < b.rows && tile.rows < most && b.queries(r) == 1; r++, tile.rows++) {
        const int64_t keys = shared_keys(b, row, r);
        if (keys == 0 || keys < tile.shared) break;
        if (tile.rows == 1) tile.shared = keys;
    }
    return tile;
}

extern "C" void attend(const Batch *batch) {
    const Batch &b = *batch;
    const int64_t group = b.heads / b.kv_heads;
    std::vector<Tile> tiles;
    float work = 0;
    for (int64_t r = 0; r < b.rows; r++) {
        const int64_t pairs = b.seq_lens[r] ? b.queries(r) * group : 0;
        work += float(pairs) * b.kv_heads * b.seq_lens[r] * b.dim;
        if (b.seq_lens[r] && b.queries(r) == 1 && Tile::is_few(b, group)) {
            tiles.push_back(join(b, r));
            r += tiles.back().rows - 1;
        } else
            for (int64_t first = (pairs + TILE - 1) / TILE * TILE - TILE; first >= 0; first -= TILE)
                tiles.push_back({b, r, first, std::min<int64_t>(TILE, pairs - first)});
    }
    const int64_t n = tiles.size() * b.kv_heads;
#pragma omp parallel for num_threads(b.threads) if (work > SMALL_WORK) schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) {
        Tile tile = tiles[i / b.kv_heads];
        tile.kv_head = i % b.kv_heads;
        tile.attend();
    }
}
