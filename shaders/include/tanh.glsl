// tanh to 1e-7 relative: GLSL's own may lose the small arguments that scores mostly are.
float exact_tanh(float x) {
    float square = x * x;
    if (square < 0.04) {
        return x + x * square * (-0.33333333 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488)));
    }
    float e = exp(-2.0 * abs(x));
    return sign(x) * (1.0 - e) / (1.0 + e);
}
