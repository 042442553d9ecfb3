// The element-wise operations between a decoder's products, in float32: what `Ops` in ops.py asks for.
//
// Each reads and writes every number once. Rows are computed by themselves, in the same order of sums in any company.
// A function takes one structure, so that a call can be kept and made again; strides are in numbers.
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int64_t SMALL_WORK = 1 << 15;
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// e^-|x|: the whole part of the power of two becomes the exponent's bits, the rest goes through seven terms.
static inline float exp_down(float x) {
    float power = x > 0 ? -x * LOG2E : x * LOG2E, sum = 1.0f;
    power = power > -127.0f ? power : -127.0f;  // whose bits are those of zero
    int32_t whole = int32_t(power - 0.5f);
    const float rest = (power - float(whole)) * LN2;
    for (int k = 7; k; k--) sum = 1.0f + rest * sum * (1.0f / k);
    whole = (whole + 127) << 23;
    float scale;
    memcpy(&scale, &whole, sizeof scale);
    return sum * scale;
}

static inline float inverse_size(const float *x, int64_t size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

struct Norm {
    const float *x, *residual, *weight;  // residual: null, or what x is added to; the sum goes to `stream`
    float *out, *stream;
    int64_t rows, size, x_row, residual_row, threads;
    float eps;
};

extern "C" void rms_norm(const Norm *norm) {
    const Norm &n = *norm;
#pragma omp parallel for schedule(static) num_threads(n.threads) if (n.rows * n.size > SMALL_WORK)
    for (int64_t r = 0; r < n.rows; r++) {
        const float *from = n.x + r * n.x_row;
        float *to = n.out + r * n.size;
        if (n.residual) {
            const float *old = n.residual + r * n.residual_row;
            float *sum = n.stream + r * n.size;
#pragma omp simd
            for (int64_t i = 0; i < n.size; i++) sum[i] = old[i] + from[i];
            from = sum;
        }
        const float scale = inverse_size(from, n.size, n.eps);
#pragma omp simd
        for (int64_t i = 0; i < n.size; i++) to[i] = from[i] * scale * n.weight[i];
    }
}

struct Angles {  // radians: a token's position times each frequency
    const int64_t *positions;
    const float *frequencies;
    float *cos, *sin;
    int64_t tokens, count;
    float factor;
};

extern "C" void angles(const Angles *angles) {
    const Angles &a = *angles;
    for (int64_t t = 0; t < a.tokens; t++)
        for (int64_t i = 0; i < a.count; i++) {
            const float angle = float(a.positions[t]) * a.frequencies[i];
            a.cos[t * a.count + i] = std::cos(angle) * a.factor, a.sin[t * a.count + i] = std::sin(angle) * a.factor;
        }
}

struct Heads {  // of the queries, or of the keys; results lie side by side
    const float *x, *weight;  // weight: null, or that of a norm over each head
    float *out;
    int64_t count, token, head;
};

// The pair (i, i + half) of each head turned by its token's angle, after the norm if there is one.
static void turn(const Heads &h, int64_t t, const float *cos, const float *sin, int64_t dim, float eps) {
    const int64_t half = dim / 2;
    for (int64_t n = 0; n < h.count; n++) {
        const float *x = h.x + t * h.token + n * h.head;
        float *out = h.out + (t * h.count + n) * dim;
        if (h.weight) {
            const float scale = inverse_size(x, dim, eps);
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i] * scale * h.weight[i], b = x[i + half] * scale * h.weight[i + half];
                out[i] = a * cos[i] - b * sin[i], out[i + half] = b * cos[i] + a * sin[i];
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i], b = x[i + half];
                out[i] = a * cos[i] - b * sin[i], out[i + half] = b * cos[i] + a * sin[i];
            }
        }
    }
}

struct Rotation {
    Heads q, k;
    const float *cos, *sin;
    int64_t tokens, dim, threads;
    float eps;
};

extern "C" void rotate(const Rotation *rotation) {
    const Rotation &r = *rotation;
    const int64_t numbers = r.tokens * (r.q.count + r.k.count) * r.dim;
#pragma omp parallel for schedule(static) num_threads(r.threads) if (numbers > SMALL_WORK)
    for (int64_t t = 0; t < r.tokens; t++) {
        const float *cos = r.cos + t * (r.dim / 2), *sin = r.sin + t * (r.dim / 2);
        turn(r.q, t, cos, sin, r.dim, r.eps);
        turn(r.k, t, cos, sin, r.dim, r.eps);
    }
}

struct Gated {  // each row is [gate | up]
    const float *x;
    float *out;
    int64_t rows, size, x_row, threads;
};

extern "C" void silu_and_mul(const Gated *gated) {
    const Gated &g = *gated;
#pragma omp parallel for schedule(static) num_threads(g.threads) if (g.rows * g.size > SMALL_WORK)
    for (int64_t r = 0; r < g.rows; r++) {
        const float *gate = g.x + r * g.x_row, *up = gate + g.size;
        float *to = g.out + r * g.size;
#pragma omp simd
        for (int64_t i = 0; i < g.size; i++) {
            const float e = exp_down(gate[i]), numerator = gate[i] > 0 ? 1.0f : e;
            to[i] = gate[i] * (numerator / (1.0f + e)) * up[i];
        }
    }
}

struct LookUp {  // rows of a table; of one that lies in panels, as in linear.cpp, `width` rows share a panel
    const float *table;
    const int64_t *ids;
    float *out;
    int64_t tokens, size, width, threads;
};

extern "C" void look_up(const LookUp *look_up) {
    const LookUp &l = *look_up;
#pragma omp parallel for schedule(static) num_threads(l.threads) if (l.tokens * l.size > SMALL_WORK)
    for (int64_t t = 0; t < l.tokens; t++) {
        const float *from = l.table + l.ids[t] / l.width * l.width * l.size + l.ids[t] % l.width;
        for (int64_t i = 0; i < l.size; i++) l.out[t * l.size + i] = from[i * l.width];
    }
}

struct ArgMax {
    const float *x;
    int64_t *out;
    int64_t rows, size;
};

extern "C" void argmax(const ArgMax *argmax) {  // NaN is the largest; the first among equals
    const ArgMax &a = *argmax;
    for (int64_t r = 0; r < a.rows; r++) {
        const float *x = a.x + r * a.size;
        float most = -INFINITY;
        int is_nan = 0;
#pragma omp simd reduction(max : most) reduction(| : is_nan)
        for (int64_t i = 0; i < a.size; i++) {
            most = x[i] > most ? x[i] : most;
            is_nan |= x[i] != x[i];
        }
        int64_t place = 0;
        while (is_nan ? x[place] == x[place] : x[place] != most) place++;
        a.out[r] = place;
    }
}
