// Q8_0: f16 d, i8 qs[32]; w = d * q.
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 34;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 34;
    float d = load_half(block);
    uvec2 q = load8_align2(block + (2 + (k & 31)));
    [[unroll]] for (uint i = 0; i < 4; i++) {
        w[i] = d * signed_byte_at(q.x, i);
        w[i + 4] = d * signed_byte_at(q.y, i);
    }
}

const uint RUNS = 1;
struct Unit {
    uint w[9];
    bool odd;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    uint64_t block = row + u * 34;
    w.odd = (uint(block) & 2) != 0;
    LOAD_WORDS(w.w, 9, block)
    return w;
}

#define UNIT_SIGNED true
uint unit_word(Unit w, uint u, uint i) { return after_half(w.w[i], w.w[i + 1], w.odd); }

vec2 unit_scale(Unit w, uint u, uint j) { return vec2(first_half(w.w[0], w.odd), 0.0); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 34;
    scale = vec2(load_half(block), 0.0);
    q = load16_align2(block + (2 + (k & 16)));
}
#endif
