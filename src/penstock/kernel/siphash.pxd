"""SipHash-1-3 under a key that every process makes for itself: the hash of the fold's index.

Who chooses the keys of a log must not be able to choose where they fall in a table.
"""
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #define PK_SIP_ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
    #define PK_SIP_ROUND do { \\
        v0 += v1; v1 = PK_SIP_ROTL(v1, 13); v1 ^= v0; v0 = PK_SIP_ROTL(v0, 32); \\
        v2 += v3; v3 = PK_SIP_ROTL(v3, 16); v3 ^= v2; \\
        v0 += v3; v3 = PK_SIP_ROTL(v3, 21); v3 ^= v0; \\
        v2 += v1; v1 = PK_SIP_ROTL(v1, 17); v1 ^= v2; v2 = PK_SIP_ROTL(v2, 32); } while (0)

    static inline uint64_t pk_siphash(const uint64_t *key, const unsigned char *p, size_t n) {
        uint64_t v0 = key[0] ^ 0x736f6d6570736575ULL, v1 = key[1] ^ 0x646f72616e646f6dULL;
        uint64_t v2 = key[0] ^ 0x6c7967656e657261ULL, v3 = key[1] ^ 0x7465646279746573ULL;
        uint64_t word, last = (uint64_t)n << 56;
        size_t left = n;
        for (; left >= 8; left -= 8, p += 8) {
            memcpy(&word, p, 8);
            v3 ^= word; PK_SIP_ROUND; v0 ^= word;
        }
        word = 0;
        memcpy(&word, p, left);
        last |= word;
        v3 ^= last; PK_SIP_ROUND; v0 ^= last;
        v2 ^= 0xff;
        PK_SIP_ROUND; PK_SIP_ROUND; PK_SIP_ROUND;
        return v0 ^ v1 ^ v2 ^ v3;
    }
    """
    uint64_t siphash "pk_siphash"(const uint64_t *key, const unsigned char *p, size_t n) noexcept nogil
