"""CRC-32 as zlib computes it (reflected 0xEDB88320), sixteen bytes a step, without the GIL.

The tables are filled when a module that uses them is imported: call crc_init() once at its top.
"""
from libc.stdint cimport uint8_t, uint32_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static uint32_t pk_crc_table[16][256];
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
    }
    static uint32_t pk_crc32(uint32_t crc, const unsigned char *p, size_t n) {
        uint32_t c = ~crc;
        while (n >= 16) {
            uint32_t w[4];
            memcpy(w, p, 16);
            w[0] ^= c;
            c = 0;
            for (int word = 0; word < 4; word++)
                for (int byte = 0; byte < 4; byte++)
                    c ^= pk_crc_table[15 - 4 * word - byte][(w[word] >> (8 * byte)) & 0xFF];
            p += 16;
            n -= 16;
        }
        while (n--) c = (c >> 8) ^ pk_crc_table[0][(c ^ *p++) & 0xFF];
        return ~c;
    }
    """
    void crc_init "pk_crc_init"() noexcept nogil
    uint32_t crc32 "pk_crc32"(uint32_t crc, const unsigned char *p, size_t n) noexcept nogil
