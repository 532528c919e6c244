/* One draw from a row of logits: top_k, then top_p, then min_p, then temperature, as llama.cpp
 * orders and means them. The candidates stand by logit descending, then id ascending; each owns an
 * interval of [0, 1) as long as its probability, and the draw picks the interval it falls in. */
#ifndef MTPSTATS_SAMPLER_H
#define MTPSTATS_SAMPLER_H

#include <stdlib.h>

#include "_kernel.h"

#define MTP_LIST 256 /* up to this top_k the kernel's sorted list serves; above it a heap */

typedef struct {
    double temp, top_p, min_logit; /* min_logit: log(min_p), -inf when min_p is off */
    int64_t top_k;                 /* 0: the whole vocabulary */
    uint64_t seed;
    double margin;                 /* results of the last call */
    int64_t n_bad;
    int64_t capacity;              /* of each scratch array, entries */
    int32_t *heap_ids, *sorted_ids;
    float *heap, *sorted;
    double *weights;
    int32_t list_ids[MTP_LIST];
    float list[MTP_LIST];
    double list_weights[MTP_LIST];
} mtp_sampler;

static uint64_t mtp_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

/* Uniform in [0, 1), a function of (seed, position) alone: two rounds of splitmix64's mixing, the
 * first over the seed, the second over that and the position; the upper 53 bits are the draw. */
static double mtp_uniform(uint64_t seed, uint64_t position)
{
    const uint64_t step = 0x9e3779b97f4a7c15ULL;
    uint64_t x = mtp_mix(seed + step);
    x = mtp_mix(x + (position + 1) * step);
    return (double)(x >> 11) * (1.0 / 9007199254740992.0);
}

MTP_INLINE int mtp_before(float a, int32_t ia, float b, int32_t ib)
{
    return a > b || (a == b && ia < ib);
}

static void mtp_sift(float *heap, int32_t *ids, int64_t n, int64_t i)
{
    float v = heap[i];
    int32_t id = ids[i];
    for (;;) {
        int64_t c = 2 * i + 1;
        if (c >= n) {
            break;
        }
        if (c + 1 < n && mtp_before(heap[c + 1], ids[c + 1], heap[c], ids[c])) {
            c++;
        }
        if (!mtp_before(heap[c], ids[c], v, id)) {
            break;
        }
        heap[i] = heap[c];
        ids[i] = ids[c];
        i = c;
    }
    heap[i] = v;
    ids[i] = id;
}

/* w[i] = exp((logit - best) / temp) of n entries, unless w is NULL; returns their sum. */
static double mtp_weights(const float *logits, int64_t n, double best, double temp, double *w)
{
    double s = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double x = mtp_exp(((double)logits[i] - best) / temp);
        if (w) {
            w[i] = x;
        }
        s += x;
    }
    return s;
}

/* The candidates top_p and min_p keep out of m sorted ones, of weights w at temperature 1; total:
 * the weight of all that top_p looks at. */
static int64_t mtp_cut(const mtp_sampler *s, const float *logits, const double *w, int64_t m,
                       double total)
{
    if (s->top_p < 1.0) {
        double sum = 0.0;
        for (int64_t i = 0; i < m; i++) {
            sum += w[i];
            if (sum >= s->top_p * total) {
                m = i + 1;
                break;
            }
        }
    }
    for (int64_t i = 1; i < m; i++) {
        if ((double)logits[i] < (double)logits[0] + s->min_logit) {
            m = i;
            break;
        }
    }
    return m;
}

static int64_t mtp_draw(mtp_sampler *s, const double *w, int64_t m, double total, double u)
{
    double low = 0.0, high = 0.0;
    int64_t i = 0;
    for (; i < m; i++) {
        low = high;
        high += w[i];
        if (high > u * total) {
            break;
        }
    }
    if (i == m) { /* rounding left the draw at the very end */
        i = m - 1;
    }
    double below = u - low / total, above = high / total - u;
    s->margin = below < above ? below : above;
    s->margin = s->margin > 0.0 ? s->margin : 0.0;
    return i;
}

/* Whole vocabulary, or a top_k too long for a list: entries come off a heap as they are needed.
 * Returns -2 when there is no memory. */
static int32_t mtp_sample_heap(mtp_sampler *s, const char *row, int64_t n, double u)
{
    if (n > s->capacity) {
        int32_t *a = realloc(s->heap_ids, 4 * (size_t)n);
        s->heap_ids = a ? a : s->heap_ids;
        int32_t *b = realloc(s->sorted_ids, 4 * (size_t)n);
        s->sorted_ids = b ? b : s->sorted_ids;
        float *c = realloc(s->heap, 4 * (size_t)n);
        s->heap = c ? c : s->heap;
        float *d = realloc(s->sorted, 4 * (size_t)n);
        s->sorted = d ? d : s->sorted;
        double *e = realloc(s->weights, 8 * (size_t)n);
        s->weights = e ? e : s->weights;
        if (!a || !b || !c || !d || !e) {
            return -2;
        }
        s->capacity = n;
    }
    int64_t m = 0;
    float best = -INFINITY;
    s->n_bad = 0;
    for (int64_t i = 0; i < n; i++) {
        float v;
        memcpy(&v, row + 4 * i, sizeof v);
        if (!(v <= FLT_MAX)) {
            s->n_bad++;
        } else if (v > -INFINITY) {
            s->heap[m] = v;
            s->heap_ids[m++] = (int32_t)i;
            best = v > best ? v : best;
        }
    }
    if (m == 0) {
        return -1;
    }
    const int64_t k = s->top_k > 0 && s->top_k < m ? s->top_k : m;
    const int whole = k == m && s->top_p >= 1.0 && s->min_logit == -INFINITY;
    double total = 0.0; /* over all entries, before the heap reorders them */
    if (whole) {
        total = mtp_weights(s->heap, m, best, s->temp, NULL);
    } else if (k == m && s->top_p < 1.0) {
        total = mtp_weights(s->heap, m, best, 1.0, NULL);
    }
    for (int64_t i = m / 2 - 1; i >= 0; i--) {
        mtp_sift(s->heap, s->heap_ids, m, i);
    }
    int64_t got = 0;
    double sum = 0.0;
    while (got < k) {
        float v = s->heap[0];
        if (k == m && (double)v < (double)best + s->min_logit) {
            break; /* with a true top_k the softmax needs all k */
        }
        s->sorted[got] = v;
        s->sorted_ids[got++] = s->heap_ids[0];
        int64_t left = m - got;
        s->heap[0] = s->heap[left];
        s->heap_ids[0] = s->heap_ids[left];
        mtp_sift(s->heap, s->heap_ids, left, 0);
        if (whole) {
            sum += mtp_exp(((double)v - (double)best) / s->temp);
            if (sum > u * total) {
                break;
            }
        } else if (k == m && s->top_p < 1.0) {
            sum += mtp_exp((double)v - (double)best);
            if (sum >= s->top_p * total) {
                break;
            }
        }
    }
    if (!whole) {
        if (s->top_p < 1.0) {
            sum = mtp_weights(s->sorted, got, best, 1.0, s->weights);
            total = k < m ? sum : total;
        }
        got = mtp_cut(s, s->sorted, s->weights, got, total);
    }
    sum = mtp_weights(s->sorted, got, best, s->temp, s->weights);
    return s->sorted_ids[mtp_draw(s, s->weights, got, whole ? total : sum, u)];
}

/* The token, -1 when the row has no finite logit, -2 when there is no memory. */
static int32_t mtp_sample(mtp_sampler *s, const char *row, int64_t n, uint64_t position)
{
    s->margin = 0.0;
    if (!(s->temp > 0.0)) {
        s->n_bad = mtp_scan(row, n, 2, s->list_ids, s->list, NULL);
        if (s->list_ids[0] >= 0) {
            s->margin = (double)s->list[0] - (double)s->list[1];
        }
        return s->list_ids[0];
    }
    const double u = mtp_uniform(s->seed, position);
    if (s->top_k < 1 || s->top_k > MTP_LIST) {
        return mtp_sample_heap(s, row, n, u);
    }
    int64_t m = s->top_k < n ? s->top_k : n;
    if (m == 0) {
        s->n_bad = 0;
        return -1;
    }
    s->n_bad = mtp_scan(row, n, (int)m, s->list_ids, s->list, NULL);
    while (m > 0 && s->list_ids[m - 1] < 0) {
        m--;
    }
    if (m == 0) {
        return -1;
    }
    double total = 0.0;
    if (s->top_p < 1.0) {
        total = mtp_weights(s->list, m, s->list[0], 1.0, s->list_weights);
    }
    m = mtp_cut(s, s->list, s->list_weights, m, total);
    total = mtp_weights(s->list, m, s->list[0], s->temp, s->list_weights);
    return s->list_ids[mtp_draw(s, s->list_weights, m, total, u)];
}

static void mtp_sampler_free(mtp_sampler *s)
{
    free(s->heap_ids);
    free(s->sorted_ids);
    free(s->heap);
    free(s->sorted);
    free(s->weights);
}

#endif
