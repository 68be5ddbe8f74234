// F32: IEEE single.
const uint QUANT_BLOCK = 1;
const uint QUANT_BYTES = 4;

void decode8(uint64_t row, uint k, out float w[8]) {
    F32s src = F32s(row + k * 4);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        w[i] = src.f[i];
    }
}
