/* The codecs of one section at memory speed. docs/reference/codecs.md has the formats bit by bit.
 *
 * The second half of this file is compiled once per level (portable, AVX2, AVX-512) by including itself; the caller
 * names the level. All levels, all thread counts and the numpy fallback decode the same bytes to the same bits:
 * build with -ffp-contract=off and without -ffast-math. No Python, no state, nothing allocated.
 *
 * A section is cut into scale blocks of at most 4096 elements. Each block is loaded once (x = e - minus_d) into a
 * buffer that stays in the first-level cache, encoded, turned into its residual in place and streamed out.
 */
#ifndef LEVEL

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian"
#endif

enum { NONE, BF16, INT8, INT4, TWO_BIT, ONE_BIT, TOP_K };
enum { BLOCK = 4096, LANES = 32, AHEAD = 512, KEPT = 64, SAMPLES = 256, MOST_THREADS = 64 };

#define BF16_MAX 0x1.fep127f
#define LARGEST 0x1p100f /* beyond this a value counts as not finite */
#define MAGIC 0x1.8p23f  /* adding and subtracting it rounds to the nearest integer, ties to even */
#define INNER 0.453125f  /* 2-bit levels: products with a bfloat16 scale are exact */
#define OUTER 1.5078125f
#define MIDDLE 0.98046875f
#define SIGN 0x80000000u

typedef uint32_t quad __attribute__((vector_size(16)));
typedef uint32_t octet __attribute__((vector_size(32)));

typedef struct {
    int32_t codec;
    int32_t threads;
    int64_t blocks, spans;
    const int64_t *starts;     /* [blocks + 1] first element of each block */
    const int64_t *kept;       /* [blocks + 1] first kept element of each block (top-k) */
    const int64_t *span_start; /* [spans + 1] first block of each span; spans begin on whole bytes */
    int64_t codes_at, scales_at; /* byte offsets inside the payload */
} section;

typedef struct {
    const section *s;
    const float *minus_d, *e; /* minus_d may be null: then x = e */
    float *e_next;            /* null: no residual is wanted */
    uint8_t *payload;
    const uint8_t *input;
    float *out;
    float weight;
    uint32_t key[2];
    int32_t level, check, dither, accumulate, stream;
    int64_t first, last, bad; /* blocks of this thread; bad: first element that is not finite, or -1 */
} work;

static uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* Nearest bfloat16 (ties to even), never infinite. */
static uint16_t to_bf16(float x)
{
    uint32_t u = bits_of(x > BF16_MAX ? BF16_MAX : x < -BF16_MAX ? -BF16_MAX : x);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* The next bfloat16 that is not smaller than x >= 0. */
static uint16_t to_bf16_up(float x) { return (uint16_t)((bits_of(x) + 0xffff) >> 16); }
static float from_bf16(uint16_t b) { return float_of((uint32_t)b << 16); }
static void put_scale(uint8_t *to, int64_t index, uint16_t b) { memcpy(to + 2 * index, &b, 2); }
static float get_scale(const uint8_t *from, int64_t index)
{
    uint16_t b;
    memcpy(&b, from + 2 * index, 2);
    return from_bf16(b);
}

static float capped(double x) { return x > (double)BF16_MAX ? BF16_MAX : (float)x; }

/* Write `count` bits that lie at bit 0 of `from` to bit `at` of `to`. What follows them in the last byte becomes 0. */
static void put_bits(uint8_t *to, int64_t at, const uint8_t *from, int64_t count)
{
    int64_t bytes = (count + 7) / 8, shift = at & 7;
    to += at >> 3;
    if (!shift) { memcpy(to, from, (size_t)bytes); return; }
    int64_t end = (shift + count + 7) / 8;
    for (int64_t i = 0; i < bytes; i++) {
        to[i] |= (uint8_t)(from[i] << shift);
        if (i + 1 < end) to[i + 1] = (uint8_t)(from[i] >> (8 - shift));
    }
}

/* The `count` bits at bit `at` of `from`, beginning at bit 0; `space` is used when they do not begin on a byte. */
static const uint8_t *get_bits(const uint8_t *from, int64_t at, int64_t count, uint8_t *space)
{
    int64_t bytes = (count + 7) / 8, shift = at & 7;
    from += at >> 3;
    if (!shift) return from;
    int64_t end = (shift + count + 7) / 8;
    for (int64_t i = 0; i < bytes; i++)
        space[i] = (uint8_t)(from[i] >> shift | (i + 1 < end ? from[i + 1] << (8 - shift) : 0));
    return space;
}

static inline __attribute__((always_inline)) void fetch_ahead(const float *e, const float *d)
{
    for (int j = AHEAD; j < AHEAD + LANES; j += 16) {
        __builtin_prefetch(e + j);
        __builtin_prefetch(d + j);
    }
}

static int64_t first_bad(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!(fabsf(x[i]) <= LARGEST)) return i;
    return -1;
}

/* The uniform number of element `index` under a key: 17 bits, never 0 or 1. */
static inline __attribute__((always_inline)) float uniform(uint32_t index, uint32_t key0, uint32_t key1)
{
    uint32_t h = index + key0;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = ((h ^ (h >> 15)) + key1) * 0x846ca68bu;
    h ^= h >> 16;
    return (float)(int32_t)((h >> 16) * 2 + 1) * 0x1p-17f;
}

static double sum_lanes(double *lane)
{
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

/* ---- top-k: the k largest magnitudes, of equal ones the lower indices */

static int64_t kept_of(int64_t n) { return (n + KEPT - 1) / KEPT; }

static void put_index(uint8_t *to, int64_t place, uint32_t index)
{
    to += place / 2 * 3;
    if (place & 1) { to[1] |= (uint8_t)(index << 4); to[2] = (uint8_t)(index >> 4); }
    else { to[0] = (uint8_t)index; to[1] = (uint8_t)(index >> 8); }
}

static int64_t get_index(const uint8_t *from, int64_t place)
{
    from += place / 2 * 3;
    return place & 1 ? from[1] >> 4 | from[2] << 4 : from[0] | (from[1] & 15) << 8;
}

/* Indices that do not ascend or lie outside the block are dropped: only damaged payloads have them. */
static void decode_top_k(const work *w, int64_t block, float *x, int64_t n)
{
    const section *s = w->s;
    int64_t at = s->kept[block], k = s->kept[block + 1] - at, before = -1;
    uint8_t space[KEPT / 4];
    const uint8_t *codes = get_bits(w->input + s->codes_at, 2 * at, 2 * k, space);
    float level[2] = {get_scale(w->input + s->scales_at, 2 * block), get_scale(w->input + s->scales_at, 2 * block + 1)};
    memset(x, 0, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < k; i++) {
        int64_t index = get_index(w->input, at + i);
        int code = codes[i / 4] >> (2 * (i & 3)) & 3;
        if (index > before && index < n) x[index] = float_of(bits_of(level[code >> 1]) ^ (code & 1 ? 0 : 0x80000000u));
        if (index > before) before = index;
    }
}

/* ---- one copy per level */

#define TARGET
#define NAME(x) x##_portable
#define LEVEL 0
#include "kernel.c"
#if defined(__x86_64__)
#undef TARGET
#undef NAME
#undef LEVEL
#define TARGET __attribute__((target("avx2")))
#define NAME(x) x##_avx2
#define LEVEL 1
#include "kernel.c"
#undef TARGET
#undef NAME
#undef LEVEL
#define TARGET __attribute__((target("avx2,bmi2,avx512f,avx512bw,avx512dq,avx512vl")))
#define NAME(x) x##_avx512
#define LEVEL 2
#include "kernel.c"
#endif

/* ---- the face */

/* The best level of this processor: 0 portable, 1 AVX2, 2 AVX-512. */
int32_t ciuic_best_level(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        return 2;
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

#ifndef SOURCE_HASH
#define SOURCE_HASH "unknown"
#endif
const char *ciuic_source_hash(void) { return SOURCE_HASH; }

static void run_part(work *w)
{
    int encoding = w->payload != 0;
#if defined(__x86_64__)
    if (w->level == 2) { if (encoding) encode_avx512(w); else decode_avx512(w); }
    else if (w->level == 1) { if (encoding) encode_avx2(w); else decode_avx2(w); }
    else
#endif
    if (encoding) encode_portable(w); else decode_portable(w);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static void *run_thread(void *part) { run_part(part); return 0; }

/* Whole spans for each thread, so no two of them write the same byte. Returns the first bad element or -1. */
static int64_t run(const work *whole)
{
    const section *s = whole->s;
    int64_t threads = s->threads < s->spans ? s->threads : s->spans;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    work part[MOST_THREADS];
    pthread_t thread[MOST_THREADS];
    int started[MOST_THREADS];
    for (int64_t t = 0; t < threads; t++) {
        part[t] = *whole;
        part[t].first = s->span_start[s->spans * t / threads];
        part[t].last = s->span_start[s->spans * (t + 1) / threads];
        part[t].bad = -1;
        started[t] = t > 0 && pthread_create(&thread[t], 0, run_thread, &part[t]) == 0;
    }
    int64_t bad = -1;
    for (int64_t t = 0; t < threads; t++) {
        if (started[t]) pthread_join(thread[t], 0);
        else run_part(&part[t]);
        if (bad < 0) bad = part[t].bad;
    }
    return bad;
}

/* x = e - minus_d (or e), encoded into the payload; e_next = x - decoded where e_next is given. Returns the first
 * element of x that is not finite or beyond LARGEST (only looked for with minus_d), or -1. */
int64_t ciuic_encode(const section *s, int32_t level, const float *minus_d, const float *e, float *e_next,
                     uint8_t *payload, const uint32_t *key, int32_t stream)
{
    work w = {.s = s, .level = level, .minus_d = minus_d, .e = e, .e_next = e_next, .payload = payload,
              .check = minus_d != 0, .dither = key != 0, .stream = stream};
    if (key) { w.key[0] = key[0]; w.key[1] = key[1]; }
    int64_t bad = run(&w), count = s->starts[s->blocks];
    if (s->codec == INT4 && (count & 1)) payload[count / 2] |= 0x80; /* the padding half decodes to 0 */
    return bad;
}

/* out = decoded, or out += weight * decoded with both operations rounded. */
void ciuic_decode(const section *s, int32_t level, const uint8_t *payload, float *out, float weight,
                  int32_t accumulate, int32_t stream)
{
    work w = {.s = s, .level = level, .input = payload, .out = out, .weight = weight, .accumulate = accumulate,
              .stream = stream};
    run(&w);
}

#else /* ---- everything below is compiled once per level -------------------------------------------------------- */

/* x = e - minus_d or e, [n]; the sum of |x|, or of x * x, in double with a fixed order of additions. */
TARGET static double NAME(load_sum)(const work *w, int64_t start, float *restrict x, int64_t n, int squares)
{
    const float *restrict e = w->e + start, *restrict d = w->minus_d ? w->minus_d + start : 0;
    double lane[LANES] = {0};
    int64_t i = 0;
#if LEVEL == 2
    __m512d sum[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
    for (; i + LANES <= n; i += LANES) {
        if (d) fetch_ahead(e + i, d + i);
        for (int j = 0; j < 2; j++) {
            __m512 v = _mm512_loadu_ps(e + i + 16 * j);
            if (d) v = _mm512_sub_ps(v, _mm512_loadu_ps(d + i + 16 * j));
            _mm512_storeu_ps(x + i + 16 * j, v);
            v = _mm512_abs_ps(v);
            __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
            sum[2 * j] = _mm512_add_pd(sum[2 * j], squares ? _mm512_mul_pd(a, a) : a);
            sum[2 * j + 1] = _mm512_add_pd(sum[2 * j + 1], squares ? _mm512_mul_pd(b, b) : b);
        }
    }
    for (int j = 0; j < 4; j++) _mm512_storeu_pd(lane + 8 * j, sum[j]);
#endif
    for (; i + LANES <= n; i += LANES) {
        if (d) {
            fetch_ahead(e + i, d + i);
            for (int j = 0; j < LANES; j++) x[i + j] = e[i + j] - d[i + j];
        } else {
            for (int j = 0; j < LANES; j++) x[i + j] = e[i + j];
        }
        if (squares)
            for (int j = 0; j < LANES; j++) lane[j] += (double)x[i + j] * (double)x[i + j];
        else
            for (int j = 0; j < LANES; j++) lane[j] += (double)fabsf(x[i + j]);
    }
    for (int j = 0; i < n; i++, j++) {
        x[i] = d ? e[i] - d[i] : e[i];
        lane[j] += squares ? (double)x[i] * (double)x[i] : (double)fabsf(x[i]);
    }
    return sum_lanes(lane);
}

/* The same; the bits of the largest magnitude (a NaN is the largest). */
TARGET static int32_t NAME(load_largest)(const work *w, int64_t start, float *restrict x, int64_t n)
{
    const float *restrict e = w->e + start, *restrict d = w->minus_d ? w->minus_d + start : 0;
    int32_t lane[LANES] = {0}, largest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        if (d) {
            fetch_ahead(e + i, d + i);
            for (int j = 0; j < LANES; j++) x[i + j] = e[i + j] - d[i + j];
        } else {
            for (int j = 0; j < LANES; j++) x[i + j] = e[i + j];
        }
        for (int j = 0; j < LANES; j++) {
            int32_t u = (int32_t)(bits_of(x[i + j]) & 0x7fffffff);
            lane[j] = u > lane[j] ? u : lane[j];
        }
    }
    for (; i < n; i++) {
        x[i] = d ? e[i] - d[i] : e[i];
        int32_t u = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        lane[0] = u > lane[0] ? u : lane[0];
    }
    for (int j = 0; j < LANES; j++) largest = lane[j] > largest ? lane[j] : largest;
    return largest;
}

/* to[0..n) = from; past the caches when it is large and will not be read soon. */
TARGET static void NAME(put)(float *restrict to, const float *restrict from, int64_t n, int stream)
{
    int64_t i = 0;
#if defined(__x86_64__)
    if (stream) {
        for (; i < n && ((uintptr_t)(to + i) & 63); i++) to[i] = from[i];
        for (; i + 16 <= n; i += 16) {
#if LEVEL == 2
            _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#elif LEVEL == 1
            _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
            _mm256_stream_ps(to + i + 8, _mm256_loadu_ps(from + i + 8));
#else
            for (int j = 0; j < 16; j += 4) _mm_stream_ps(to + i + j, _mm_loadu_ps(from + i + j));
#endif
        }
    }
#endif
    if (i < n) memcpy(to + i, from + i, (size_t)(n - i) * sizeof *to);
}

/* to += weight * from, two roundings. */
TARGET static void NAME(add)(float *restrict to, const float *restrict from, int64_t n, float weight)
{
    for (int64_t i = 0; i < n; i++) to[i] += weight * from[i];
}

/* ---- 1-bit */

/* bit i of `to` = x[i] >= 0, [n] padded with zero bits to whole bytes. */
TARGET static void NAME(pack_signs)(uint8_t *to, const float *x, int64_t n)
{
    int64_t i = 0;
#if LEVEL == 2
    const __m512 zero = _mm512_setzero_ps();
    for (; i + 64 <= n; i += 64) {
        uint64_t word = 0;
        for (int j = 0; j < 4; j++)
            word |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(x + i + 16 * j), zero, _CMP_GE_OQ) << (16 * j);
        memcpy(to + i / 8, &word, 8);
    }
#elif LEVEL == 1
    for (; i + 8 <= n; i += 8)
        to[i / 8] = (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_setzero_ps(), _CMP_GE_OQ));
#elif defined(__x86_64__)
    for (; i + 8 <= n; i += 8)
        to[i / 8] = (uint8_t)(_mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(x + i), _mm_setzero_ps()))
                              | _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(x + i + 4), _mm_setzero_ps())) << 4);
#endif
    for (; i < n; i += 8) {
        uint8_t byte = 0;
        for (int64_t j = i; j < n && j < i + 8; j++) byte |= (uint8_t)((x[j] >= 0) << (j - i));
        to[i / 8] = byte;
    }
}

TARGET static void NAME(encode_one_bit)(const work *w, int64_t block, float *restrict x, int64_t n, double sum)
{
    const section *s = w->s;
    uint8_t bits[BLOCK / 8];
    uint16_t b = to_bf16(capped(sum / (double)n));
    float scale = from_bf16(b);
    put_scale(w->payload + s->scales_at, block, b);
    if (s->starts[block] & 7) {
        NAME(pack_signs)(bits, x, n);
        put_bits(w->payload, s->starts[block], bits, n);
    } else {
        NAME(pack_signs)(w->payload + s->starts[block] / 8, x, n);
    }
    if (w->e_next)
        for (int64_t i = 0; i < n; i++) x[i] -= x[i] >= 0 ? scale : -scale;
}

#if LEVEL == 2
/* The same for a whole number of words at an aligned address, with the residual streamed out at once. */
TARGET static void NAME(finish_one_bit)(const work *w, int64_t block, const float *restrict x, int64_t n, double sum)
{
    const section *s = w->s;
    int64_t start = s->starts[block];
    uint16_t b = to_bf16(capped(sum / (double)n));
    float *to = w->e_next + start;
    __m512 positive = _mm512_set1_ps(from_bf16(b)), negative = _mm512_set1_ps(-from_bf16(b));
    put_scale(w->payload + s->scales_at, block, b);
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t word = 0;
        for (int j = 0; j < 4; j++) {
            __m512 v = _mm512_loadu_ps(x + i + 16 * j);
            __mmask16 bits = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GE_OQ);
            word |= (uint64_t)bits << (16 * j);
            _mm512_stream_ps(to + i + 16 * j, _mm512_sub_ps(v, _mm512_mask_blend_ps(bits, negative, positive)));
        }
        memcpy(w->payload + (start + i) / 8, &word, 8);
    }
}
#endif

TARGET static void NAME(decode_one_bit)(const work *w, int64_t block, float *restrict x, int64_t n)
{
    const section *s = w->s;
    uint8_t space[BLOCK / 8 + 2];
    const uint8_t *bits = get_bits(w->input, s->starts[block], n, space);
    uint32_t positive = bits_of(get_scale(w->input + s->scales_at, block)), negative = positive ^ SIGN;
    int64_t i = 0;
#if LEVEL == 2
    const __m512i minus = _mm512_set1_epi32((int32_t)negative), plus = _mm512_set1_epi32((int32_t)positive);
    for (; i + 16 <= n; i += 16) {
        uint16_t word;
        memcpy(&word, bits + i / 8, 2);
        _mm512_storeu_si512(x + i, _mm512_mask_blend_epi32(word, minus, plus));
    }
#elif LEVEL == 1
    const octet place = {1, 2, 4, 8, 16, 32, 64, 128};
    for (; i + 8 <= n; i += 8) {
        octet value = negative ^ ((octet)((place & bits[i / 8]) != 0) & SIGN);
        memcpy(x + i, &value, sizeof value);
    }
#else
    const quad place = {1, 2, 4, 8};
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j += 4) {
            quad value = negative ^ ((quad)((place & (uint32_t)(bits[i / 8] >> j)) != 0) & SIGN);
            memcpy(x + i + j, &value, sizeof value);
        }
#endif
    for (; i < n; i++) x[i] = float_of(bits[i >> 3] >> (i & 7) & 1 ? positive : negative);
}

/* ---- int8 and int4 */

/* codes = the nearest of -levels..levels to x / scale, or stochastic; x becomes its residual. */
TARGET static void NAME(quantize)(const work *w, int64_t start, float *restrict x, int8_t *restrict codes, int64_t n,
                                  float scale, float levels)
{
    float divisor = scale > 0 ? scale : 1;
    if (w->dither) {
        for (int64_t i = 0; i < n; i++) {
            float t = x[i] / divisor + uniform((uint32_t)(start + i), w->key[0], w->key[1]);
            t = t < -levels ? -levels : t > levels ? levels : t;
            float near = (t + MAGIC) - MAGIC;
            near = near > t ? near - 1 : near;
            codes[i] = (int8_t)(int32_t)near;
            x[i] -= near * scale;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float t = x[i] / divisor;
        t = t < -levels ? -levels : t > levels ? levels : t;
        float near = (t + MAGIC) - MAGIC;
        codes[i] = (int8_t)(int32_t)near;
        x[i] -= near * scale;
    }
}

TARGET static void NAME(encode_integers)(const work *w, int64_t block, float *restrict x, int64_t n, int32_t largest)
{
    const section *s = w->s;
    int64_t start = s->starts[block];
    float levels = s->codec == INT8 ? 127 : 7;
    float limit = s->codec == INT8 ? (float)(0x1.fep127 / 127 * (1 - 0x1p-8)) : (float)(0x1.fep127 / 7 * (1 - 0x1p-8));
    float wanted = float_of((uint32_t)largest) / levels;
    wanted = wanted < limit ? wanted : limit;
    uint16_t b = w->dither ? to_bf16_up(wanted) : to_bf16(wanted);
    put_scale(w->payload + s->scales_at, block, b);
    if (s->codec == INT8) {
        NAME(quantize)(w, start, x, (int8_t *)w->payload + start, n, from_bf16(b), levels);
        return;
    }
    int8_t codes[BLOCK + 1];
    uint8_t packed[BLOCK / 2];
    NAME(quantize)(w, start, x, codes, n, from_bf16(b), levels);
    codes[n] = -8; /* as bits: 0 */
    for (int64_t i = 0; i < (n + 1) / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, 2);
        pair ^= 0x0808; /* the low half of q + 8 */
        packed[i] = (uint8_t)((pair & 15) | (pair >> 4 & 0xf0));
    }
    put_bits(w->payload, 4 * start, packed, 4 * n);
}

TARGET static void NAME(decode_integers)(const work *w, int64_t block, float *restrict x, int64_t n)
{
    const section *s = w->s;
    int64_t start = s->starts[block];
    float scale = get_scale(w->input + s->scales_at, block);
    int8_t codes[BLOCK + 1];
    if (s->codec == INT8) {
        memcpy(codes, w->input + start, (size_t)n);
    } else {
        uint8_t space[BLOCK / 2 + 2];
        const uint8_t *packed = get_bits(w->input, 4 * start, 4 * n, space);
        for (int64_t i = 0; i < (n + 1) / 2; i++) {
            uint16_t pair = (uint16_t)((packed[i] & 15) | (packed[i] & 0xf0) << 4);
            memcpy(codes + 2 * i, &pair, 2);
        }
        for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)(codes[i] - 8);
    }
    for (int64_t i = 0; i < n; i++) x[i] = scale * (float)codes[i];
}

/* ---- 2-bit */

TARGET static void NAME(encode_two_bit)(const work *w, int64_t block, float *restrict x, int64_t n, double squares)
{
    const section *s = w->s;
    uint8_t codes[BLOCK + 4], packed[BLOCK / 4];
    float middle = MIDDLE * from_bf16(to_bf16(capped(sqrt(squares / (double)n))));
    double lane[2][LANES] = {{0}, {0}};
    int32_t outside = 0;
    int64_t i = 0;
#if LEVEL == 2
    __m512d sum[2][4];
    for (int j = 0; j < 8; j++) sum[j / 4][j % 4] = _mm512_setzero_pd();
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < 2; j++) {
            __m512 v = _mm512_loadu_ps(x + i + 16 * j), size = _mm512_abs_ps(v);
            uint32_t positive = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GE_OQ);
            uint32_t out = _mm512_cmp_ps_mask(size, _mm512_set1_ps(middle), _CMP_GT_OQ), in = ~out & 0xffff;
            uint32_t word = _pdep_u32(positive, 0x55555555) | _pdep_u32(out, 0xaaaaaaaa);
            __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(size));
            __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(size, 1));
            memcpy(packed + (i + 16 * j) / 4, &word, 4);
            sum[0][2 * j] = _mm512_mask_add_pd(sum[0][2 * j], (__mmask8)in, sum[0][2 * j], a);
            sum[1][2 * j] = _mm512_mask_add_pd(sum[1][2 * j], (__mmask8)out, sum[1][2 * j], a);
            sum[0][2 * j + 1] = _mm512_mask_add_pd(sum[0][2 * j + 1], (__mmask8)(in >> 8), sum[0][2 * j + 1], b);
            sum[1][2 * j + 1] = _mm512_mask_add_pd(sum[1][2 * j + 1], (__mmask8)(out >> 8), sum[1][2 * j + 1], b);
            outside += __builtin_popcount(out);
        }
    for (int j = 0; j < 8; j++) _mm512_storeu_pd(lane[j / 4] + 8 * (j % 4), sum[j / 4][j % 4]);
#else
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float size = fabsf(x[i + j]);
            int32_t out = size > middle;
            codes[i + j] = (uint8_t)((x[i + j] >= 0) | out << 1);
            lane[0][j] += (double)(out ? 0 : size);
            lane[1][j] += (double)(out ? size : 0);
            outside += out;
        }
#endif
    int64_t packed_so_far = LEVEL == 2 ? i : 0;
    for (int j = 0; i < n; i++, j++) {
        float size = fabsf(x[i]);
        int32_t out = size > middle;
        codes[i] = (uint8_t)((x[i] >= 0) | out << 1);
        lane[out][j] += (double)size;
        outside += out;
    }
    double over = (double)INNER * sum_lanes(lane[0]) + (double)OUTER * sum_lanes(lane[1]);
    double under = (double)INNER * INNER * (double)(n - outside) + (double)OUTER * OUTER * outside;
    float limit = (float)(0x1.fep127 / OUTER * (1 - 0x1p-8));
    float wanted = over / under < (double)limit ? (float)(over / under) : limit;
    uint16_t b = to_bf16(wanted);
    float inner = INNER * from_bf16(b), outer = OUTER * from_bf16(b);
    put_scale(w->payload + s->scales_at, block, b);
    memset(codes + n, 0, 4);
    for (int64_t k = packed_so_far / 4; k < (n + 3) / 4; k++) {
        uint32_t four;
        memcpy(&four, codes + 4 * k, 4);
        packed[k] = (uint8_t)(four | four >> 6 | four >> 12 | four >> 18);
    }
    put_bits(w->payload, 2 * s->starts[block], packed, 2 * n);
    if (w->e_next)
        for (int64_t k = 0; k < n; k++) {
            float level = fabsf(x[k]) > middle ? outer : inner;
            x[k] -= x[k] >= 0 ? level : -level;
        }
}

TARGET static void NAME(decode_two_bit)(const work *w, int64_t block, float *restrict x, int64_t n)
{
    const section *s = w->s;
    uint8_t space[BLOCK / 4 + 2];
    const uint8_t *packed = get_bits(w->input, 2 * s->starts[block], 2 * n, space);
    float scale = get_scale(w->input + s->scales_at, block), inner = INNER * scale, outer = OUTER * scale;
    float level[4] = {float_of(bits_of(inner) ^ SIGN), inner, float_of(bits_of(outer) ^ SIGN), outer};
    int64_t i = 0;
#if LEVEL == 2
    const __m512i shift = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 levels = _mm512_broadcast_f32x4(_mm_loadu_ps(level));
    for (; i + 16 <= n; i += 16) {
        uint32_t word;
        memcpy(&word, packed + i / 4, 4);
        __m512i code = _mm512_srlv_epi32(_mm512_set1_epi32((int32_t)word), shift);
        _mm512_storeu_ps(x + i, _mm512_permutexvar_ps(code, levels));
    }
#else
    const quad sign = {1, 4, 16, 64};
    const uint32_t low = bits_of(level[0]), change = bits_of(inner) ^ bits_of(outer);
    for (; i + 4 <= n; i += 4) {
        quad value = low ^ ((quad)((sign & (uint32_t)packed[i / 4]) != 0) & SIGN);
        value ^= (quad)((sign & (uint32_t)(packed[i / 4] >> 1)) != 0) & change;
        memcpy(x + i, &value, sizeof value);
    }
#endif
    for (; i < n; i++) x[i] = level[packed[i / 4] >> (2 * (i & 3)) & 3];
}

/* ---- top-k */

/* bit i of `words` = the magnitude of x[i] reaches the threshold (both as bits), [n]. */
TARGET static void NAME(reaching)(uint64_t *words, const float *x, int64_t n, int32_t threshold)
{
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t word = 0;
        int64_t j = 0, end = n - i < 64 ? n - i : 64;
#if LEVEL == 2
        const __m512i size = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32(threshold);
        for (; j + 16 <= end; j += 16) {
            __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i + j), size);
            word |= (uint64_t)_mm512_cmpge_epi32_mask(bits, least) << j;
        }
#elif LEVEL == 1
        const __m256i size = _mm256_set1_epi32(0x7fffffff), least = _mm256_set1_epi32(threshold - 1);
        for (; j + 8 <= end; j += 8) {
            __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(x + i + j)), size);
            word |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, least))) << j;
        }
#elif defined(__x86_64__)
        const __m128i size = _mm_set1_epi32(0x7fffffff), least = _mm_set1_epi32(threshold - 1);
        for (; j + 4 <= end; j += 4) {
            __m128i bits = _mm_and_si128(_mm_loadu_si128((const __m128i *)(const void *)(x + i + j)), size);
            word |= (uint64_t)(uint32_t)_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(bits, least))) << j;
        }
#endif
        for (; j < end; j++) word |= (uint64_t)((int32_t)(bits_of(x[i + j]) & 0x7fffffff) >= threshold) << j;
        words[i / 64] = word;
    }
}

/* The largest threshold that k of n magnitudes reach, up to 2^slack below it; at least `low`. */
TARGET static int32_t NAME(threshold)(const int32_t *restrict size, int64_t n, int64_t k, int32_t low, int slack)
{
    int64_t high = low; /* k reach `low`, fewer than k reach `high` + 1 */
    for (int64_t i = 0; i < n; i++) high = size[i] > high ? size[i] : high;
    while (high - low > (1 << slack) - 1) {
        int32_t middle = (int32_t)(low + (high - low + 1) / 2), reached = 0;
        for (int32_t i = 0; i < (int32_t)n; i++) reached += size[i] >= middle;
        if (reached >= k) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* A magnitude that somewhat more than k elements of this block reach, guessed from a sample. */
TARGET static int32_t NAME(guess)(const float *x, int64_t n, int64_t k)
{
    int32_t sample[SAMPLES];
    int64_t count = n < SAMPLES ? n : SAMPLES, step = n / count, rank = 4 + 2 * k * count / n;
    if (rank >= count) return 0;
    for (int64_t i = 0; i < count; i++) sample[i] = (int32_t)(bits_of(x[i * step]) & 0x7fffffff);
    return NAME(threshold)(sample, count, rank, 0, 16);
}

/* Elements whose magnitude reaches the threshold, in order. */
TARGET static int64_t NAME(gather)(const float *x, int64_t n, int32_t threshold, uint16_t *index, int32_t *size)
{
    uint64_t words[BLOCK / 64];
    int64_t found = 0;
    NAME(reaching)(words, x, n, threshold);
    for (int64_t at = 0; at < n; at += 64)
        for (uint64_t word = words[at / 64]; word; word &= word - 1) {
            int64_t i = at + __builtin_ctzll(word);
            index[found] = (uint16_t)i;
            size[found++] = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        }
    return found;
}

/* The indices of the k largest of n elements, ascending. The guess costs or saves time; it never changes the result. */
TARGET static void NAME(choose)(const float *x, int64_t n, int64_t k, uint16_t *index)
{
    uint16_t candidate[BLOCK];
    int32_t size[BLOCK], low = NAME(guess)(x, n, k);
    int64_t found = NAME(gather)(x, n, low, candidate, size);
    if (found < k) found = NAME(gather)(x, n, low = 0, candidate, size);
    int32_t least = NAME(threshold)(size, found, k, low, 0);
    int64_t equal = k;
    for (int64_t i = 0; i < found; i++) equal -= size[i] > least;
    for (int64_t i = 0, kept = 0; i < found; i++)
        if (size[i] > least || (size[i] == least && equal-- > 0)) index[kept++] = candidate[i];
}

TARGET static void NAME(encode_top_k)(const work *w, int64_t block, float *x, int64_t n)
{
    const section *s = w->s;
    int64_t k = kept_of(n), at = s->kept[block];
    uint16_t index[KEPT];
    double sum = 0, part[2] = {0, 0};
    int64_t count[2] = {0, 0};
    NAME(choose)(x, n, k, index);
    for (int64_t i = 0; i < k; i++) sum += (double)fabsf(x[index[i]]);
    uint8_t codes[KEPT / 4] = {0}, code[KEPT];
    for (int64_t i = 0; i < k; i++) {
        double size = (double)fabsf(x[index[i]]);
        int high = size * (double)k > sum;
        code[i] = (uint8_t)((x[index[i]] >= 0) | high << 1);
        part[high] += size;
        count[high]++;
        codes[i / 4] |= (uint8_t)(code[i] << (2 * (i & 3)));
        put_index(w->payload, at + i, index[i]);
    }
    float level[2];
    for (int high = 0; high < 2; high++) {
        uint16_t b = count[high] ? to_bf16(capped(part[high] / (double)count[high])) : 0;
        put_scale(w->payload + s->scales_at, 2 * block + high, b);
        level[high] = from_bf16(b);
    }
    put_bits(w->payload + s->codes_at, 2 * at, codes, 2 * k);
    if (w->e_next)
        for (int64_t i = 0; i < k; i++) x[index[i]] -= code[i] & 1 ? level[code[i] >> 1] : -level[code[i] >> 1];
}

/* ---- none and bf16 */

TARGET static void NAME(encode_bf16)(uint8_t *to, float *restrict x, int64_t n)
{
    uint16_t half[BLOCK];
    for (int64_t i = 0; i < n; i++) {
        half[i] = to_bf16(x[i]);
        x[i] -= from_bf16(half[i]);
    }
    memcpy(to, half, (size_t)n * 2);
}

TARGET static void NAME(decode_bf16)(const uint8_t *from, float *restrict x, int64_t n)
{
    uint16_t half[BLOCK];
    memcpy(half, from, (size_t)n * 2);
    for (int64_t i = 0; i < n; i++) x[i] = from_bf16(half[i]);
}

/* ---- blocks of one thread */

TARGET static void NAME(encode)(work *w)
{
    const section *s = w->s;
    float x[BLOCK] __attribute__((aligned(64)));
    for (int64_t block = w->first; block < w->last; block++) {
        int64_t start = s->starts[block], n = s->starts[block + 1] - start;
        int summed = s->codec == ONE_BIT || s->codec == TWO_BIT;
        double sum = 0;
        int32_t largest = 0;
        if (summed) sum = NAME(load_sum)(w, start, x, n, s->codec == TWO_BIT);
        else largest = NAME(load_largest)(w, start, x, n);
        double most = s->codec == TWO_BIT ? (double)LARGEST * (double)LARGEST : (double)LARGEST;
        if (w->check && (summed ? !(sum <= most) : largest > (int32_t)bits_of(LARGEST))) {
            int64_t bad = first_bad(x, n);
            if (bad >= 0) { w->bad = start + bad; return; }
        }
#if LEVEL == 2
        if (s->codec == ONE_BIT && w->stream && w->e_next && !(n & 63) && !(start & 7)
            && !((uintptr_t)(w->e_next + start) & 63)) {
            NAME(finish_one_bit)(w, block, x, n, sum);
            continue;
        }
#endif
        switch (s->codec) {
        case NONE:
            memcpy(w->payload + 4 * start, x, (size_t)n * 4);
            if (w->e_next) memset(x, 0, (size_t)n * 4);
            break;
        case BF16: NAME(encode_bf16)(w->payload + 2 * start, x, n); break;
        case INT8:
        case INT4: NAME(encode_integers)(w, block, x, n, largest); break;
        case TWO_BIT: NAME(encode_two_bit)(w, block, x, n, sum); break;
        case ONE_BIT: NAME(encode_one_bit)(w, block, x, n, sum); break;
        default: NAME(encode_top_k)(w, block, x, n);
        }
        if (w->e_next) NAME(put)(w->e_next + start, x, n, w->stream);
    }
}

TARGET static void NAME(decode)(work *w)
{
    const section *s = w->s;
    float x[BLOCK] __attribute__((aligned(64)));
    for (int64_t block = w->first; block < w->last; block++) {
        int64_t start = s->starts[block], n = s->starts[block + 1] - start;
        switch (s->codec) {
        case NONE: memcpy(x, w->input + 4 * start, (size_t)n * 4); break;
        case BF16: NAME(decode_bf16)(w->input + 2 * start, x, n); break;
        case INT8:
        case INT4: NAME(decode_integers)(w, block, x, n); break;
        case TWO_BIT: NAME(decode_two_bit)(w, block, x, n); break;
        case ONE_BIT: NAME(decode_one_bit)(w, block, x, n); break;
        default: decode_top_k(w, block, x, n);
        }
        if (w->accumulate) NAME(add)(w->out + start, x, n, w->weight);
        else NAME(put)(w->out + start, x, n, w->stream);
    }
}

#endif
