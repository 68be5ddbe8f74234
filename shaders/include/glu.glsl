// Gated activations:
//   0  swiglu      silu(g) * u
//   1  geglu       gelu_tanh(g) * u
//   2  reglu       max(g, 0) * u
//   3  swiglu_oai  g, u clamped at `limit` (g from above, u both ways): g * sigmoid(alpha g) * (u + 1)
float sigmoid(float x) { return 1.0 / (1.0 + exp(-x)); }

float glu(uint op, float g, float u, float alpha, float limit) {
    if (op == 1) {
        // 0.5 (1 + tanh z) = sigmoid(2 z), which loses nothing where tanh is near -1
        return g * sigmoid(2.0 * 0.7978845608 * g * (1.0 + 0.044715 * g * g)) * u;
    }
    if (op == 2) {
        return max(g, 0.0) * u;
    }
    if (op == 3) {
        g = min(g, limit);
        u = clamp(u, -limit, limit);
        return g * sigmoid(alpha * g) * (u + 1.0);
    }
    return g * sigmoid(g) * u;
}
