// Element i of the optional f32 vector at address `bias`; 0 without one. Then the load still happens, at
// `elsewhere`, any valid address: lavapipe 26.1 runs a load under `if (bias != 0)` ahead of the test and
// crashes. For the same reason i must be in bounds even where the result is not used.
float bias_at(uint64_t bias, uint i, uint64_t elsewhere) {
    bool absent = bias == 0;
    float b = F32s(absent ? elsewhere : bias).f[absent ? 0 : i];
    return absent ? 0.0 : b;
}
