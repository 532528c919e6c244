/* One pass over a row of float32 logits: the k best, and the sum of exponentials.
 *
 * Only finite logits take part. NaN and +inf are counted as bad and are otherwise treated as if
 * the token were not in the vocabulary; -inf is a masked token and is not counted.
 *
 * The result does not depend on the instructions used: the best are selected by comparisons
 * alone, and the exponentials are summed in 64 fixed lanes, in single precision within a chunk
 * and in double between chunks. Multiply-adds are fused where the code says so and nowhere else
 * (-ffp-contract=off); a machine without that instruction computes the same by software. exp and
 * log of double precision are our own, since a C library may pick another code path, and another
 * last bit, on another machine.
 */
#ifndef MTPSTATS_KERNEL_H
#define MTPSTATS_KERNEL_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MTP_K 10     /* candidates kept: the width of llama.cpp's drafter */
#define MTP_SHOWN 8  /* candidates shown */
#define MTP_BLOCK 64 /* floats looked at together */
#define MTP_GROUP 8  /* blocks: small terms meet each other before they meet the largest, 1 */
#define MTP_CHUNK 2048 /* floats per step: small enough to be in the first-level cache twice */

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__)) && !defined(MTPSTATS_SCALAR)
#define MTP_X86 1
#include <immintrin.h>
#else
#define MTP_X86 0
#endif

#if defined(__GNUC__)
#define MTP_INLINE static inline __attribute__((always_inline, unused))
#define MTP_RARE(x) __builtin_expect(!!(x), 0)
#else
#define MTP_INLINE static inline
#define MTP_RARE(x) (x)
#endif

typedef struct {
    int32_t ids[MTP_K];    /* best first; -1 where there are fewer finite logits */
    float logits[MTP_K];   /* -inf likewise */
    int32_t count;         /* finite logits among the best, at most MTP_K */
    int32_t padded;        /* 1: a padding entry beats every token of the vocabulary */
    int32_t has_lse;       /* 1: both sums are set */
    int64_t n_bad;         /* NaN and +inf entries of the vocabulary */
    double lse;            /* log-sum-exp over the vocabulary, -inf for an empty one */
    double lse_top10;      /* the same over the MTP_K best */
} mtp_row;

/* a * b + c rounded once, where no instruction does it: the product of two floats is exact in
 * double precision, and rounding the sum twice goes wrong only if the first result lies midway
 * between two floats without being exact. For results that are normal floats or 0. */
MTP_INLINE float mtp_fmaf(float a, float b, float c)
{
#if defined(__FP_FAST_FMAF) || defined(FP_FAST_FMAF)
    return fmaf(a, b, c);
#else
    const double p = (double)a * b;
    double s = p + c;
    uint64_t bits;
    memcpy(&bits, &s, sizeof bits);
    if (MTP_RARE((bits & 0x1fffffff) == 0x10000000)) {
        const double t = s - p, error = (p - (s - t)) + (c - t);
        if (error != 0.0) {
            bits += (error > 0.0) == (s > 0.0) ? 1 : -1;
            memcpy(&s, &bits, sizeof s);
        }
    }
    return (float)s;
#endif
}

/* exp(x) to about 1 unit in the last place; 0 below -708, inf above 709. */
static double mtp_exp(double x)
{
    static const double ln2_hi = 6.93147180369123816490e-01, ln2_lo = 1.90821492927058770002e-10;
    static const double shift = 6755399441055744.0; /* 1.5 * 2**52: leaves the nearest integer */
    if (!(x > -708.0)) {
        return x != x ? x : 0.0;
    }
    if (x > 709.0) {
        return INFINITY;
    }
    const double magic = x * 1.44269504088896338700 + shift, n = magic - shift;
    const double r = (x - n * ln2_hi) - n * ln2_lo;
    /* Taylor, |r| <= 0.35: the first term left out is below 1e-17 */
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    memcpy(&bits, &magic, sizeof bits);
    bits = (bits + 1023) << 52; /* 2**n */
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* log(x) for a positive, normal, finite x, to about 1 unit in the last place. */
static double mtp_log(double x)
{
    static const double ln2_hi = 6.93147180369123816490e-01, ln2_lo = 1.90821492927058770002e-10;
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = ((bits >> 52) & 0x7ff) - 1023;
    bits = (bits & 0x000fffffffffffffLL) | 0x3ff0000000000000LL;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e += 1;
    }
    /* log m = 2 atanh(s), |s| < 0.172: the first term left out is below 1e-19 */
    double s = (m - 1.0) / (m + 1.0), z = s * s, p = 1.0 / 23.0;
    for (int k = 21; k >= 3; k -= 2) {
        p = p * z + 1.0 / k;
    }
    double log_m = 2.0 * s + 2.0 * s * z * p;
    return (double)e * ln2_hi + ((double)e * ln2_lo + log_m);
}

/* Index of the lowest bit set. */
MTP_INLINE int mtp_lowest(uint64_t bits)
{
#if defined(__GNUC__)
    return __builtin_ctzll(bits);
#else
    int i = 0;
    while (!(bits >> i & 1)) {
        i++;
    }
    return i;
#endif
}

/* Whether at most n bits are set. */
MTP_INLINE int mtp_at_most(uint64_t bits, int n)
{
    for (; n > 0 && bits; n--) {
        bits &= bits - 1;
    }
    return bits == 0;
}

/* Inserts a logit above the worst kept; a tie stays below what is there (the lower id). */
MTP_INLINE void mtp_keep(int k, int32_t *ids, float *logits, int32_t id, float value)
{
    int j = k - 1;
    while (j > 0 && value > logits[j - 1]) {
        logits[j] = logits[j - 1];
        ids[j] = ids[j - 1];
        j--;
    }
    logits[j] = value;
    ids[j] = id;
}

/* The 64 lanes of a block added up, in one order; the array is used up. */
MTP_INLINE double mtp_add_up(float *lane)
{
    double s[8];
    for (int i = 0; i < 16; i++) {
        lane[i] = (lane[i] + lane[i + 16]) + (lane[i + 32] + lane[i + 48]);
    }
    for (int i = 0; i < 8; i++) {
        s[i] = (double)lane[i] + (double)lane[i + 8];
    }
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
}

/* NaN and +inf among n floats. */
static int64_t mtp_count_bad(const char *p, int64_t n)
{
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++) {
        float v;
        memcpy(&v, p + 4 * i, sizeof v);
        bad += !(v <= FLT_MAX);
    }
    return bad;
}

/* The k-th largest of n distinct entries' values: no entry below it is among the k best. */
MTP_INLINE float mtp_kth(const float *a, int n, int k)
{
    float t = -INFINITY;
    for (int i = 0; i < n; i++) {
        int c = 0;
        for (int j = 0; j < n; j++) {
            c += a[j] >= a[i];
        }
        t = c >= k && a[i] > t ? a[i] : t;
    }
    return t;
}

/* ids, logits: k best, best first, filled by the call. sum, ref: when not NULL, the sum of
 * exp(logit - *ref) over the row, *ref being the largest logit. */
typedef int64_t (*mtp_scan_fn)(const char *row, int64_t n, int k, int32_t *ids, float *logits,
                               double *sum);
typedef double (*mtp_overlap_fn)(const char *a, const char *b, int blocks, const float *a_lse,
                                 const float *b_lse);

#if MTP_X86
#define MTP_ISA avx512
#define MTP_W 16
#define MTP_TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#include "_kernel_simd.h"
#define MTP_ISA avx2
#define MTP_W 8
#define MTP_TARGET __attribute__((target("avx2,fma")))
#include "_kernel_simd.h"
#endif
#define MTP_ISA baseline
#define MTP_W 4
#define MTP_TARGET
#include "_kernel_simd.h"

static mtp_scan_fn mtp_scan = mtp_scan_baseline;
static mtp_overlap_fn mtp_overlap_blocks = mtp_overlap_baseline;
static int mtp_isa_level = 0; /* 0 baseline, 1 avx2, 2 avx512 */

/* 1 when the machine (and its operating system) can run that level. */
static int mtp_isa_usable(int level)
{
#if MTP_X86
    __builtin_cpu_init();
    if (level == 2) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    }
    if (level == 1) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return level == 0;
}

static void mtp_isa_set(int level)
{
    mtp_isa_level = level;
    mtp_scan = mtp_scan_baseline;
    mtp_overlap_blocks = mtp_overlap_baseline;
#if MTP_X86
    if (level == 2) {
        mtp_scan = mtp_scan_avx512;
        mtp_overlap_blocks = mtp_overlap_avx512;
    } else if (level == 1) {
        mtp_scan = mtp_scan_avx2;
        mtp_overlap_blocks = mtp_overlap_avx2;
    }
#endif
}

/* The largest finite logit of a row, -inf if none; used on padding only. */
static float mtp_finite_max(const char *row, int64_t n)
{
    float best = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        float v;
        memcpy(&v, row + 4 * i, sizeof v);
        if (v > best && v <= FLT_MAX) {
            best = v;
        }
    }
    return best;
}

static double mtp_lse_top(const mtp_row *r)
{
    double s = 0.0;
    for (int i = 0; i < r->count; i++) {
        s += mtp_exp((double)r->logits[i] - (double)r->logits[0]);
    }
    return r->count ? (double)r->logits[0] + mtp_log(s) : -INFINITY;
}

/* Reads n logits of which the first n_vocab are tokens; the rest is padding. */
static void mtp_read(mtp_row *r, const char *row, int64_t n, int64_t n_vocab, int with_lse)
{
    double sum = 0.0;
    r->n_bad = mtp_scan(row, n_vocab, MTP_K, r->ids, r->logits, with_lse ? &sum : NULL);
    r->count = 0;
    while (r->count < MTP_K && r->ids[r->count] >= 0) {
        r->count++;
    }
    r->padded = n > n_vocab && mtp_finite_max(row + 4 * n_vocab, n - n_vocab) > r->logits[0];
    r->has_lse = with_lse;
    r->lse = with_lse && r->count ? (double)r->logits[0] + mtp_log(sum) : -INFINITY;
    r->lse_top10 = with_lse ? mtp_lse_top(r) : -INFINITY;
}

/* Sum over n tokens of min(softmax(a), softmax(b)), given both log-sum-exps. With clean 0 entries
 * that are not finite in either row are left out; with 1 there must be none but -inf. */
static double mtp_overlap(const char *a, double a_lse, const char *b, double b_lse, int64_t n,
                          int clean)
{
    const float la[2] = {(float)a_lse, (float)(a_lse - (double)(float)a_lse)};
    const float lb[2] = {(float)b_lse, (float)(b_lse - (double)(float)b_lse)};
    float x[MTP_BLOCK], y[MTP_BLOCK];
    double total = 0.0;
    for (int64_t at = 0; at < n;) {
        const int64_t left = n - at;
        const char *p = a + 4 * at, *q = b + 4 * at;
        int blocks = (int)(left < MTP_CHUNK ? left / MTP_BLOCK : MTP_CHUNK / MTP_BLOCK);
        int64_t step = MTP_BLOCK * (int64_t)blocks;
        if (blocks == 0 || !clean) {
            blocks = 1;
            step = left < MTP_BLOCK ? left : MTP_BLOCK;
            for (int i = 0; i < MTP_BLOCK; i++) {
                x[i] = y[i] = -INFINITY;
            }
            memcpy(x, p, 4 * (size_t)step);
            memcpy(y, q, 4 * (size_t)step);
            for (int i = 0; i < MTP_BLOCK; i++) {
                if (!(x[i] <= FLT_MAX && y[i] <= FLT_MAX)) {
                    x[i] = -INFINITY;
                }
            }
            p = (const char *)x;
            q = (const char *)y;
        }
        total += mtp_overlap_blocks(p, q, blocks, la, lb);
        at += step;
    }
    return total < 1.0 ? total : 1.0;
}

#endif
