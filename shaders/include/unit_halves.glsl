// Units (see weights.glsl) of floats of 16 bits: what is left to the type is unit_q.
const uint RUNS = 4;
struct Unit {
    uvec4 q[4];
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    [[unroll]] for (uint j = 0; j < 4; j++) {
        w.q[j] = load_halves8(row, float_run(u, j, k), k);
    }
    return w;
}

vec2 unit_scale(Unit w, uint u, uint j) { return vec2(1.0, 0.0); }
