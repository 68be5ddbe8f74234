// Keys and values in the cache's types (kv.glsl). The bytes are those of ggml's quantize_row_q8_0_ref and
// quantize_row_q4_0_ref on every device: divisions and roundings that GLSL leaves open are done here by
// hand. A unit is a block of 32 for q8_0 and q4_0, else one value.
//
// The includer defines
//   float kv_value(uint row, uint i)          what is stored, 0 past the row's end
//   void kv_keep(uint row, uint i, float v)   what the cache then has of it; i may be past the row's end
//   void kv_put(uint at, uint half_word)      a 16-bit word of the cache
//   void kv_put_f32(uint at, float v)         a word of the cache
float kv_value(uint row, uint i);
void kv_keep(uint row, uint i, float v);
void kv_put(uint at, uint half_word);
void kv_put_f32(uint at, float v);

// The nearest f16, ties to even.
uint half_bits(float v) {
    uint bits = floatBitsToUint(v);
    uint sign = bits >> 16 & 0x8000;
    uint magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        return sign | (magnitude > 0x7f800000u ? 0x7e00 : 0x7c00);
    }
    if (magnitude >= 0x477ff000u) { // rounds to 65536 or more
        return sign | 0x7c00;
    }
    if (magnitude >= 0x38800000u) { // a normal f16
        uint even = magnitude >> 13 & 1;
        return sign | (magnitude - 0x38000000u + 0xfff + even) >> 13;
    }
    uint shift = 126 - (magnitude >> 23); // f16 subnormals count 2^-24
    if (shift > 24) {
        return sign;
    }
    uint mantissa = (magnitude & 0x7fffff) | 0x800000;
    uint even = mantissa >> shift & 1;
    return sign | (mantissa + (1u << (shift - 1)) - 1 + even) >> shift;
}

// a / 127, rounded to nearest: 127 q is an exact difference.
float divided_by_127(float a) {
    precise float q = a / 127.0;
    precise float rest = (a - q * 128.0) + q;
    precise float exact = q + rest * (1.0 / 127.0);
    return exact;
}

// 1 / d, rounded to nearest: the product d q in two exact parts (Dekker).
float reciprocal(float d) {
    precise float q = 1.0 / d;
    precise float d_hi = uintBitsToFloat(floatBitsToUint(d) & 0xfffff000u);
    precise float q_hi = uintBitsToFloat(floatBitsToUint(q) & 0xfffff000u);
    precise float d_lo = d - d_hi;
    precise float q_lo = q - q_hi;
    precise float rest = (((1.0 - d_hi * q_hi) - d_hi * q_lo) - d_lo * q_hi) - d_lo * q_lo;
    precise float exact = q + q * rest;
    return d == 0.0 ? 0.0 : exact;
}

// Nearest integer, halves away from zero.
int round_away(float v) {
    float whole = trunc(v);
    return int(whole) + (abs(v - whole) >= 0.5 ? (v < 0.0 ? -1 : 1) : 0);
}

void encode_q8_0(uint row, uint first, uint to) {
    float most = 0.0;
    for (uint i = 0; i < KV_BLOCK; ++i) {
        most = max(most, abs(kv_value(row, first + i)));
    }
    float d = divided_by_127(most);
    float inverse = reciprocal(d);
    uint d_bits = half_bits(d);
    kv_put(to, d_bits);
    for (uint i = 0; i < KV_BLOCK; i += 2) {
        precise float a = kv_value(row, first + i) * inverse;
        precise float b = kv_value(row, first + i + 1) * inverse;
        ivec2 q = ivec2(round_away(a), round_away(b));
        kv_put(to + 1 + i / 2, (q.x & 0xff) | (q.y & 0xff) << 8);
        kv_keep(row, first + i, kv_half(d_bits) * float(q.x));
        kv_keep(row, first + i + 1, kv_half(d_bits) * float(q.y));
    }
}

uint int4(float v, float inverse) {
    precise float scaled = v * inverse;
    precise float moved = scaled + 8.5;
    return uint(min(15, int(moved)));
}

void encode_q4_0(uint row, uint first, uint to) {
    float most = 0.0; // the value furthest from 0, with its sign
    for (uint i = 0; i < KV_BLOCK; ++i) {
        float v = kv_value(row, first + i);
        most = abs(most) < abs(v) ? v : most;
    }
    float d = most * -0.125;
    float inverse = reciprocal(d);
    uint d_bits = half_bits(d);
    kv_put(to, d_bits);
    for (uint i = 0; i < KV_BLOCK / 2; i += 2) {
        uint word = 0;
        [[unroll]] for (uint j = 0; j < 2; ++j) {
            uint lo = int4(kv_value(row, first + i + j), inverse);
            uint hi = int4(kv_value(row, first + i + j + KV_BLOCK / 2), inverse);
            word |= (lo | hi << 4) << (8 * j);
            kv_keep(row, first + i + j, kv_half(d_bits) * (float(int(lo)) - 8.0));
            kv_keep(row, first + i + j + KV_BLOCK / 2, kv_half(d_bits) * (float(int(hi)) - 8.0));
        }
        kv_put(to + 1 + i / 2, word);
    }
}

uint kv_row_units(uint type, uint head_dim) {
    bool blocks = type == KV_Q8_0 || type == KV_Q4_0;
    return blocks ? (head_dim + KV_BLOCK - 1) / KV_BLOCK : head_dim;
}

// Stores unit i of a row as row `cell_row` of the cache.
void kv_encode(uint type, uint head_dim, uint row, uint i, uint cell_row) {
    uint to = cell_row * kv_row_units(type, head_dim) + i;
    if (type == KV_F32) {
        kv_put_f32(to, kv_value(row, i));
    } else if (type == KV_F16) {
        uint bits = half_bits(kv_value(row, i));
        kv_put(to, bits);
        kv_keep(row, i, kv_half(bits));
    } else if (type == KV_Q8_0) {
        encode_q8_0(row, i * KV_BLOCK, to * 17);
    } else {
        encode_q4_0(row, i * KV_BLOCK, to * 9);
    }
}
