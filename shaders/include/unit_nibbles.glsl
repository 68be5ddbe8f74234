// Units (see weights.glsl) of blocks of 18 bytes: f16 d, then the 16 bytes of 32 nibbles, elements 0..15 low,
// 16..31 high. What is left to the type are unit_word and unit_scale.
const uint RUNS = 1;
struct Unit {
    uint w[5];
    bool odd;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    uint64_t block = row + u * 18;
    w.odd = (uint(block) & 2) != 0;
    LOAD_WORDS(w.w, 5, block)
    return w;
}

// The nibbles of elements 4 i .. 4 i + 3, the low ones of four bytes.
uint unit_nibbles(Unit w, uint i) {
    return after_half(w.w[i % 4], w.w[i % 4 + 1], w.odd) >> (i / 4 * 4);
}
