// Floats as integers of the same order: -inf is above 0, both zeros are equal, NaN is 0.
uint order_key(float v) {
    uint bits = floatBitsToUint(v);
    uint magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0;
    }
    return magnitude == 0 ? 0x80000000u : (bits >> 31 == 1 ? ~bits : bits | 0x80000000u);
}
