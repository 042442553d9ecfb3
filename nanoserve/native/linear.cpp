// y = (x W' + bias) * scale in float32, for any number of rows: W in float32, or in int8 with a scale for each output.
//
// W lies in panels of WIDTH outputs, input by input, so that a product reads it from end to end; `width` says how wide.
// A tile of up to ROWS rows keeps its sums in registers, and each number of W that it reads serves all of its rows.
// Many rows go in blocks of BLOCK tiles, which a core's own cache holds, and their inputs in pieces of DEPTH, so that a
// panel's piece, widened if int8, stays near for all the tiles. Memory brings the next piece meanwhile: each tile asks
// for its share of it, so that no tile waits for all of it; one alone, which waits for memory most, asks for what it
// reads itself as well, AHEAD bytes early. Threads share the panels out as they get on: cores are not equally free.
// Each sum adds up those of its pieces, which is several times as exact as one long sum, in one order whatever the
// tile: a row's result is the same in any company.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 6;
#else
constexpr int LANES = 4, VECTORS = 4, ROWS = 6;
#endif
constexpr int WIDTH = VECTORS * LANES, BLOCK = 8, DEPTH = 256, AHEAD = 4096, LINE = 64;
constexpr int64_t SMALL_WORK = 1 << 16;
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));

#define UNROLLED _Pragma("GCC unroll 16")  // else sums[][] is in memory

struct Product {
    const float *x;
    const void *weight;
    const float *bias, *scale;  // padded to whole panels; scale: null for 1
    float *y;
    int64_t rows, in, out, x_row, threads;
};

struct Piece {  // of a panel: its inputs from..from + depth
    const void *weight;
    const char *next;  // read after it; a tile asks for `share` bytes an input
    int64_t share;
    const float *bias, *scale;  // null: y has the sums so far; they go on, or are scaled already
    int64_t depth, x_row, y_row;
};

static Floats load(const float *w) { return *(const Floats *)w; }
static Floats load(const int8_t *w) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
#else
    Floats numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = w[i];
    return numbers;
#endif
}

template <int COUNT, typename Weight>
static void tile(const Piece &p, const float *x, float *y) {
    const Weight *w = (const Weight *)p.weight;
    const char *next = p.next;
    const bool alone = p.share == WIDTH * sizeof(Weight);
    const int64_t share = p.share, x_row = p.x_row, y_row = p.y_row, depth = p.depth;
    Floats sums[COUNT][VECTORS];
    UNROLLED for (int r = 0; r < COUNT; r++) UNROLLED for (int v = 0; v < VECTORS; v++) {
        sums[r][v] = Floats{};
        __builtin_prefetch(y + r * y_row + v * LANES, 1);
    }
    for (int64_t k = 0; k < depth; k++, w += WIDTH, next += share) {
        __builtin_prefetch(next, 0, 2);  // not into the first cache, which the piece fills
        if (alone)
            for (size_t line = 0; line < WIDTH * sizeof(Weight); line += LINE)
                __builtin_prefetch((const char *)w + AHEAD + line);
        Floats ws[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) ws[v] = load(w + v * LANES);
        UNROLLED for (int r = 0; r < COUNT; r++) UNROLLED for (int v = 0; v < VECTORS; v++)
            sums[r][v] += ws[v] * x[r * x_row + k];
    }
    UNROLLED for (int v = 0; v < VECTORS; v++) {
        const Floats scale = p.scale ? load(p.scale + v * LANES) : Floats{} + 1;
        UNROLLED for (int r = 0; r < COUNT; r++) {
            float *to = y + r * y_row + v * LANES;
            *(Floats *)to = (load(p.bias ? p.bias + v * LANES : to) + sums[r][v]) * scale;
        }
    }
}

using TileFunction = void (*)(const Piece &, const float *, float *);

template <typename Weight, int... I>
static constexpr std::array<TileFunction, ROWS> make_tiles(std::integer_sequence<int, I...>) {
    return {tile<I + 1, Weight>...};
}

template <typename Weight>
static constexpr auto tiles = make_tiles<Weight>(std::make_integer_sequence<int, ROWS>());

// Tiles first..last, of `count` in all, of one panel's outputs.
template <typename Weight>
static void multiply_block(const Product &p, int64_t first, int64_t last, int64_t count, int64_t panel) {
    const int64_t out = panel * WIDTH, row = p.rows * first / count;
    const bool widened = sizeof(Weight) < sizeof(float) && count > 1, whole = out + WIDTH <= p.out;
    alignas(LINE) float wide[DEPTH * WIDTH], edge[BLOCK * ROWS * WIDTH];
    float *y = whole ? p.y + row * p.out + out : edge;
    const int64_t y_row = whole ? p.out : WIDTH;
    for (int64_t from = 0; from < p.in; from += DEPTH) {
        const Weight *weight = (const Weight *)p.weight + out * p.in + from * WIDTH;
        const int64_t depth = std::min<int64_t>(DEPTH, p.in - from), share = WIDTH * sizeof(Weight) / (last - first);
        Piece piece = {weight, (const char *)(weight + depth * WIDTH), share, nullptr, nullptr, depth, p.x_row, y_row};
        if (from == 0) piece.bias = p.bias + out;
        if (p.scale && from + DEPTH >= p.in) piece.scale = p.scale + out;
        if (widened) {
            for (int64_t i = 0; i < piece.depth * WIDTH; i += LANES) *(Floats *)(wide + i) = load(weight + i);
            piece.weight = wide;
        }
        const auto &sized = widened ? tiles<float> : tiles<Weight>;
        for (int64_t t = first; t < last; t++, piece.next += depth * share) {
            const int64_t start = p.rows * t / count, end = p.rows * (t + 1) / count;
            sized[end - start - 1](piece, p.x + start * p.x_row + from, y + (start - row) * y_row);
        }
    }
    if (!whole)
        for (int64_t r = row; r < p.rows * last / count; r++)
            std::copy_n(edge + (r - row) * WIDTH, p.out - out, p.y + r * p.out + out);
}

template <typename Weight>
static void multiply_all(const Product &p) {
    const int64_t panels = (p.out + WIDTH - 1) / WIDTH, count = (p.rows + ROWS - 1) / ROWS;
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for collapse(2) schedule(guided) num_threads(p.threads) if (p.rows * p.in * p.out > SMALL_WORK)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t panel = 0; panel < panels; panel++)
            multiply_block<Weight>(p, count * b / blocks, count * (b + 1) / blocks, count, panel);
}

extern "C" int64_t width() { return WIDTH; }

extern "C" void multiply(const Product *product) { multiply_all<float>(*product); }

extern "C" void multiply_int8(const Product *product) { multiply_all<int8_t>(*product); }

struct LookUp {
    const int8_t *weight;
    const float *scale;
    const int64_t *ids;  // of outputs
    float *y;
    int64_t rows, in;
};

// The rows of W, an output each.
extern "C" void look_up_int8(const LookUp *look_up) {
    const LookUp &l = *look_up;
    for (int64_t r = 0; r < l.rows; r++) {
        const int8_t *numbers = l.weight + l.ids[r] / WIDTH * WIDTH * l.in + l.ids[r] % WIDTH;
        for (int64_t i = 0; i < l.in; i++) l.y[r * l.in + i] = numbers[i * WIDTH] * l.scale[l.ids[r]];
    }
}
