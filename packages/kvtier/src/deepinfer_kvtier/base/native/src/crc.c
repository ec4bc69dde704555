/* CRC-32 as zlib computes it, eight bytes at a time. */
#include "native.h"

#include <string.h>

static uint32_t table[8][256];

void make_crc_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (value & 1 ? 0xEDB88320U : 0);
        table[0][i] = value;
    }
    for (int row = 1; row < 8; row++)
        for (int i = 0; i < 256; i++)
            table[row][i] = table[row - 1][i] >> 8 ^ table[0][table[row - 1][i] & 0xFF];
}

uint32_t crc_of(const uint8_t *data, size_t length)
{
    uint32_t crc = ~0U;
    for (; length >= 8; data += 8, length -= 8) {
        uint8_t eight[8];
        memcpy(eight, data, 8);
        for (int i = 0; i < 4; i++)
            eight[i] ^= (uint8_t)(crc >> 8 * i);
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= table[7 - i][eight[i]];
    }
    for (; length; data++, length--)
        crc = crc >> 8 ^ table[0][(crc ^ *data) & 0xFF];
    return ~crc;
}
