"""CRC-32 as zlib computes it (reflected 0xEDB88320), without the GIL.

Two ways to the same number.  Tables, sixteen bytes a step, are right everywhere and fast for short runs.  Where the
processor multiplies without carries (x86-64 with PCLMULQDQ), runs of 64 bytes and more are folded: four lanes of 128
bits walk over the data, each multiplied by the power of x that moves it 512 bits ahead, then they are folded into one
lane and that into 32 bits by Barrett's reduction.  The constants are such powers modulo the polynomial, bit-reflected;
tests/unit/kernel/test_crc.py computes them anew.  crc_init() fills the tables and tries the folding on known data: a
processor on which it gave another number would get the tables.

Each module that uses this has its own tables: call crc_init() once at its top.
"""
from libc.stdint cimport uint8_t, uint32_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    #define PK_CRC_FOLDS 1
    #include <immintrin.h>
    #endif

    static uint32_t pk_crc_table[16][256];
    static int pk_crc_folds = 0;

    #define PK_CRC_FOUR(word, top) ( \\
        pk_crc_table[top][(word) & 0xFF] ^ pk_crc_table[(top) - 1][((word) >> 8) & 0xFF] ^ \\
        pk_crc_table[(top) - 2][((word) >> 16) & 0xFF] ^ pk_crc_table[(top) - 3][(word) >> 24])

    /* c is the register: the complement of the CRC so far. */
    static inline uint32_t pk_crc_tables(uint32_t c, const unsigned char *p, size_t n) {
        uint32_t w[4];
        while (n >= 16) {
            memcpy(w, p, 16);
            w[0] ^= c;
            c = PK_CRC_FOUR(w[0], 15) ^ PK_CRC_FOUR(w[1], 11) ^ PK_CRC_FOUR(w[2], 7) ^ PK_CRC_FOUR(w[3], 3);
            p += 16;
            n -= 16;
        }
        if (n >= 8) {
            memcpy(w, p, 8);
            w[0] ^= c;
            c = PK_CRC_FOUR(w[0], 7) ^ PK_CRC_FOUR(w[1], 3);
            p += 8;
            n -= 8;
        }
        if (n >= 4) {
            memcpy(w, p, 4);
            w[0] ^= c;
            c = PK_CRC_FOUR(w[0], 3);
            p += 4;
            n -= 4;
        }
        while (n--) c = (c >> 8) ^ pk_crc_table[0][(c ^ *p++) & 0xFF];
        return c;
    }

    #ifdef PK_CRC_FOLDS
    #define PK_CRC_AT(p) _mm_loadu_si128((const __m128i *)(p))
    #define PK_CRC_FOLD(lane, by, next) _mm_xor_si128(_mm_xor_si128( \\
        _mm_clmulepi64_si128(lane, by, 0x00), _mm_clmulepi64_si128(lane, by, 0x11)), next)

    /* n is at least 64; what does not fill 16 bytes at the end goes through the tables. */
    __attribute__((target("pclmul,sse4.1")))
    static uint32_t pk_crc_folded(uint32_t c, const unsigned char *p, size_t n) {
        const __m128i by512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
        const __m128i by128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
        const __m128i by64 = _mm_set_epi64x(0, 0x163cd6124);
        const __m128i poly = _mm_set_epi64x(0x1f7011641, 0x1db710641);
        const __m128i low = _mm_set_epi32(0, -1, 0, -1);
        __m128i a = _mm_xor_si128(PK_CRC_AT(p), _mm_cvtsi32_si128((int)c));
        __m128i b = PK_CRC_AT(p + 16), d = PK_CRC_AT(p + 32), e = PK_CRC_AT(p + 48), t;
        p += 64;
        n -= 64;
        while (n >= 64) {
            a = PK_CRC_FOLD(a, by512, PK_CRC_AT(p));
            b = PK_CRC_FOLD(b, by512, PK_CRC_AT(p + 16));
            d = PK_CRC_FOLD(d, by512, PK_CRC_AT(p + 32));
            e = PK_CRC_FOLD(e, by512, PK_CRC_AT(p + 48));
            p += 64;
            n -= 64;
        }
        a = PK_CRC_FOLD(a, by128, b);
        a = PK_CRC_FOLD(a, by128, d);
        a = PK_CRC_FOLD(a, by128, e);
        while (n >= 16) {
            a = PK_CRC_FOLD(a, by128, PK_CRC_AT(p));
            p += 16;
            n -= 16;
        }
        a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by128, 0x10));
        t = _mm_srli_si128(a, 4);
        a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), by64, 0x00), t);
        t = _mm_clmulepi64_si128(_mm_and_si128(a, low), poly, 0x10);
        t = _mm_clmulepi64_si128(_mm_and_si128(t, low), poly, 0x00);
        c = (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, t), 1);
        return n ? pk_crc_tables(c, p, n) : c;
    }
    #endif

    static inline uint32_t pk_crc32(uint32_t crc, const unsigned char *p, size_t n) {
    #ifdef PK_CRC_FOLDS
        if (n >= 64 && pk_crc_folds) return ~pk_crc_folded(~crc, p, n);
    #endif
        return ~pk_crc_tables(~crc, p, n);
    }

    static void pk_crc_init(void) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ ((c & 1) ? 0xEDB88320u : 0u);
            pk_crc_table[0][i] = c;
        }
        for (int step = 1; step < 16; step++)
            for (uint32_t i = 0; i < 256; i++) {
                uint32_t before = pk_crc_table[step - 1][i];
                pk_crc_table[step][i] = (before >> 8) ^ pk_crc_table[0][before & 0xFF];
            }
    #ifdef PK_CRC_FOLDS
        __builtin_cpu_init();
        if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
            unsigned char known[257];
            int same = 1;
            for (int i = 0; i < 257; i++) known[i] = (unsigned char)(i * 131 + (i >> 3));
            for (size_t n = 64; n <= 257; n++)
                same &= pk_crc_folded(0x2545F491u, known, n) == pk_crc_tables(0x2545F491u, known, n);
            pk_crc_folds = same;
        }
    #endif
    }
    """
    void crc_init "pk_crc_init"() noexcept nogil
    uint32_t crc32 "pk_crc32"(uint32_t crc, const unsigned char *p, size_t n) noexcept nogil
