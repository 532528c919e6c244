/* The row scan for one instruction set; included by _kernel.h once for each, with
 * MTP_ISA (its name), MTP_W (floats per vector, a divisor of 16) and MTP_TARGET defined.
 *
 * The vectors only change how many of the fixed lanes are handled by one instruction. */

#define MTP_PASTE2(a, b) a##b
#define MTP_PASTE(a, b) MTP_PASTE2(a, b)
#define MTP_NAME(x) MTP_PASTE(MTP_PASTE(x, _), MTP_ISA)
#define MTP_V MTP_NAME(mtp_v)
#define MTP_VI MTP_NAME(mtp_vi)
#define MTP_PER16 (16 / MTP_W)
#define MTP_PER64 (64 / MTP_W)
#define MTP_ALL ((1u << MTP_W) - 1)

#if defined(__GNUC__) && !defined(MTPSTATS_SCALAR)
typedef float MTP_V __attribute__((vector_size(4 * MTP_W)));
typedef int32_t MTP_VI __attribute__((vector_size(4 * MTP_W)));
#define MTP_ADD(a, b) ((a) + (b))
#define MTP_SUB(a, b) ((a) - (b))
#define MTP_MUL(a, b) ((a) * (b))

/* a * b + c, rounded once */
MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_fma)(MTP_V a, MTP_V b, MTP_V c)
{
#if MTP_X86 && MTP_W == 16
    return (MTP_V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif MTP_X86 && MTP_W == 8
    return (MTP_V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < MTP_W; i++) {
        c[i] = mtp_fmaf(a[i], b[i], c[i]);
    }
    return c;
#endif
}

MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_set)(float x)
{
    MTP_V v;
    for (int i = 0; i < MTP_W; i++) {
        v[i] = x;
    }
    return v;
}

/* x > y ? x : y in each lane; y where x is NaN */
MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_max)(MTP_V x, MTP_V y)
{
#if MTP_X86 && MTP_W == 16
    return (MTP_V)_mm512_max_ps((__m512)x, (__m512)y);
#elif MTP_X86 && MTP_W == 8
    return (MTP_V)_mm256_max_ps((__m256)x, (__m256)y);
#elif MTP_X86
    return (MTP_V)_mm_max_ps((__m128)x, (__m128)y);
#else
    MTP_VI m = (MTP_VI)(x > y);
    return (MTP_V)((m & (MTP_VI)x) | (~m & (MTP_VI)y));
#endif
}

/* x < y ? x : y in each lane */
MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_min)(MTP_V x, MTP_V y)
{
#if MTP_X86 && MTP_W == 16
    return (MTP_V)_mm512_min_ps((__m512)x, (__m512)y);
#elif MTP_X86 && MTP_W == 8
    return (MTP_V)_mm256_min_ps((__m256)x, (__m256)y);
#elif MTP_X86
    return (MTP_V)_mm_min_ps((__m128)x, (__m128)y);
#else
    MTP_VI m = (MTP_VI)(x < y);
    return (MTP_V)((m & (MTP_VI)x) | (~m & (MTP_VI)y));
#endif
}

/* bit i: x[i] <= y[i] */
MTP_TARGET MTP_INLINE uint32_t MTP_NAME(mtp_le)(MTP_V x, MTP_V y)
{
#if MTP_X86 && MTP_W == 16
    return (uint32_t)_mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_LE_OQ);
#elif MTP_X86 && MTP_W == 8
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)y, _CMP_LE_OQ));
#elif MTP_X86
    return (uint32_t)_mm_movemask_ps(_mm_cmple_ps((__m128)x, (__m128)y));
#else
    MTP_VI m = (MTP_VI)(x <= y);
    uint32_t bits = 0;
    for (int i = 0; i < MTP_W; i++) {
        bits |= (uint32_t)(m[i] & 1) << i;
    }
    return bits;
#endif
}

/* 2**n as a factor: adds n, an integer held in the low bits of magic, to the exponent of p */
MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_scale)(MTP_V p, MTP_V magic)
{
    return (MTP_V)((MTP_VI)p + ((MTP_VI)magic << 23));
}
#else /* any C compiler: the same lanes, one at a time */
typedef struct { float f[MTP_W]; } MTP_V;
typedef struct { int32_t i[MTP_W]; } MTP_VI;
#define MTP_EACH(expression) \
    for (int i = 0; i < MTP_W; i++) { expression; }
MTP_INLINE MTP_V MTP_NAME(mtp_add)(MTP_V a, MTP_V b) { MTP_EACH(a.f[i] += b.f[i]) return a; }
MTP_INLINE MTP_V MTP_NAME(mtp_sub)(MTP_V a, MTP_V b) { MTP_EACH(a.f[i] -= b.f[i]) return a; }
MTP_INLINE MTP_V MTP_NAME(mtp_mul)(MTP_V a, MTP_V b) { MTP_EACH(a.f[i] *= b.f[i]) return a; }
#define MTP_ADD(a, b) MTP_NAME(mtp_add)(a, b)
#define MTP_SUB(a, b) MTP_NAME(mtp_sub)(a, b)
#define MTP_MUL(a, b) MTP_NAME(mtp_mul)(a, b)
MTP_INLINE MTP_V MTP_NAME(mtp_set)(float x) { MTP_V v; MTP_EACH(v.f[i] = x) return v; }
MTP_INLINE MTP_V MTP_NAME(mtp_max)(MTP_V x, MTP_V y)
{
    MTP_EACH(x.f[i] = x.f[i] > y.f[i] ? x.f[i] : y.f[i])
    return x;
}
MTP_INLINE uint32_t MTP_NAME(mtp_le)(MTP_V x, MTP_V y)
{
    uint32_t bits = 0;
    MTP_EACH(bits |= (uint32_t)(x.f[i] <= y.f[i]) << i)
    return bits;
}
MTP_INLINE MTP_V MTP_NAME(mtp_min)(MTP_V x, MTP_V y)
{
    MTP_EACH(x.f[i] = x.f[i] < y.f[i] ? x.f[i] : y.f[i])
    return x;
}
MTP_INLINE MTP_V MTP_NAME(mtp_fma)(MTP_V a, MTP_V b, MTP_V c)
{
    MTP_EACH(c.f[i] = mtp_fmaf(a.f[i], b.f[i], c.f[i]))
    return c;
}
MTP_INLINE MTP_V MTP_NAME(mtp_scale)(MTP_V p, MTP_V magic)
{
    for (int i = 0; i < MTP_W; i++) {
        uint32_t a, b;
        memcpy(&a, &p.f[i], sizeof a);
        memcpy(&b, &magic.f[i], sizeof b);
        a += b << 23;
        memcpy(&p.f[i], &a, sizeof a);
    }
    return p;
}
#undef MTP_EACH
#endif

MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_load)(const char *p)
{
    MTP_V v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* exp(x) for -87 <= x <= 0, to 2e-7; exactly 1 at 0. */
MTP_TARGET MTP_INLINE MTP_V MTP_NAME(mtp_expf)(MTP_V x)
{
    /* adding 1.5 * 2**23 leaves the nearest integer in the low bits */
    const MTP_V shift = MTP_NAME(mtp_set)(12582912.0f);
    const MTP_V magic = MTP_NAME(mtp_fma)(x, MTP_NAME(mtp_set)(1.44269504f), shift);
    const MTP_V minus_n = MTP_SUB(shift, magic);
    /* r = x - n log 2, |r| <= 0.347, with log 2 in two parts */
    MTP_V r = MTP_NAME(mtp_fma)(minus_n, MTP_NAME(mtp_set)(0.693359375f), x);
    r = MTP_NAME(mtp_fma)(minus_n, MTP_NAME(mtp_set)(-2.12194440e-4f), r);
    /* exp(r) = 1 + r + r**2 (low + r**2 high), fitted for the least relative error */
    const MTP_V high = MTP_NAME(mtp_fma)(r, MTP_NAME(mtp_set)(8.312478e-3f),
                                         MTP_NAME(mtp_set)(4.189055e-2f));
    const MTP_V low = MTP_NAME(mtp_fma)(r, MTP_NAME(mtp_set)(1.6667116e-1f),
                                        MTP_NAME(mtp_set)(4.9999228e-1f));
    const MTP_V r2 = MTP_MUL(r, r);
    const MTP_V p = MTP_NAME(mtp_fma)(MTP_NAME(mtp_fma)(high, r2, low), r2,
                                      MTP_ADD(r, MTP_NAME(mtp_set)(1.0f)));
    return MTP_NAME(mtp_scale)(p, magic);
}

/* Sum of exp(x - ref) over whole blocks, to 1e-6; no entry is above ref. 64 lanes, one for each
 * place in a block, are added up in single precision. */
MTP_TARGET static double MTP_NAME(mtp_sum_exp)(const char *p, int blocks, float ref)
{
    const MTP_V m = MTP_NAME(mtp_set)(ref), lowest = MTP_NAME(mtp_set)(-87.0f);
    float lane[MTP_BLOCK];
    /* One vector at a time: its constants just fit the registers, and the processor overlaps the
     * steps of the next ones by itself. */
    for (int part = 0; part < MTP_BLOCK; part += MTP_W) {
        MTP_V acc = MTP_NAME(mtp_set)(0.0f);
        const char *at = p + 4 * (size_t)part;
        for (int left = blocks; left > 0; left -= MTP_GROUP) {
            const int n = left < MTP_GROUP ? left : MTP_GROUP;
            MTP_V some = MTP_NAME(mtp_set)(0.0f);
            for (int b = 0; b < n; b++, at += 4 * MTP_BLOCK) {
                const MTP_V x = MTP_SUB(MTP_NAME(mtp_load)(at), m);
                /* a NaN becomes -87 as well: 1e-38 beside the largest term, which is 1 */
                some = MTP_ADD(some, MTP_NAME(mtp_expf)(MTP_NAME(mtp_max)(x, lowest)));
            }
            acc = MTP_ADD(acc, some);
        }
        memcpy(lane + part, &acc, sizeof acc);
    }
    return mtp_add_up(lane);
}

/* Sum of exp(min(a - a_lse, b - b_lse)) over whole blocks, no term above 1 by more than rounding;
 * in lanes as mtp_sum_exp. The lse are sums of two floats, so that large ones lose nothing. */
MTP_TARGET static double MTP_NAME(mtp_overlap)(const char *a, const char *b, int blocks,
                                               const float *a_lse, const float *b_lse)
{
    const MTP_V la = MTP_NAME(mtp_set)(a_lse[0]), ra = MTP_NAME(mtp_set)(a_lse[1]);
    const MTP_V lb = MTP_NAME(mtp_set)(b_lse[0]), rb = MTP_NAME(mtp_set)(b_lse[1]);
    const MTP_V lowest = MTP_NAME(mtp_set)(-87.0f);
    float lane[MTP_BLOCK];
    for (int part = 0; part < MTP_BLOCK; part += MTP_W) {
        MTP_V acc = MTP_NAME(mtp_set)(0.0f);
        for (int i = 0; i < blocks; i++) {
            const size_t at = 4 * ((size_t)part + MTP_BLOCK * (size_t)i);
            const MTP_V x = MTP_SUB(MTP_SUB(MTP_NAME(mtp_load)(a + at), la), ra);
            const MTP_V y = MTP_SUB(MTP_SUB(MTP_NAME(mtp_load)(b + at), lb), rb);
            const MTP_V least = MTP_NAME(mtp_max)(MTP_NAME(mtp_min)(x, y), lowest);
            acc = MTP_ADD(acc, MTP_NAME(mtp_expf)(least));
        }
        memcpy(lane + part, &acc, sizeof acc);
    }
    return mtp_add_up(lane);
}

/* Offers a chunk's entries above the worst kept, ids ascending. top: the largest entry in each of
 * 64 lanes, one for each place in a block. */
MTP_TARGET static void MTP_NAME(mtp_offer)(const char *p, int blocks, int32_t first, int k,
                                           int32_t *ids, float *logits, const MTP_V *top)
{
    float lane[MTP_BLOCK], bar = logits[k - 1];
    uint64_t lanes = 0, where = 0;
    memcpy(lane, top, sizeof lane);
    for (int j = 0; j < MTP_PER64; j++) {
        lanes |= (uint64_t)MTP_NAME(mtp_le)(top[j], MTP_NAME(mtp_set)(bar)) << (MTP_W * j);
    }
    lanes = ~lanes;
    if (mtp_at_most(lanes, 4)) {
        /* the usual case: look for the blocks along these lanes only */
        for (; lanes; lanes &= lanes - 1) {
            const char *at = p + 4 * mtp_lowest(lanes);
            for (int b = 0; b < blocks; b++, at += 4 * MTP_BLOCK) {
                float v;
                memcpy(&v, at, sizeof v);
                where |= (uint64_t)(v > bar) << b;
            }
        }
    } else {
        /* An ascending row would insert every entry. With k lanes above the worst kept, the k-th
         * of them is a bar that the chunk's k best reach. +inf is no candidate and sets none. */
        where = ~(uint64_t)0 >> (64 - blocks);
        float t = -INFINITY;
        if (k <= 16) {
            for (int i = 0; i < 16; i++) {
                float a = lane[i] > lane[i + 16] ? lane[i] : lane[i + 16];
                float c = lane[i + 32] > lane[i + 48] ? lane[i + 32] : lane[i + 48];
                lane[i] = a > c ? a : c;
            }
            t = mtp_kth(lane, 16, k);
        } else if (k <= MTP_BLOCK) {
            t = mtp_kth(lane, MTP_BLOCK, k);
        }
        int infinite = 0;
        for (int i = 0; i < MTP_BLOCK; i++) {
            infinite |= lane[i] > FLT_MAX;
        }
        bar = t > bar && !infinite ? t : bar;
    }
    for (; where; where &= where - 1) {
        const int b = mtp_lowest(where);
        const char *block = p + 4 * MTP_BLOCK * b;
        const float least = bar > logits[k - 1] ? bar : logits[k - 1];
        uint64_t bits = 0;
        for (int j = 0; j < MTP_PER64; j++) {
            /* at or above: an entry that equals the bar belongs to the k best */
            bits |= (uint64_t)MTP_NAME(mtp_le)(MTP_NAME(mtp_set)(least),
                                               MTP_NAME(mtp_load)(block + 4 * MTP_W * j))
                << (MTP_W * j);
        }
        for (; bits; bits &= bits - 1) {
            const int i = mtp_lowest(bits);
            float v;
            memcpy(&v, block + 4 * i, sizeof v);
            if (v > logits[k - 1] && v <= FLT_MAX) {
                mtp_keep(k, ids, logits, first + MTP_BLOCK * b + i, v);
            }
        }
    }
}

/* The largest entry in each of 64 lanes over whole blocks, NaN left out, and their overall largest
 * (in each lane of all). Returns 0 only if every entry is finite. */
MTP_TARGET static int MTP_NAME(mtp_top)(const char *p, int blocks, MTP_V *top, MTP_V *all)
{
    MTP_V t[MTP_PER64], sum[3];
    for (int j = 0; j < MTP_PER64; j++) {
        t[j] = MTP_NAME(mtp_set)(-INFINITY);
    }
    for (int j = 0; j < 3; j++) {
        sum[j] = MTP_NAME(mtp_set)(0.0f);
    }
    for (const char *end = p + 4 * MTP_BLOCK * (size_t)blocks; p < end; p += 4 * MTP_BLOCK) {
        for (int j = 0; j < MTP_PER64; j++) {
            const MTP_V x = MTP_NAME(mtp_load)(p + 4 * MTP_W * (size_t)j);
            t[j] = MTP_NAME(mtp_max)(x, t[j]);
            /* a NaN or an infinity survives in a sum, so one addition finds both */
            sum[j % 3] = MTP_ADD(sum[j % 3], x);
        }
    }
    memcpy(top, t, sizeof t);
    for (int n = MTP_PER64 / 2; n; n /= 2) {
        for (int j = 0; j < n; j++) {
            t[j] = MTP_NAME(mtp_max)(t[j + n], t[j]);
        }
    }
    *all = t[0];
    for (int j = 1; j < 3; j++) {
        sum[0] = MTP_ADD(sum[0], sum[j]);
    }
    sum[0] = MTP_SUB(sum[0], sum[0]);
    return MTP_NAME(mtp_le)(sum[0], MTP_NAME(mtp_set)(0.0f)) != MTP_ALL;
}

/* mtp_sum_exp for blocks that hold NaN or infinities, which add nothing. */
MTP_TARGET static double MTP_NAME(mtp_sum_exp_clean)(const char *p, int blocks, float ref)
{
    double total = 0.0;
    float clean[MTP_BLOCK];
    for (int b = 0; b < blocks; b++, p += sizeof clean) {
        memcpy(clean, p, sizeof clean);
        for (int i = 0; i < MTP_BLOCK; i++) {
            clean[i] = clean[i] <= FLT_MAX ? clean[i] : -INFINITY;
        }
        total += MTP_NAME(mtp_sum_exp)((const char *)clean, 1, ref);
    }
    return total;
}

MTP_TARGET static int64_t MTP_NAME(mtp_scan)(const char *row, int64_t n, int k, int32_t *ids,
                                             float *logits, double *sum)
{
    float tail[MTP_BLOCK], ref = -INFINITY;
    int64_t n_bad = 0;
    double total = 0.0;
    for (int i = 0; i < k; i++) {
        ids[i] = -1;
        logits[i] = -INFINITY;
    }
    for (int64_t at = 0; at < n;) {
        const char *p = row + 4 * at;
        const int64_t left = n - at;
        int blocks = (int)(left < MTP_CHUNK ? left / MTP_BLOCK : MTP_CHUNK / MTP_BLOCK);
        int64_t step = MTP_BLOCK * (int64_t)blocks;
        if (blocks == 0) { /* the last entries, filled up to a block by masked tokens */
            for (int i = 0; i < MTP_BLOCK; i++) {
                tail[i] = -INFINITY;
            }
            memcpy(tail, p, 4 * (size_t)left);
            p = (const char *)tail;
            blocks = 1;
            step = left;
        }
        MTP_V top[MTP_PER64], all;
        int64_t bad = 0;
        if (MTP_RARE(MTP_NAME(mtp_top)(p, blocks, top, &all))) {
            bad = mtp_count_bad(p, MTP_BLOCK * blocks);
            n_bad += bad;
        }
        /* not all at or below the worst kept; there is no NaN among them */
        if (MTP_NAME(mtp_le)(all, MTP_NAME(mtp_set)(logits[k - 1])) != MTP_ALL) {
            MTP_NAME(mtp_offer)(p, blocks, (int32_t)at, k, ids, logits, top);
        }
        if (sum && logits[0] > -INFINITY) {
            if (logits[0] > ref) {
                total *= mtp_exp((double)ref - (double)logits[0]);
                ref = logits[0];
            }
            total += MTP_RARE(bad) ? MTP_NAME(mtp_sum_exp_clean)(p, blocks, ref)
                                   : MTP_NAME(mtp_sum_exp)(p, blocks, ref);
        }
        at += step;
    }
    if (sum) {
        *sum = total;
    }
    return n_bad;
}

#undef MTP_ISA
#undef MTP_W
#undef MTP_TARGET
#undef MTP_NAME
#undef MTP_PASTE
#undef MTP_PASTE2
#undef MTP_V
#undef MTP_VI
#undef MTP_PER16
#undef MTP_PER64
#undef MTP_ALL
#undef MTP_ADD
#undef MTP_SUB
#undef MTP_MUL
