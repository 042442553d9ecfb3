// y = x W' + bias in float32, for any number of rows.
//
// W lies in panels of WIDTH outputs, input by input, so that a product reads it from end to end; `width` says how wide.
// A tile of up to ROWS rows keeps its sums in registers, and each number of W that it reads serves all of its rows. Few
// rows wait for memory, which is asked AHEAD numbers early; many go in blocks that a core's own cache holds, and their
// inputs in pieces of DEPTH, so that a panel's piece stays there for all tiles. Each sum runs over the inputs in their
// order, whatever the tile: a row's result is the same in any company.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

constexpr int LANES = 16;
#ifdef __AVX512F__
constexpr int ROWS = 12, VECTORS = 2;
#else
constexpr int ROWS = 6, VECTORS = 1;
#endif
constexpr int WIDTH = VECTORS * LANES, BLOCK = 96, DEPTH = 256, AHEAD = 1024;
constexpr int64_t SMALL_WORK = 1 << 16;
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));

struct Product {
    const float *x, *weight, *bias;  // bias: padded to whole panels
    float *y;
    int64_t rows, in, out, x_row, threads;
};

template <int COUNT>
static void tile(const Product &p, int64_t row, int64_t panel, int64_t from, int64_t depth) {
    const float *x = p.x + row * p.x_row + from, *w = p.weight + (panel * p.in + from) * WIDTH;
    float *y = p.y + row * p.out + panel * WIDTH;
    const int64_t width = std::min<int64_t>(WIDTH, p.out - panel * WIDTH);
    Floats sums[COUNT][VECTORS];
    for (int r = 0; r < COUNT; r++)
        if (!from || width == WIDTH)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = *(const Floats *)((from ? y + r * p.out : p.bias + panel * WIDTH) + v * LANES);
        else
            for (int64_t i = 0; i < WIDTH; i++) sums[r][i / LANES][i % LANES] = i < width ? y[r * p.out + i] : 0;
    for (int64_t k = 0; k < depth; k++, w += WIDTH) {
        Floats ws[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            ws[v] = *(const Floats *)(w + v * LANES);
            __builtin_prefetch(w + AHEAD + v * LANES);
        }
        for (int r = 0; r < COUNT; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] += ws[v] * x[r * p.x_row + k];
    }
    for (int r = 0; r < COUNT; r++)
        if (width == WIDTH)
            for (int v = 0; v < VECTORS; v++) *(Floats *)(y + r * p.out + v * LANES) = sums[r][v];
        else
            for (int64_t i = 0; i < width; i++) y[r * p.out + i] = sums[r][i / LANES][i % LANES];
}

using TileFunction = void (*)(const Product &, int64_t, int64_t, int64_t, int64_t);

template <int... I>
static constexpr std::array<TileFunction, ROWS> make_tiles(std::integer_sequence<int, I...>) {
    return {tile<I + 1>...};
}

static constexpr auto tiles = make_tiles(std::make_integer_sequence<int, ROWS>());

extern "C" int64_t width() { return WIDTH; }

extern "C" void multiply(const Product *product) {
    const Product &p = *product;
    const int64_t panels = (p.out + WIDTH - 1) / WIDTH, blocks = (p.rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for collapse(2) schedule(static) num_threads(p.threads) if (p.rows * p.in * p.out > SMALL_WORK)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t panel = 0; panel < panels; panel++) {
            const int64_t first = p.rows * b / blocks, n = p.rows * (b + 1) / blocks - first;
            const int64_t count = (n + ROWS - 1) / ROWS, step = count == 1 ? p.in : DEPTH;
            for (int64_t from = 0; from < p.in; from += step)
                for (int64_t t = 0; t < count; t++) {
                    const int64_t start = n * t / count, end = n * (t + 1) / count;
                    tiles[end - start - 1](p, first + start, panel, from, std::min(step, p.in - from));
                }
        }
}
