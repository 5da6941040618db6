"""Loads and stores whose order other processes rely on, and little-endian words.

A single byte is what the processes meet at: whoever reads 1 with acquire sees everything that was
stored before the 1 was stored with release.  Everything else is plain memory, which a process that is not trusted may
change at any time: lengths are loaded once, checked, and used as they were loaded.  Little-endian hosts only.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, int64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "penstock's kernel runs on little-endian hosts only"
    #endif
    static inline uint8_t pk_load_acquire(const unsigned char *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void pk_store_release(unsigned char *p, uint8_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    /* aligned words of the channel header: each is one store, never torn */
    static inline uint64_t pk_load_word(const unsigned char *p) {
        return __atomic_load_n((const uint64_t *)p, __ATOMIC_ACQUIRE); }
    static inline void pk_store_word(unsigned char *p, uint64_t v) {
        __atomic_store_n((uint64_t *)p, v, __ATOMIC_RELEASE); }
    /* one load each, at any address: what was checked is what is used, though someone may write there meanwhile */
    typedef struct { uint16_t v; } __attribute__((packed, may_alias)) pk_u16;
    typedef struct { uint32_t v; } __attribute__((packed, may_alias)) pk_u32;
    typedef struct { uint64_t v; } __attribute__((packed, may_alias)) pk_u64;
    static inline uint16_t pk_get16(const unsigned char *p) { return ((const volatile pk_u16 *)p)->v; }
    static inline uint32_t pk_get32(const unsigned char *p) { return ((const volatile pk_u32 *)p)->v; }
    static inline uint64_t pk_get64(const unsigned char *p) { return ((const volatile pk_u64 *)p)->v; }
    static inline uint8_t pk_get8(const unsigned char *p) { return *(const volatile uint8_t *)p; }
    static inline void pk_put64(unsigned char *p, uint64_t v) { memcpy(p, &v, 8); }
    static inline void pk_pause(void) {
    #if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ __volatile__("yield");
    #endif
    }
    """
    uint8_t load_acquire "pk_load_acquire"(const unsigned char *p) noexcept nogil
    void store_release "pk_store_release"(unsigned char *p, uint8_t v) noexcept nogil
    uint64_t load_word "pk_load_word"(const unsigned char *p) noexcept nogil
    void store_word "pk_store_word"(unsigned char *p, uint64_t v) noexcept nogil
    uint8_t get8 "pk_get8"(const unsigned char *p) noexcept nogil
    uint16_t get16 "pk_get16"(const unsigned char *p) noexcept nogil
    uint32_t get32 "pk_get32"(const unsigned char *p) noexcept nogil
    uint64_t get64 "pk_get64"(const unsigned char *p) noexcept nogil
    void put64 "pk_put64"(unsigned char *p, uint64_t v) noexcept nogil
    void pause "pk_pause"() noexcept nogil
