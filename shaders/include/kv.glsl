// The KV cache's types. A row is one head of one cell; the row of (cell, head) starts at byte
// (cell * n_head + head) * kv_row_bytes(type, head_dim).
//   f32, f16   head_dim values
//   q8_0       blocks of 32: f16 scale d, then 32 int8 q; value = d * q. 34 bytes
//   q4_0       blocks of 32: f16 scale d, then 16 bytes, value i in the low half of byte i, value i + 16
//              in the high half; value = d * (q - 8). 18 bytes
// Rows of the last two are padded with zeros up to a whole block. As ggml has them (ggml-common.h).
const uint KV_F32 = 0;
const uint KV_F16 = 1;
const uint KV_Q8_0 = 2;
const uint KV_Q4_0 = 3;

const uint KV_BLOCK = 32;

uint kv_row_bytes(uint type, uint head_dim) {
    if (type == KV_F32) {
        return head_dim * 4;
    }
    if (type == KV_F16) {
        return head_dim * 2;
    }
    return (head_dim + KV_BLOCK - 1) / KV_BLOCK * (type == KV_Q8_0 ? 34 : 18);
}

float kv_half(uint bits) { return unpackHalf2x16(bits).x; }

// Four int8 of two 16-bit words.
vec4 kv_int8(uint lo, uint hi) {
    int word = int(lo | hi << 16);
    return vec4(bitfieldExtract(word, 0, 8), bitfieldExtract(word, 8, 8), bitfieldExtract(word, 16, 8),
        word >> 24);
}

// Four 4-bit values, the low halves of four bytes.
vec4 kv_int4(uint word) {
    return vec4(word & 15, (word >> 8) & 15, (word >> 16) & 15, (word >> 24) & 15) - 8.0;
}

// Where values i .. i+7 (i a multiple of 8) of the row at a byte are, in units of 16 bits: the scale of their
// block, and four units with the values, for kv_unpack8.
uvec2 kv_place8(uint type, uint row_byte, uint i) {
    bool q8 = type == KV_Q8_0;
    uint block = row_byte / 2 + i / KV_BLOCK * (q8 ? 17 : 9);
    return uvec2(block, block + 1 + (q8 ? i % KV_BLOCK : i % 16) / 2);
}

void kv_unpack8(uint type, uint i, uint scale, uvec4 w, out vec4 lo, out vec4 hi) {
    float d = kv_half(scale);
    if (type == KV_Q8_0) {
        lo = d * kv_int8(w.x, w.y);
        hi = d * kv_int8(w.z, w.w);
    } else {
        uint half_shift = i % KV_BLOCK / 16 * 4;
        lo = d * kv_int4((w.x | w.y << 16) >> half_shift);
        hi = d * kv_int4((w.z | w.w << 16) >> half_shift);
    }
}

// Defines NAME(row_byte, i, out lo, out hi): values i .. i+7 (i a multiple of 8) of the row at a byte.
// TYPE is a specialization constant. The buffer is bound three times, as vec4 V4[], uvec4 U4[] (16 bytes
// wide for aligned types) and uint16_t U16[].
#define KV_DECODER(NAME, TYPE, V4, U4, U16)                                                                \
    void NAME(uint row_byte, uint i, out vec4 lo, out vec4 hi) {                                           \
        if (TYPE == KV_F32) {                                                                              \
            uint at = row_byte / 16 + i / 4;                                                               \
            lo = V4[at];                                                                                   \
            hi = V4[at + 1];                                                                               \
        } else if (TYPE == KV_F16) {                                                                       \
            uvec4 w = U4[row_byte / 16 + i / 8];                                                           \
            lo = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));                                           \
            hi = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));                                           \
        } else {                                                                                           \
            uvec2 at = kv_place8(TYPE, row_byte, i);                                                       \
            uvec2 low = uvec2(uint(U16[at.y]), uint(U16[at.y + 1]));                                       \
            uvec2 high = uvec2(uint(U16[at.y + 2]), uint(U16[at.y + 3]));                                  \
            kv_unpack8(TYPE, i, uint(U16[at.x]), uvec4(low, high), lo, hi);                                \
        }                                                                                                  \
    }

// In two steps, so that many loads are on their way before the first is used: KV_LOADER defines
// NAME(row_byte, i, half), vec4 `half` of kv_raw_vecs(TYPE) with values i .. i+7 as they are; kv_decode8 takes
// the first and the last of them.
#define kv_raw_vecs(TYPE) ((TYPE) == KV_F32 ? 2u : 1u)

#define KV_LOADER(NAME, TYPE, U4, U16)                                                                     \
    uvec4 NAME(uint row_byte, uint i, uint half_of_8) {                                                    \
        if (TYPE == KV_F32) {                                                                              \
            return U4[row_byte / 16 + i / 4 + half_of_8];                                                  \
        }                                                                                                  \
        if (TYPE == KV_F16) {                                                                              \
            return U4[row_byte / 16 + i / 8];                                                              \
        }                                                                                                  \
        uvec2 at = kv_place8(TYPE, row_byte, i);                                                           \
        uint lo = uint(U16[at.y]) | uint(U16[at.y + 1]) << 16;                                             \
        uint hi = uint(U16[at.y + 2]) | uint(U16[at.y + 3]) << 16;                                         \
        return uvec4(lo, hi, uint(U16[at.x]), 0);                                                          \
    }

void kv_decode8(uint type, uint i, uvec4 first, uvec4 last, out vec4 lo, out vec4 hi) {
    if (type == KV_F32) {
        lo = uintBitsToFloat(first);
        hi = uintBitsToFloat(last);
    } else if (type == KV_F16) {
        lo = vec4(unpackHalf2x16(first.x), unpackHalf2x16(first.y));
        hi = vec4(unpackHalf2x16(first.z), unpackHalf2x16(first.w));
    } else {
        kv_unpack8(type, i, first.z, uvec4(first.x, 0, first.y, 0), lo, hi);
    }
}
