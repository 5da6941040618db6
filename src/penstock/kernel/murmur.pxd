"""MurmurHash3_x64_128, seed 0: the hash of the fold's index and of its digest."""
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline uint64_t pk_rotl(uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }
    static inline uint64_t pk_fmix(uint64_t k) {
        k ^= k >> 33; k *= 0xff51afd7ed558ccdULL;
        k ^= k >> 33; k *= 0xc4ceb9fe1a85ec53ULL;
        return k ^ (k >> 33);
    }
    static void pk_murmur(const unsigned char *p, size_t n, uint64_t *out) {
        const uint64_t c1 = 0x87c37b91114253d5ULL, c2 = 0x4cf5ad432745937fULL;
        uint64_t a = 0, b = 0, k[2];
        size_t left = n;
        for (; left >= 16; left -= 16, p += 16) {
            memcpy(k, p, 16);
            a ^= pk_rotl(k[0] * c1, 31) * c2;
            a = (pk_rotl(a, 27) + b) * 5 + 0x52dce729;
            b ^= pk_rotl(k[1] * c2, 33) * c1;
            b = (pk_rotl(b, 31) + a) * 5 + 0x38495ab5;
        }
        k[0] = k[1] = 0;
        memcpy(k, p, left);
        b ^= pk_rotl(k[1] * c2, 33) * c1;  /* zero words change nothing */
        a ^= pk_rotl(k[0] * c1, 31) * c2;
        a ^= n; b ^= n;
        a += b; b += a;
        a = pk_fmix(a); b = pk_fmix(b);
        a += b; b += a;
        out[0] = a; out[1] = b;
    }
    """
    void murmur "pk_murmur"(const unsigned char *p, size_t n, uint64_t *out) noexcept nogil
