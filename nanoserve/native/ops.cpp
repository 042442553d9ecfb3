// The element-wise operations between a decoder's products, in float32: what `Ops` in ops.py asks for.
//
// Each reads and writes every number once. Rows are computed by themselves, in the same order of sums in any company.
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

// residual: null, or what x is added to; the sum goes to `stream`.
extern "C" void rms_norm(const float *x, const float *residual, const float *weight, float *out, float *stream,
                         int64_t rows, int64_t size, int64_t x_row, int64_t residual_row, float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SMALL_WORK)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * x_row;
        float *to = out + r * size;
        if (residual) {
            const float *old = residual + r * residual_row;
            float *sum = stream + r * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) sum[i] = old[i] + from[i];
            from = sum;
        }
        const float scale = inverse_size(from, size, eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * scale * weight[i];
    }
}

struct Heads {  // of the queries, or of the keys: strides are in numbers, results lie side by side
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

extern "C" void rotate(const Heads *q, const Heads *k, const float *cos, const float *sin, int64_t tokens, int64_t dim,
                       float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * (q->count + k->count) * dim > SMALL_WORK)
    for (int64_t t = 0; t < tokens; t++) {
        turn(*q, t, cos + t * (dim / 2), sin + t * (dim / 2), dim, eps);
        turn(*k, t, cos + t * (dim / 2), sin + t * (dim / 2), dim, eps);
    }
}

// silu(gate) * up of each row [gate | up].
extern "C" void silu_and_mul(const float *x, float *out, int64_t rows, int64_t size, int64_t x_row, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SMALL_WORK)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = x + r * x_row, *up = gate + size;
        float *to = out + r * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float e = exp_down(gate[i]), numerator = gate[i] > 0 ? 1.0f : e;
            to[i] = gate[i] * (numerator / (1.0f + e)) * up[i];
        }
    }
}
