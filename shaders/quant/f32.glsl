// F32: IEEE single.
const uint QUANT_BLOCK = 1;
const uint QUANT_BYTES = 4;

void decode8(uint64_t row, uint k, out float w[8]) {
    F32s src = F32s(row + k * 4);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        w[i] = src.f[i];
    }
}

const uint RUNS = 4;
struct Unit {
    vec4 q[8];
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    [[unroll]] for (uint j = 0; j < 4; j++) {
        uint start = float_run(u, j, k);
        w.q[2 * j] = load_floats4(row, start, k);
        w.q[2 * j + 1] = load_floats4(row, start + 4, k);
    }
    return w;
}

vec4 unit_q(Unit w, uint u, uint i) { return w.q[i]; }

vec2 unit_scale(Unit w, uint u, uint j) { return vec2(1.0, 0.0); }
